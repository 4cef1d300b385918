"""The file of a rank: a safetensors file that other tools open, whatever its tensors are called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.checkpoint import safetensors_file
from ftrun.checkpoint.plan.layout import Part, lay_out
from ftrun.checkpoint.plan.pieces import Box
from ftrun.checkpoint.safetensors_file import Content
from ftrun.checkpoint.words import dtype_of
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FILE = "r00003.0.safetensors"
SIZES = {"float32": 4, "bfloat16": 2, "int8": 1, "complex128": 16, "float8_e5m2fnuz": 1, "bool": 1, "int64": 8}


def part(
    name: str,
    shape: tuple[int, ...],
    box: Box | None = None,
    run: tuple[int, int] | None = None,
    dtype: str = "float32",
) -> Part:
    box = box or Box.whole(shape)
    start, stop = run or (0, box.numel)
    return Part(name, dtype, SIZES[dtype], shape, box, start, stop)


def opened(parts: list[Part]) -> dict[str, torch.Tensor]:
    layout = lay_out(parts, FILE)
    content = layout.header + bytes(layout.size - len(layout.header))
    return safetensors.torch.load(content)


def test_keys_say_what_a_part_is() -> None:
    parts = [
        part("w", (4, 6)),
        part("x", (1024, 64), Box((512, 0), (512, 64))),
        part("y", (1024, 64), Box((0, 0), (512, 64)), (8, 64)),
        part("z", (100,), run=(0, 50)),
        part("s", ()),
        part("c", (2, 2), dtype="complex128"),
    ]
    found = {name: tuple(each.shape) for name, each in opened(parts).items()}
    assert found == {
        "w": (4, 6),
        "x[512:1024,0:64]": (512, 64),
        "y[0:512,0:64][8:64]": (56,),
        "z[0:50]": (50,),
        "s": (),
        "c": (64,),
    }


def test_keys_are_unique_whatever_tensors_are_called() -> None:
    parts = [
        part("w", (8,), run=(0, 4)),
        part("w[0:4]", (3,)),
        part("w[0:4]~1", (2,)),
        part("w", (8,), Box((0,), (4,))),
        part("a/b~1", ()),
        part("a/b", ()),
        part('quote " and \\ and \u00e9', ()),
    ]
    keys = set(opened(parts))
    assert len(keys) == len(parts)
    assert {"w[0:4]", "w[0:4]~1", "a/b", "a/b~1", 'quote " and \\ and \u00e9'} <= keys


names = st.sampled_from(["a", "a[0:1]", "a[0:2]", "a~1", "a[0:2]~1", "b"])
any_part = st.builds(
    lambda name, rows, run, dtype: part(name, (6,), Box((0,), (rows,)), (0, min(run, rows)), dtype),
    names,
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(sorted(SIZES)),
)


def of_different_tensors(parts: list[Part]) -> bool:
    whole = [each.tensor for each in parts if each.box.shape == each.shape and each.is_block]
    return len(whole) == len(set(whole))


@settings(max_examples=200, deadline=None)
@given(st.lists(any_part, max_size=12).filter(of_different_tensors))
def test_any_parts_make_a_file_that_the_library_opens(parts: list[Part]) -> None:
    layout = lay_out(parts, FILE)
    assert sorted(layout.order) == list(range(len(parts)))
    if not parts:
        assert (layout.header, layout.size) == (b"", 0)
        return
    assert len(opened(parts)) == len(parts)
    end = len(layout.header)
    assert end % 64 == 0
    for number, piece in zip(layout.order, layout.pieces, strict=True):
        each = parts[number]
        assert (piece.tensor, piece.box, piece.start, piece.stop) == (each.tensor, each.box, each.start, each.stop)
        assert piece.file == FILE
        assert piece.offset == end
        assert piece.offset % each.itemsize == 0
        end += (each.stop - each.start) * each.itemsize
    assert end == layout.size


def test_headers_are_read_back() -> None:
    contents = [Content(name, name, (2, 3), 6 * size) for name, size in SIZES.items()]
    header = safetensors_file.header(contents)
    spans = safetensors_file.parse(header[8:], sum(each.size for each in contents))
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    for each in contents:
        span = spans[each.key]
        assert span.end - span.start == each.size
        known = each.dtype in safetensors_file.NAMES
        assert (span.dtype, span.shape) == ((each.dtype, (2, 3)) if known else ("uint8", (each.size,)))


def test_every_dtype_of_the_format_has_its_size() -> None:
    for name, stored in safetensors_file.NAMES.items():
        size = dtype_of(name).itemsize
        header = json.dumps({"x": {"dtype": stored, "shape": [3], "data_offsets": [0, 3 * size]}}).encode()
        assert safetensors_file.parse(header, 3 * size)["x"].dtype == name


def test_more_tensors_than_a_header_can_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="don't fit one safetensors header"):
        safetensors_file.header(
            [Content("x" * 60_000_000, "int8", (1,), 1), Content("y" * 60_000_000, "int8", (1,), 1)]
        )


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"", 0),
        (b"{nope", 0),
        (b"\xff\xff", 0),
        (b"[" * 100_000, 0),
        ([], 0),
        ({"x": 3}, 0),
        ({"x": entry()}, 0),
        ({"x": entry()}, 5),
        ({"x": entry(offsets=(4, 8))}, 8),
        ({"x": entry(), "y": entry()}, 4),
        ({"x": entry(), "y": entry(offsets=(2, 6))}, 6),
        ({"x": entry(offsets=(4, 0))}, 4),
        ({"x": entry(offsets=(0.0, 4))}, 4),
        ({"x": entry(shape=(True,))}, 4),
        ({"x": entry(shape=(-1, -1))}, 4),
        ({"x": entry(shape="a")}, 4),
        ({"x": entry(shape=(0, 2**70), offsets=(0, 0))}, 0),
        ({"x": entry(dtype="F33")}, 4),
        ({"x": entry(dtype=["F32"])}, 4),
        (b'{"x":{},"x":{}}', 0),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_malformed_header_is_a_value_error_and_no_crash(header: Any, size: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises((ValueError, RecursionError)):
        safetensors_file.parse(text, size)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 250), st.binary(min_size=1, max_size=6))
def test_no_change_of_a_header_crashes_the_reader(position: int, change: bytes) -> None:
    header = safetensors_file.header([Content("a", "float32", (3,), 12), Content("b", "int8", (2, 2), 4)])[8:]
    try:
        safetensors_file.parse(header[:position] + change + header[position + len(change) :], 16)
    except (ValueError, RecursionError):
        return
