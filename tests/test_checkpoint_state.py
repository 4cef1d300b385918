"""State to tensors and JSON and back, and the file that holds the tensors."""

from __future__ import annotations

import enum
import io
import json
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.checkpoint import shard
from ftrun.checkpoint.checksums import CHUNK, Checksums, record_of
from ftrun.checkpoint.state import Encoded, decode, encode
from ftrun.checkpoint.words import dtype_of
from ftrun.checkpoint.writer import stage
from ftrun.errors import CorruptCheckpoint, NotStorable


def through_files(encoded: Encoded) -> Any:
    """Everything that happens to state between encode and decode, in memory."""
    staged = stage(encoded)
    tree = json.loads(json.dumps(encoded.tree, allow_nan=False))
    file = io.BytesIO()
    record = shard.write(file, staged)
    file.seek(0)
    stored = shard.read(file, record, attempt="a", name="s")
    tensors = {name: shard.view_as(stored[name], t.dtype, tuple(t.shape)) for name, t in staged.items()}
    return decode(tree, tensors)


def same(a: Any, b: Any) -> bool:
    """Exactly the same: types, order, bits."""
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.arange(12).reshape(3, 4).t()[1:],
    torch.randn(5).to(torch.bfloat16),
    torch.randn(5).to(torch.float8_e4m3fn),
    torch.randn(3).to(torch.float8_e5m2fnuz),
    torch.tensor([1 + 2j, -3j], dtype=torch.complex128),
    torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
    torch.tensor([True, False, True]),
    torch.tensor([2**63 + 1], dtype=torch.uint64),
    torch.tensor([float("nan"), float("inf"), -0.0]),
]

keys = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.booleans(),
    st.binary(max_size=3),
    st.tuples(st.integers(), st.text(max_size=2)),
)
ARRAYS = [np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.array(["a", "bc"]), np.array(2.5), np.eye(3)[:, 1:]]
SCALARS = [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("né"), np.datetime64("2020-01-01"), np.str_("")]
TORCH_WORDS = [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")]
words = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.sampled_from(TENSORS),
    st.sampled_from(TORCH_WORDS),
    st.sampled_from(SCALARS),
    st.sampled_from(ARRAYS),
)
values = st.recursive(
    words,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.frozensets(keys, max_size=3),
        st.sets(keys, max_size=3),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "a", "items", "name"]), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items)),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_value_comes_back_exactly(value: Any) -> None:
    assert same(through_files(encode(value)), value)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_any_tensor_comes_back_exactly(tensor: torch.Tensor) -> None:
    assert same(through_files(encode({"x": tensor}))["x"], tensor)


@pytest.mark.parametrize(
    "value",
    [
        10**6000,
        -(2**64),
        "\ud83d\ude00",
        {"\ud83d": 1},
        {"$": "tuple", "items": [1]},
        {1: "a", "1": "b", True + 1: 0},
        Counter("aab"),
        [float("inf"), float("-inf"), float("nan"), -0.0, 5e-324],
        bytearray(b"x"),
    ],
    ids=range(9),
)
def test_what_json_alone_would_change(value: Any) -> None:
    assert same(through_files(encode(value)), value)


def test_common_state_is_plain_json() -> None:
    assert encode({"lr": 0.1, "betas": [0.9, 0.95], "name": None}).tree == {
        "lr": 0.1,
        "betas": [0.9, 0.95],
        "name": None,
    }


def test_a_training_state_comes_back_with_its_metadata_and_parameters_plain() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    encoded = encode(state)
    assert {"model/0.weight", "optimizer/state/0/exp_avg"} <= set(encoded.tensors)
    back = through_files(encoded)
    assert same(back, state)
    assert back["model"]._metadata == state["model"]._metadata
    parameter = through_files(encode(torch.nn.Parameter(torch.ones(2))))
    assert type(parameter) is torch.Tensor
    assert not parameter.requires_grad


def test_random_states_continue_where_they_were() -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    generator = np.random.default_rng(5)
    state["generator"] = generator.bit_generator.state
    back = through_files(encode(state))
    expected = (random.random(), np.random.rand(), torch.rand(1), generator.random())
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    generator.bit_generator.state = back["generator"]
    assert (random.random(), np.random.rand(), torch.rand(1), generator.random()) == expected


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    encoded = encode({"a": weight, "b": [weight.data], "row": weight[0], "conj": torch.ones(1), "other": weight.t()})
    assert set(encoded.tensors) == {"a", "row", "conj", "other"}
    back = through_files(encoded)
    assert back["a"] is back["b"][0]
    assert back["row"] is not back["a"]
    z = torch.tensor([1 + 1j])
    assert len(encode([z, z.conj()]).tensors) == 2, "the same memory, but other values"


def test_encoding_copies_nothing_and_staging_everything() -> None:
    weight = torch.zeros(3)
    encoded = encode({"w": weight})
    assert encoded.tensors["w"].data_ptr() == weight.data_ptr()
    staged = stage(encoded)
    weight += 1
    assert staged["w"].tolist() == [0, 0, 0]


def test_names_are_unique_and_legal() -> None:
    one = [torch.tensor(float(i)) for i in range(4)]
    value = {"a": {1: one[0], "1": one[1]}, "__metadata__": one[2], "\udcff": one[3]}
    encoded = encode(value)
    assert len(encoded.tensors) == 4
    safetensors.torch.save(encoded.tensors)
    assert same(through_files(encoded), value)


class Colour(enum.IntEnum):
    RED = 1


class Odd(torch.Tensor):
    pass


def cycle() -> list[Any]:
    items: list[Any] = []
    items.append({"again": items})
    return items


def deep(levels: int) -> Any:
    return [] if levels == 0 else [deep(levels - 1)]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"model": {"a": [0, 1, 2, print]}}, "tracked 'model' → ['a'][3]: a function can't be stored without pickle"),
        ({"x": Colour.RED}, "enum member"),
        ({"x": object()}, "a builtins.object"),
        ({"x": torch.ones(2).as_subclass(Odd)}, "class Odd"),
        ({"x": torch.eye(3).to_sparse()}, "sparse_coo"),
        ({"x": torch.empty(2, device="meta")}, "meta device"),
        ({"x": torch.empty(2, dtype=torch.uint4)}, "uint4"),
        ({"x": np.array([object()])}, "array of object"),
        ({"x": np.zeros(2, dtype=[("a", "f4")])}, "array of"),
        ({"x": defaultdict(lambda: 0)}, "defaultdict of a function"),
        ({"x": {print: 1}}, "a function"),
        ({"x": cycle()}, "holds itself"),
        ({"x": deep(500)}, "more than 100 levels"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_pickle_is_refused_by_its_path(value: Any, what: str) -> None:
    with pytest.raises(NotStorable, match=r"tracked '(x|model)'") as caught:
        encode(value)
    assert what in str(caught.value)
    assert "; " in str(caught.value), "says what to do"


@pytest.mark.parametrize(
    "tree",
    [{"$": "gadget"}, {"$": []}, {"$": "tensor", "name": "absent"}, {"$": "tuple"}, {"$": "float", "bits": "00"},
     {"$": "numpy", "dtype": "O", "base64": ""}, {"$": "torch.dtype", "name": "nn"}, {"$": "dict", "items": [[[], 1]]}],
    ids=str,
)  # fmt: skip
def test_a_malformed_tree_is_a_value_error(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(tree, {})


def test_the_safetensors_library_opens_the_file(tmp_path) -> None:
    tensors = {f"t{i}": t.resolve_conj().contiguous() for i, t in enumerate(TENSORS)}
    with (tmp_path / "x.safetensors").open("wb") as file:
        record = shard.write(file, tensors)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert record == record_of(data)
    assert (8 + int.from_bytes(data[:8], "little")) % 64 == 0
    opened = safetensors.torch.load_file(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert raw(opened[name]) == raw(tensor)
    assert opened["t0"].shape == (2, 3)
    assert opened["t7"].dtype == torch.uint8, "complex128 lies there as bytes"


@given(st.lists(st.integers(0, CHUNK), max_size=4))
@settings(max_examples=20, deadline=None)
def test_checksums_do_not_depend_on_how_the_bytes_came(sizes: list[int]) -> None:
    data = bytes(sum(sizes))
    sums = Checksums()
    start = 0
    for size in sizes:
        sums.update(memoryview(data)[start : start + size])
        start += size
    chunks = tuple(crc32c(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
    assert (sums.record().size, sums.record().crc32c, sums.record().chunks) == (len(data), crc32c(data), chunks)


def test_a_flipped_byte_is_found_in_its_chunk() -> None:
    file = io.BytesIO()
    record = shard.write(file, {"big": torch.zeros(CHUNK + 100, dtype=torch.uint8)})
    assert len(record.chunks) == 2
    for position, chunk in ((0, 0), (CHUNK - 1, 0), (CHUNK, 1), (record.size - 1, 1)):
        data = bytearray(file.getvalue())
        data[position] ^= 1
        with pytest.raises(CorruptCheckpoint, match=f"shard chunk {chunk} ") as caught:
            shard.read(io.BytesIO(data), record, attempt="attempt", name="shard")
        assert f"shard chunk {chunk} " in str(caught.value)
        assert caught.value.attempt == "attempt"


@pytest.mark.parametrize("length", [-1, 1])
def test_a_short_or_long_file_is_found(length: int) -> None:
    file = io.BytesIO()
    record = shard.write(file, {"x": torch.ones(10)})
    data = file.getvalue()[:-1] if length < 0 else file.getvalue() + b"\0"
    with pytest.raises(CorruptCheckpoint, match=r"ends before|is longer"):
        shard.read(io.BytesIO(data), record, attempt="a", name="s")


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        (2**63).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        with_header(b"[]"),
        with_header(b"{nope"),
        with_header(b"\xff\xff"),
        with_header(b"[" * 100_000),
        with_header({"x": 3}),
        with_header({"x": entry()}),
        with_header({"x": entry()}, b"12345"),
        with_header({"x": entry(offsets=(4, 8))}, b"12345678"),
        with_header({"x": entry(), "y": entry()}, b"1234"),
        with_header({"x": entry(), "y": entry(offsets=(2, 6))}, b"123456"),
        with_header({"x": entry(offsets=(4, 0))}, b"1234"),
        with_header({"x": entry(offsets=(0.0, 4))}, b"1234"),
        with_header({"x": entry(shape=(True,))}, b"1234"),
        with_header({"x": entry(shape=(-1, -1))}, b"1234"),
        with_header({"x": entry(shape="a")}, b"1234"),
        with_header({"x": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}),
        with_header({"x": entry(shape=(0, 2**70), offsets=(0, 0))}),
        with_header({"x": entry(dtype="F33")}, b"1234"),
        with_header({"x": entry(dtype=["F32"])}, b"1234"),
        with_header(b'{"x":{},"x":{}}'),
    ],
    ids=lambda content: repr(content[8:50]),
)
def test_a_malformed_shard_is_corrupt_and_no_crash(content: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        shard.read(io.BytesIO(content), record_of(content), attempt="a", name="s")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 250), st.binary(min_size=1, max_size=6))
def test_no_change_of_a_header_crashes_the_reader(position: int, change: bytes) -> None:
    file = io.BytesIO()
    shard.write(file, {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int8)})
    data = file.getvalue()
    data = data[:position] + change + data[position + len(change) :]
    try:
        shard.read(io.BytesIO(data), record_of(data), attempt="a", name="s")
    except CorruptCheckpoint:
        return


def test_dtypes_have_names() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="no dtype"):
        dtype_of("nn")
