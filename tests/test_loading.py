"""Reading stored pieces: which bytes are wanted, how a chunk is read, and what a tensor is read into."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from loading_kit import NAME, Written, commit, in_rows, path_of, replicated, written

from ftrun.checkpoint.checksums import CHUNK, FileRecord, record_of, whole
from ftrun.checkpoint.layout import MANIFEST, Root, attempt_key, rank_json, rank_shard
from ftrun.checkpoint.loading import assemble
from ftrun.checkpoint.loading.chunks import SCRATCH, SLICE, Chunk, Damaged, Into, read_chunk
from ftrun.checkpoint.loading.index import piece_problem
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.checkpoint.plan.pieces import Box, Piece, share
from ftrun.checkpoint.records import RankRecord, TensorEntry
from ftrun.errors import CorruptCheckpoint, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- which bytes ---------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    first = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    extent = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, first, strict=True))
    return Box(first, extent)


def part_of(array: Any, box: Box) -> Any:
    slices = [slice(first, first + extent) for first, extent in zip(box.offset, box.shape, strict=True)]
    return array[(*slices, ...)]


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes)
def test_a_run_is_cut_into_few_blocks_that_hold_each_of_its_elements_once(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    box = data.draw(boxes_in(shape))
    elements = part_of(array, box).reshape(-1)
    start = data.draw(st.integers(0, box.numel))
    stop = data.draw(st.integers(start, box.numel))
    found = list(assemble.blocks(box, start, stop))
    assert len(found) <= 2 * len(shape) + 1
    for first, block in found:
        content = part_of(array, block).reshape(-1)
        assert (content == elements[first : first + block.numel]).all()
        assert assemble.position(block.offset, box) == first
        assert assemble.is_run(block, box)
    assert sum(block.numel for _, block in found) == stop - start
    assert [first for first, _ in found] == sorted(first for first, _ in found)


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes, st.integers(1, 4))
def test_any_pieces_fill_any_block(data: st.DataObject, shape: tuple[int, ...], holders: int) -> None:
    """A tensor cut at some place in some dimension, each half shared by some holders, fills whatever is wanted."""
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    wanted = data.draw(boxes_in(shape))
    pieces, files = [], {}
    for number, box in enumerate(halves(data, shape)):
        elements = part_of(array, box).reshape(-1)
        for member in range(holders):
            start, stop = share(box.numel, member, holders)
            file = rank_shard(number * holders + member)
            files[file] = elements[start:stop].copy()
            pieces.append(Piece("t", box, start, stop, file, 0))
    found = assemble.parts(pieces, 4, wanted)
    assert assemble.is_filled(found, wanted)
    made = np.full(wanted.shape, -1, dtype=np.int32)
    for part in found:
        stored = files[part.file][part.offset // 4 :][: part.block.numel].reshape(part.block.shape)
        inner = part_of(stored, relative(part.common, part.block))
        part_of(made, relative(part.common, wanted))[...] = inner
        assert part.start == part.offset + 4 * assemble.position(part.common.offset, part.block)
        assert files[part.file].reshape(-1)[part.stop // 4 - 1] == inner.reshape(-1)[-1]
    assert (made == part_of(array, wanted)).all()


def halves(data: st.DataObject, shape: tuple[int, ...]) -> list[Box]:
    if not shape:
        return [Box((), ())]
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[dim]))
    first = tuple(at if each == dim else extent for each, extent in enumerate(shape))
    rest = tuple(extent - at if each == dim else extent for each, extent in enumerate(shape))
    offset = tuple(at if each == dim else 0 for each in range(len(shape)))
    return [box for box in (Box.whole(first), Box(offset, rest)) if box.numel]


def relative(inner: Box, outer: Box) -> Box:
    return Box(tuple(a - b for a, b in zip(inner.offset, outer.offset, strict=True)), inner.shape)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (Box((), ()), Box((), ()), True),
        (Box((1, 0), (2, 5)), Box((0, 0), (9, 5)), True),
        (Box((1, 1), (1, 3)), Box((0, 0), (9, 5)), True),
        (Box((1, 1), (2, 3)), Box((0, 0), (9, 5)), False),
        (Box((1, 1, 0), (1, 2, 4)), Box((0, 0, 0), (3, 3, 4)), True),
        (Box((0, 1, 0), (2, 2, 4)), Box((0, 0, 0), (3, 3, 4)), False),
        (Box((0, 0, 0), (2, 3, 1)), Box((0, 0, 0), (3, 3, 1)), True),
    ],
)
def test_which_blocks_lie_in_one_run(inner: Box, outer: Box, *, expected: bool) -> None:
    assert assemble.is_run(inner, outer) is expected


def test_pieces_with_a_hole_do_not_fill() -> None:
    box = Box.whole((4, 3))
    pieces = [Piece("t", box, 0, 5, "a", 0), Piece("t", box, 6, 12, "a", 20)]
    assert not assemble.is_filled(assemble.parts(pieces, 4, box), box)
    assert assemble.is_filled(assemble.parts(pieces, 4, Box((2, 0), (2, 3))), Box((2, 0), (2, 3)))


@pytest.mark.parametrize(
    ("piece", "problem"),
    [
        (Piece("t", Box.whole((4, 3)), 0, 12, "a", 8), ""),
        (Piece("t", Box((1, 0), (3, 3)), 2, 9, "a", 8), ""),
        (Piece("t", Box.whole((4,)), 0, 4, "a", 8), "a piece has 1 dimensions, the tensor 2"),
        (Piece("t", Box((2, 0), (3, 3)), 0, 9, "a", 8), "a piece reaches beyond it"),
        (Piece("t", Box.whole((4, 3)), 0, 13, "a", 0), "a piece is longer than its block"),
        (Piece("t", Box.whole((4, 3)), 5, 4, "a", 0), "a piece is longer than its block"),
        (Piece("t", Box.whole((4, 3)), 0, 12, "a", 6), "a piece lies at byte 6 of a, which has 100"),
        (Piece("t", Box.whole((4, 3)), 0, 12, "a", 56), "a piece lies at byte 56 of a, which has 100"),
    ],
)
def test_pieces_that_can_not_be_are_found(piece: Piece, problem: str) -> None:
    assert piece_problem(piece, (4, 3), 4, 100) == problem


# --- a chunk -------------------------------------------------------------------------------------------------


class Taken:
    """A use without memory of its own."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.data = bytearray(stop - start)

    def memory(self, start: int, stop: int) -> None:
        return None

    def take(self, start: int, data: memoryview) -> None:
        assert self.start <= start
        self.data[start - self.start : start - self.start + len(data)] = data


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, bytes]]:
    content = np.random.default_rng(1).bytes(CHUNK + 3 * SLICE + 77)
    path = tmp_path_factory.mktemp("big") / "file"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, content
    os.close(descriptor)


def chunk_of(content: bytes, number: int, *, changed: int = 0) -> Chunk:
    crc = crc32c(content[number * CHUNK : (number + 1) * CHUNK]) ^ changed
    return Chunk("file", len(content), number, crc)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 1)],
        [(CHUNK - 5, CHUNK + 5)],
        [(10, SLICE), (SLICE, SLICE + 1), (SLICE + 7, 3 * SLICE)],
        [(5, 100), (50, 200), (60, 70), (150, 2 * SLICE)],
        [(0, CHUNK + 3 * SLICE + 77), (4, 8), (4, 8)],
        [(each, each + 16) for each in range(0, 16_000, 16)],
        [(each, each + 16) for each in range(0, 16_000, 24)],
        [(CHUNK + each, CHUNK + each + 30) for each in range(0, 3_000, 20)],
    ],
)
def test_every_use_gets_its_bytes(big: tuple[int, bytes], ranges: list[tuple[int, int]], number: int) -> None:
    descriptor, content = big
    chunk = chunk_of(content, number)
    mine = [(a, b) for a, b in ranges if a < chunk.stop and b > chunk.start]
    taken = [Taken(*each) for each in mine]
    memory = [bytearray(b - a) for a, b in mine]
    uses = [*taken, *(Into(a, memoryview(each)) for (a, _), each in zip(mine, memory, strict=True))]
    read_chunk(descriptor, chunk, uses, memoryview(bytearray(SCRATCH)))
    for (a, b), one, other in zip(mine, taken, memory, strict=True):
        first, last = max(a, chunk.start), min(b, chunk.stop)
        assert one.data[first - a : last - a] == content[first:last]
        assert other[first - a : last - a] == content[first:last]
    for (a, b), expected in list(zip(mine, memory, strict=True))[:4]:  # alone: straight into memory
        alone = bytearray(b - a)
        read_chunk(descriptor, chunk, [Into(a, memoryview(alone))], memoryview(bytearray(SCRATCH)))
        assert alone == expected


def test_a_chunk_is_verified_whatever_is_wanted_of_it(big: tuple[int, bytes]) -> None:
    descriptor, content = big
    wrong = chunk_of(content, 1, changed=1)
    for uses in ([], [Taken(CHUNK, CHUNK + 1)], [Into(CHUNK, memoryview(bytearray(3 * SLICE + 77)))]):
        with pytest.raises(Damaged, match=rf"chunk 1 \(bytes {CHUNK} to {len(content) - 1}\) fails its checksum"):
            read_chunk(descriptor, wrong, uses, memoryview(bytearray(SCRATCH)))
    longer = Chunk("file", len(content) + 10, 1, 0)
    with pytest.raises(Damaged, match="ends before its"):
        read_chunk(descriptor, longer, [], memoryview(bytearray(SCRATCH)))


# --- into what -----------------------------------------------------------------------------------------------

VALUES: dict[str, torch.Tensor] = {
    "matrix": torch.randn(9, 7),
    "deep": torch.randn(3, 4, 5, 2).double(),
    "half": torch.randn(33).bfloat16(),
    "bytes": torch.arange(100, dtype=torch.uint8),
    "flags": torch.rand(4, 3) > 0.5,
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "complex": torch.randn(3, 3, dtype=torch.complex64),
    "float8": torch.randn(16).to(torch.float8_e4m3fn),
    "long": torch.arange(5),
}


def value(rank: int) -> dict[str, Any]:
    return {"tracked": {"it": dict(VALUES)}, "extra": {"rank": rank}}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


@pytest.fixture(params=[replicated(3), in_rows(3), in_rows(3, dim=1)], ids=["replicated", "rows", "columns"])
def stored_root(root: Root, request: pytest.FixtureRequest) -> Root:
    commit(root, written(3, value, request.param))
    return root


def test_without_a_template_tensors_are_plain_and_of_the_host(stored_root: Root) -> None:
    for rank in range(4):
        state = open_stored(stored_root, NAME, rank, 4)
        back = state.value("tracked", "it")
        assert list(back) == list(VALUES)
        assert all(same(back[key], each) for key, each in VALUES.items())
        assert (state.own, state.value("extra", "rank")) == (rank < 3, rank if rank < 3 else 0)
        state.close()


def test_templates_are_filled_where_they_are(stored_root: Root) -> None:
    template = {key: torch.zeros_like(each) for key, each in VALUES.items()}
    template["matrix"] = torch.nn.Parameter(torch.zeros(9, 7))
    back = open_stored(stored_root, NAME, 1, 2).value("tracked", "it", template)
    for key, each in VALUES.items():
        assert back[key] is template[key]
        assert same(back[key].detach(), each)


def test_templates_of_other_strides_and_types_are_filled_too(stored_root: Root) -> None:
    template: dict[str, Any] = {
        "matrix": torch.zeros(7, 9).t(),
        "deep": torch.zeros(3, 4, 5, 2, dtype=torch.float16).permute(0, 1, 2, 3)[:, :, :, :],
        "half": torch.zeros(66)[::2],
        "flags": torch.zeros(4, 6)[:, ::2],
    }
    back = open_stored(stored_root, NAME, 0, 1).value("tracked", "it", template)
    for key, each in template.items():
        assert back[key] is each
        assert torch.equal(each, VALUES[key].to(each.dtype))


def test_what_does_not_fit_is_read_beside_it(stored_root: Root) -> None:
    template: dict[str, Any] = {
        "matrix": torch.zeros(7, 9),
        "half": torch.zeros(1).expand(33),
        "long": torch.zeros(5, device="meta", dtype=torch.int64),
        "scalar": 7,
        "deep": {"not": "there"},
    }
    back = open_stored(stored_root, NAME, 0, 1).value("tracked", "it", template)
    assert all(same(back[key], each) for key, each in VALUES.items())
    assert torch.equal(template["matrix"], torch.zeros(7, 9))
    assert torch.equal(template["half"], torch.zeros(33))


def test_two_tensors_are_never_read_into_the_same_memory(root: Root) -> None:
    ones, twos = torch.ones(1000), torch.full((1000,), 2.0)
    commit(
        root, written(1, lambda rank: {"tracked": {"it": {"a": ones, "b": twos, "c": ones[:10] * 3}}}, replicated(1))
    )
    memory = torch.zeros(1500)
    template = {"a": memory[:1000], "b": memory[:1000], "c": memory[990:1000]}
    back = open_stored(root, NAME, 0, 1).value("tracked", "it", template)
    assert torch.equal(back["a"], ones)
    assert torch.equal(back["b"], twos)
    assert torch.equal(back["c"], ones[:10] * 3)
    assert sum(back[key] is template[key] for key in back) == 1


def test_tied_tensors_come_back_as_one_and_views_as_views(root: Root) -> None:
    flat = torch.arange(24.0)
    state = {"flat": flat, "tied": flat, "view": flat[6:18].view(3, 4), "across": flat.view(4, 6).t()}
    commit(root, written(2, lambda rank: {"tracked": {"it": state}}, replicated(2)))
    back = open_stored(root, NAME, 0, 1).value("tracked", "it")
    assert back["tied"] is back["flat"]
    assert all(torch.equal(back[key], each) for key, each in state.items())
    assert back["view"].data_ptr() == back["flat"].data_ptr() + 24
    into = torch.zeros(24)
    filled = open_stored(root, NAME, 0, 1).value("tracked", "it", {"flat": into})
    assert filled["flat"] is into
    assert filled["view"].data_ptr() == into.data_ptr() + 24
    alone = open_stored(root, NAME, 1, 2).value("tracked", "it", {"view": torch.zeros(3, 4)})
    assert torch.equal(alone["view"], state["view"])


def test_arrays_and_containers_come_back_as_they_were(root: Root) -> None:
    nested = {
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "tuple": (1, (torch.ones(2), [torch.zeros(3)])),
        "$": {"like a tag": torch.full((2,), 4.0)},
        2: [torch.tensor(1)],
    }
    commit(root, written(1, lambda rank: {"tracked": {"it": nested}, "extra": {"$": 1}}, replicated(1)))
    state = open_stored(root, NAME, 0, 1)
    back = state.value("tracked", "it")
    assert back["array"].dtype == np.uint16
    assert (back["array"] == nested["array"]).all()
    assert type(back["tuple"]) is tuple
    assert torch.equal(back["tuple"][1][0], torch.ones(2))
    assert torch.equal(back["$"]["like a tag"], torch.full((2,), 4.0))
    assert torch.equal(back[2][0], torch.tensor(1))
    assert state.names("extra") == ["$"]
    assert state.value("extra") == {"$": 1}


def test_an_outline_has_shapes_and_no_bytes(stored_root: Root) -> None:
    for rank in range(3):
        path_of(stored_root, rank_shard(rank)).write_bytes(b"")  # whoever reads it fails
    state = open_stored(stored_root, NAME, 0, 3)
    outline = state.outline("tracked", "it")
    assert {key: (each.shape, each.dtype) for key, each in outline.items()} == {
        key: (each.shape, each.dtype) for key, each in VALUES.items()
    }
    assert all(each.is_meta for each in outline.values())
    with pytest.raises(CorruptCheckpoint, match="ends before its"):
        state.fill(outline)


def test_names_that_are_not_there(stored_root: Root) -> None:
    state = open_stored(stored_root, NAME, 0, 3)
    assert state.names("tracked") == ["it"]
    assert state.names("nothing") == []
    with pytest.raises(KeyError):
        state.value("tracked", "other")
    with pytest.raises(ValueError, match="rank 3 of 3"):
        open_stored(stored_root, NAME, 3, 3)
    with pytest.raises(UsageError, match="no name of a checkpoint"):
        open_stored(stored_root, "../../etc", 0, 1)


def test_what_a_checkpoint_says_of_itself(stored_root: Root) -> None:
    state = open_stored(stored_root, str(NAME), 3, 5)
    assert (state.name, state.step, state.total, state.data) == (str(NAME), 20, 100, {"at": 20})
    assert (state.world_size, state.reason, state.own) == (3, "user", False)
    assert state.manifest is not None


# --- records that lie ----------------------------------------------------------------------------------------


def damaged(made: Written, which: int, **changes: Any) -> Written:
    """Another record for one rank, with checksums that fit."""
    fields = dict(made.records[which].__dict__) | changes
    made.files[rank_json(which)] = RankRecord(**fields).to_bytes()
    return made


NAME_OF_MATRIX = "tracked/it/matrix"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: {"rank": 0}, "r00001.json is that of rank 0"),
        (lambda record: {"attempt": "e00000001-s0000000001-00000000"}, "r00001.json is that of rank 1 of e00000001"),
        (lambda record: {"pieces": record.pieces[1:]}, "its pieces make up"),
        (lambda record: {"pieces": record.pieces + record.pieces[:1]}, "its pieces make up"),
        (lambda record: {"tensors": {}}, "it is not that of the other ranks"),
        (
            lambda record: {
                "tensors": {name: TensorEntry("int8", e.shape, e.ranks) for name, e in record.tensors.items()}
            },
            "it is not that of the other ranks of 0-2",
        ),
        (
            lambda record: {
                "pieces": tuple(Piece(*[*p.__dict__.values()][:4], "r00009.0.safetensors", 0) for p in record.pieces)
            },
            "MANIFEST.json does not list r00009",
        ),
        (
            lambda record: {"pieces": tuple(replace(piece, offset=10**9) for piece in record.pieces)},
            "lies at byte 1000000000 of",
        ),
    ],
)
def test_records_that_do_not_fit_together_are_refused(root: Root, change: Any, message: str) -> None:
    made = written(3, value, replicated(3))
    commit(root, damaged(made, 1, **change(made.records[1])))
    template = {key: torch.zeros_like(each) for key, each in VALUES.items()}
    with pytest.raises(CorruptCheckpoint, match=message):
        open_stored(root, NAME, 0, 2).value("tracked", "it", template)


@pytest.mark.parametrize("name", ["../r00000.0.safetensors", "/etc/passwd", "a/../../b", ".hidden", ""])
def test_names_that_lead_elsewhere_are_refused(root: Root, name: str) -> None:
    made = written(2, value, replicated(2))
    record = made.records[1]
    pieces = tuple(replace(piece, file=name) for piece in record.pieces)
    commit(root, damaged(made, 1, pieces=pieces))
    with pytest.raises(CorruptCheckpoint, match=r"r00001.json has a malformed tensor"):
        open_stored(root, NAME, 0, 1).value("tracked", "it")


@pytest.mark.parametrize("ranks", ["0-5", "7", "0-1,4"])
def test_ranks_that_there_were_not_are_refused(root: Root, ranks: str) -> None:
    made = written(2, value, replicated(2))
    entries = {name: TensorEntry(e.dtype, e.shape, ranks) for name, e in made.records[0].tensors.items()}
    commit(root, damaged(made, 0, tensors=entries))
    with pytest.raises(CorruptCheckpoint, match="which there was not"):
        open_stored(root, NAME, 0, 1).value("tracked", "it")


@pytest.mark.parametrize(
    "tree", [{"tracked": {"it": {"$": "tensor", "name": "nowhere"}}}, {"tracked": {"it": {"$": "what"}}}]
)
def test_trees_that_make_no_sense_are_refused(root: Root, tree: Any) -> None:
    made = written(1, value, replicated(1))
    commit(root, damaged(made, 0, tree=tree))
    with pytest.raises(CorruptCheckpoint, match=r"r00000\.json has a malformed tree"):
        open_stored(root, NAME, 0, 1).value("tracked", "it")


def test_a_manifest_of_another_attempt_or_format_is_refused(root: Root) -> None:
    made = written(1, value, replicated(1))
    commit(root, made, attempt="e00000001-s0000000001-00000000")
    with pytest.raises(CorruptCheckpoint, match=r"MANIFEST\.json is that of e00000001"):
        open_stored(root, NAME, 0, 1)
    for number, error in ((1, "early ftrun"), (3, "newer ftrun")):
        root.delete(attempt_key(NAME, MANIFEST))
        for file in made.files:
            root.delete(attempt_key(NAME, file))
        commit(root, made, format=number)
        with pytest.raises(UsageError, match=error):
            open_stored(root, NAME, 0, 1)
    root.delete(attempt_key(NAME, MANIFEST))
    with pytest.raises(CorruptCheckpoint, match=r"MANIFEST\.json is missing"):
        open_stored(root, NAME, 0, 1)


# --- memory --------------------------------------------------------------------------------------------------

_CHILD = """
    import resource, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ftrun.checkpoint import manifest
    manifest.FORMAT = 2
    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.loading.stored import open_stored

    where, name = sys.argv[1:]
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=640)
    local = torch.ones(16, 2**20 // 4)
    mesh = init_device_mesh("cpu", (640,))
    target = DTensor.from_local(local, mesh, [Shard(0)])
    assert target.shape == (10 * 1024, 2**20 // 4)
    open_stored(Root.open(where), name, 7, 640).value("extra")
    before = peak()
    back = open_stored(Root.open(where), name, 7, 640).value("tracked", "big", target)
    assert back is target
    assert not local.any()
    print(peak() - before)
"""


@pytest.mark.slow
def test_a_state_of_ten_gibibytes_is_restored_within_its_memory(root: Root) -> None:
    """Sparse files of zeros; a rank of many takes its part and reads nothing else."""
    rows, row, writers = 10 * 1024, 2**20, 40
    part = rows // writers
    zeros = crc32c(bytes(CHUNK))
    files, made = {}, Written(NAME, writers)
    for rank in range(writers):
        box = Box((rank * part, 0), (part, row // 4))
        piece = Piece("tracked/big", box, 0, box.numel, rank_shard(rank), 0)
        entry = TensorEntry("float32", (rows, row // 4), f"0-{writers - 1}")
        tree = {"tracked": {"big": {"$": "tensor", "name": "tracked/big"}}, "extra": {}}
        made.files[rank_json(rank)] = RankRecord(
            str(NAME), rank, 20, None, None, tree, {"tracked/big": entry}, (piece,)
        ).to_bytes()
        chunks = (zeros,) * (part * row // CHUNK)
        files[rank_shard(rank)] = FileRecord(part * row, whole(chunks, part * row), chunks)
    commit(root, made, files=files | {file: record_of(content) for file, content in made.files.items()})
    for file, record in files.items():
        with path_of(root, file).open("wb") as sparse:
            sparse.truncate(record.size)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD), str(root.path), str(NAME)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * CHUNK
