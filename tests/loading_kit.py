"""Checkpoints and snapshots written by hand, file by file, so that reading is tested against the format alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root, attempt_key, rank_json, rank_shard
from ftrun.checkpoint.manifest import Manifest
from ftrun.checkpoint.memory.tier import put
from ftrun.checkpoint.plan.pieces import Box, Piece, ranks_text, share
from ftrun.checkpoint.records import RankRecord, Seal, TensorEntry, Word
from ftrun.checkpoint.state import encode
from ftrun.checkpoint.words import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ftrun.checkpoint.memory.tier import Tier

    Layout = Callable[[str, torch.Tensor], "Sequence[Box] | None"]

NAME = AttemptName(3, 20, "0123abcd")
STATE: dict[str, Any] = {"tracked": {}, "gradients": {}, "loaders": {}, "random": {}, "extra": {}}


@dataclass
class Written:
    """The files of a checkpoint that some ranks have made, in memory."""

    name: AttemptName
    world_size: int
    files: dict[str, bytes] = field(default_factory=dict)
    records: list[RankRecord] = field(default_factory=list)


def replicated(world_size: int) -> Layout:
    """All tensors below ``tracked`` are the same on all ranks."""
    return lambda name, tensor: [Box.whole(tuple(tensor.shape))] * world_size if name.startswith("tracked") else None


def in_rows(world_size: int, holders: int | None = None, dim: int = 0) -> Layout:
    """All tensors below ``tracked`` are cut along a dimension as torch.chunk does it; over some ranks, repeatedly."""
    holders = holders or world_size

    def layout(name: str, tensor: torch.Tensor) -> list[Box] | None:
        if not name.startswith("tracked"):
            return None
        if tensor.dim() <= dim:
            return [Box.whole(tuple(tensor.shape))] * world_size
        return [cut(tuple(tensor.shape), dim, rank % holders, holders) for rank in range(world_size)]

    return layout


def cut(shape: tuple[int, ...], dim: int, index: int, parts: int) -> Box:
    """One of the parts into which a dimension is cut."""
    step = -(-shape[dim] // parts)
    first = min(shape[dim], index * step)
    extent = min(step, shape[dim] - first)
    offset = tuple(first if each == dim else 0 for each in range(len(shape)))
    return Box(offset, tuple(extent if each == dim else size for each, size in enumerate(shape)))


def written(
    world_size: int, value: Callable[[int], Mapping[str, Any]], layout: Layout, name: AttemptName = NAME
) -> Written:
    """What the ranks of a world write, each with a value of its own in which shared tensors stand whole."""
    made = Written(name, world_size)
    for rank in range(world_size):
        encoded = encode(STATE | dict(value(rank)))
        entries, pieces, payload = planned(rank, encoded.tensors, layout)
        record = RankRecord(str(name), rank, name.step, 100, {"at": name.step}, encoded.tree, entries, pieces)
        made.records.append(record)
        made.files[rank_json(rank)] = record.to_bytes()
        if payload:
            made.files[rank_shard(rank)] = payload
    return made


def planned(
    rank: int, tensors: Mapping[str, torch.Tensor], layout: Layout
) -> tuple[dict[str, TensorEntry], tuple[Piece, ...], bytes]:
    entries, runs = {}, []
    for name, tensor in tensors.items():
        boxes = layout(name, tensor)
        holders = [rank] if boxes is None else list(range(len(boxes)))
        box = Box.whole(tuple(tensor.shape)) if boxes is None else boxes[rank]
        alike = [each for each in holders if boxes is None or boxes[each] == box]
        entries[name] = TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape), ranks_text(tuple(holders)))
        start, stop = share(box.numel, alike.index(rank), len(alike))
        if start < stop:
            runs.append((name, box, start, stop, content_of(tensor, box)[start:stop]))
    runs.sort(key=lambda run: -run[4].element_size())
    header = header_of({f"{name}[{box.offset}][{a}:{b}]": data for name, box, a, b, data in runs})
    payload, pieces = bytearray(header), []
    for name, box, start, stop, data in runs:
        pieces.append(Piece(name, box, start, stop, rank_shard(rank), len(payload)))
        payload += data.view(torch.uint8).numpy().tobytes()
    return entries, tuple(pieces), bytes(payload) if runs else b""


def content_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a block, row by row."""
    for dim, (first, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, first, extent)
    return tensor.contiguous().reshape(-1)


def header_of(runs: Mapping[str, torch.Tensor]) -> bytes:
    entries, offset = {}, 0
    for name, data in runs.items():
        size = data.numel() * data.element_size()
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def commit(root: Root, made: Written, **changes: Any) -> AttemptName:
    """Write the files to a root, with a manifest of them."""
    for file, content in made.files.items():
        root.create(attempt_key(made.name, file), content)
    root.create(attempt_key(made.name, MANIFEST), manifest_of(made, **changes).to_bytes())
    return made.name


def manifest_of(made: Written, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "format": 2,
        "ftrun": "0",
        "torch": torch.__version__,
        "python": "3",
        "run_id": "run",
        "epoch": made.name.epoch,
        "attempt": str(made.name),
        "parent": None,
        "step": made.name.step,
        "total": 100,
        "world_size": made.world_size,
        "nodes": 1,
        "reason": "user",
        "data": {"at": made.name.step},
        "files": {file: record_of(content) for file, content in made.files.items()},
        "written_at": "now",
    }
    return Manifest(**(fields | changes))


def seal(tier: Tier, made: Written, number: int = 0, ranks: Sequence[int] | None = None, **changes: Any) -> list[Seal]:
    """Put the files into slots of a memory tier, and seal them."""
    tier.create()
    seals = []
    for rank in range(made.world_size) if ranks is None else ranks:
        slot = tier.slots(rank)[number]
        slot.directory.mkdir(exist_ok=True)
        slot.seal.unlink(missing_ok=True)
        files = {}
        for file, path in ((rank_json(rank), slot.record), (rank_shard(rank), slot.payload)):
            if file in made.files:
                path.write_bytes(made.files[file])
                files[file] = (str(path), record_of(made.files[file]))
        fields: dict[str, Any] = {
            "attempt": str(made.name),
            "run_id": "run",
            "rank": rank,
            "world_size": made.world_size,
            "node": 0,
            "node_ranks": tuple(range(made.world_size)),
            "step": made.name.step,
            "total": 100,
            "reason": "interval",
            "data": {"at": made.name.step},
            "parent": None,
            "torch": torch.__version__,
            "run_attempt": 1,
            "files": files,
            "word": Word("same", {}),
            "sealed_at": 0.0,
        }
        seals.append(Seal(**(fields | changes)))
        put(slot.seal, seals[-1].to_bytes())
    return seals


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)


def path_of(root: Root, file: str, name: AttemptName = NAME) -> Path:
    return root.path / attempt_key(name, file)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
