"""State to tensors and JSON and back."""

from __future__ import annotations

import enum
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_kit import Saved, restored

from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.state import Encoded, decode, encode
from ftrun.checkpoint.words import dtype_of
from ftrun.errors import NotStorable


def through_files(encoded: Encoded) -> Any:
    """Everything that happens to state between encode and decode, in memory."""
    return restored([Saved(0, Planner(0, 1, None).plan(encoded, {}, 1), encoded)])[0]


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
    plain = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


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
    encoded = encode({"a": weight, "b": [weight.data], "other": torch.ones(1)})
    assert set(encoded.tensors) == {"a", "other"}
    back = through_files(encoded)
    assert back["a"] is back["b"][0]
    z = torch.tensor([1 + 1j])
    assert len(encode([z, z.conj()]).tensors) == 2, "the same memory, but other values"
    scattered = torch.randn(4, 6)[:, ::2]
    assert len(encode([scattered, scattered.view(4, 3)]).tensors) == 1


def flat_and_parts() -> dict[str, Any]:
    """Parameters that are parts of one buffer, found before it."""
    flat = torch.randn(24)
    matrix = flat[4:16].view(3, 4)
    return {"parts": [flat[:4], matrix, matrix.t(), matrix[1], matrix[:, 2], flat[3].expand(5)], "flat": flat}


def test_views_are_stored_as_such_and_stay_views() -> None:
    value = flat_and_parts()
    encoded = encode(value)
    assert list(encoded.tensors) == ["flat"]
    assert encoded.tree["parts"][1] == {"$": "view", "of": "flat", "shape": [3, 4], "stride": [4, 1], "offset": 4}
    back = through_files(encoded)
    assert same(back, value)
    back["flat"] += 1
    value["flat"] += 1
    assert same(back, value), "one memory, as before"


BUFFER = torch.arange(40.0)
COMPLEX = torch.ones(4, dtype=torch.complex64)


def test_a_view_is_found_wherever_its_tensor_lies() -> None:
    room = torch.arange(100.0)
    node = {"$": "view", "of": "flat", "shape": [2, 2], "stride": [3, 1], "offset": 20}
    view = decode(node, {"flat": room[10:35]})
    assert view.tolist() == [[30, 31], [33, 34]]
    assert view.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
    assert decode(node, {"flat": room[:50:2]}).tolist() == [[40, 42], [46, 48]]


OVERLAPS: dict[str, tuple[Any, set[str]]] = {
    "two that overlap in part": ({"a": BUFFER[:20], "b": BUFFER[10:30]}, {"a", "b"}),
    "side by side": ({"a": BUFFER[:20], "b": BUFFER[20:]}, {"a", "b"}),
    "inside one of two": ({"a": BUFFER[:20], "b": BUFFER[10:30], "c": BUFFER[12:14]}, {"a", "b"}),
    "the same extent in two shapes": ({"a": BUFFER.view(5, 8), "b": BUFFER, "c": BUFFER.view(8, 5)}, {"a"}),
    "inside what is not contiguous": ({"a": BUFFER.view(5, 8)[:, :4], "b": BUFFER[:3]}, {"a", "b"}),
    "another type": ({"a": BUFFER, "b": BUFFER.view(torch.int32)[:4]}, {"a", "b"}),
    "complex and its parts": (
        {"a": COMPLEX, "b": torch.view_as_real(COMPLEX)},
        {"a", "b"},
    ),
    "a conjugate of a part": ({"a": COMPLEX, "b": COMPLEX[:2].conj()}, {"a", "b"}),
    "nested": ({"c": BUFFER[2:4], "b": BUFFER[2:9], "a": BUFFER}, {"a"}),
    "ties of a view": ({"a": BUFFER, "b": BUFFER[3:], "c": BUFFER[3:]}, {"a"}),
    "empty parts": ({"a": BUFFER, "b": BUFFER[:0], "c": BUFFER[5:5]}, {"a", "b", "c"}),
    "an array within another": ({"a": (n := np.arange(9)), "b": n[2:5], "c": n}, {"a", "b"}),
    "an array and a tensor": ({"a": (n := np.zeros(9)), "b": torch.from_numpy(n)}, {"a", "b"}),
    "bytes and a tensor": ({"a": (n := np.zeros(9, np.uint8)), "b": torch.from_numpy(n)[2:]}, {"a"}),
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_shared_memory(kind: str) -> None:
    value, stored = OVERLAPS[kind]
    encoded = encode(value)
    assert set(encoded.tensors) == stored
    assert same(through_files(encoded), value)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 40), st.integers(1, 3)), max_size=8))
def test_any_slices_of_one_memory_come_back_exactly(slices: list[tuple[int, int, int]]) -> None:
    value = [BUFFER[start:stop:step] for start, stop, step in slices]
    encoded = encode(value)
    assert same(through_files(encoded), value)
    held = [each for each in value if each.is_contiguous() and each.numel()]
    for each in held:
        outer = [o for o in held if o.data_ptr() <= each.data_ptr() and ends(o) >= ends(each) and o is not each]
        assert len(encoded.tensors) <= len(value) - bool(outer)


def ends(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes


@pytest.mark.parametrize(
    "change", [{"offset": 21}, {"offset": -1}, {"shape": [2, 2]}, {"stride": [-1]}, {"shape": [2**40]}, {"offset": 1.5},
               {"stride": [2**62]}, {"of": "none"}],
    ids=str,
)  # fmt: skip
def test_a_view_that_reaches_beyond_its_tensor_is_malformed(change: dict[str, Any]) -> None:
    node = {"$": "view", "of": "flat", "shape": [4], "stride": [1], "offset": 20} | change
    room = torch.zeros(100)
    with pytest.raises(ValueError, match=r"."):
        decode(node, {"flat": room[10:34]})


def test_encoding_copies_nothing() -> None:
    weight = torch.zeros(3)
    assert encode({"w": weight}).tensors["w"].data_ptr() == weight.data_ptr()


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


def test_dtypes_have_names() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="no dtype"):
        dtype_of("nn")
