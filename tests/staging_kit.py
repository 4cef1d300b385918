"""What the tests of the memory tier and of staging share: plans made by hand, and the bytes that must come out."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint.layout import rank_shard
from ftrun.checkpoint.memory.slot_memory import SlotMemory
from ftrun.checkpoint.plan.pieces import Box, Piece
from ftrun.checkpoint.records import TensorEntry, Word
from ftrun.checkpoint.staging.stager import Stager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ftrun.checkpoint.plan.planner import Plan
    from ftrun.checkpoint.state import Encoded


@dataclass(frozen=True)
class Copy:
    name: str
    tensor: torch.Tensor
    piece: Piece


@dataclass(frozen=True)
class OwnPlan:
    """A plan in which every tensor is this rank's own."""

    entries: dict[str, TensorEntry]
    copies: tuple[Copy, ...]
    header: bytes
    size: int
    verify: dict[str, torch.Tensor] = field(default_factory=dict)

    def word(self, digests: Mapping[str, str], position: str) -> Word:
        return Word(position, {"0": json.dumps(dict(digests), sort_keys=True)})

    def with_digests(self, digests: Mapping[str, str]) -> dict[str, TensorEntry]:
        return {name: replace(entry, digest=digests.get(name)) for name, entry in self.entries.items()}


def plan_of(tensors: Mapping[str, torch.Tensor], *, verify: bool = False, rank: int = 0) -> OwnPlan:
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    sizes = {name: tensors[name].numel() * tensors[name].dtype.itemsize for name in names}
    header: dict[str, Any] = {}
    at = 0
    for name in names:
        header[name] = {"dtype": "U8", "shape": [sizes[name]], "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = 8 + len(text)
    copies = []
    for name in names:
        tensor, offset = tensors[name], start + header[name]["data_offsets"][0]
        piece = Piece(name, Box.whole(tuple(tensor.shape)), 0, tensor.numel(), rank_shard(rank), offset)
        copies.append(Copy(name, tensor, piece))
    entries = {
        name: TensorEntry(str(each.dtype).removeprefix("torch."), tuple(each.shape), str(rank))
        for name, each in tensors.items()
    }
    return OwnPlan(
        entries,
        tuple(copies),
        len(text).to_bytes(8, "little") + text,
        start + at if names else 0,
        dict(tensors) if verify else {},
    )


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in the order of its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(path: Path, plan: OwnPlan) -> dict[str, bytes]:
    """What a payload holds, by tensor."""
    content = path.read_bytes()
    assert len(content) == plan.size
    assert content.startswith(plan.header)
    return {each.name: content[each.piece.offset : each.piece.offset + each.tensor.nbytes] for each in plan.copies}


def memory_for(path: Path, plan: OwnPlan) -> SlotMemory:
    memory = SlotMemory(path)
    memory.resize(plan.size)
    return memory


class HeldBack:
    """A slot, and a stager whose copies in the background wait until the loop has done what it wants to do first."""

    def __init__(self, directory: Path) -> None:
        self.stager = Stager(overlap=True)
        self._path, self._memory = directory / "slot", SlotMemory(directory / "slot")
        self._gate = threading.Event()
        self._ended: list[tuple[Any, ...]] = []

    def stage(self, plan: Plan, encoded: Encoded) -> set[str]:
        """What the next optimizer step waits for."""
        self._memory.resize(plan.size)
        self._gate, self._ended = threading.Event(), []
        gate, ended = self._gate, self._ended
        self.stager.in_background(lambda: gate.wait(60) and None)
        self.stager.stage(plan, self._memory, encoded.tensors, lambda *told: ended.append(told), encoded.alike)
        assert self.stager._pending is not None
        return set(self.stager._pending._orders.waiting)

    def step(self, step: Callable[[], object]) -> tuple[set[str], bytes]:
        """Let the copies go on, and the loop make its step: what is torn, and what the slot holds."""
        self._gate.set()
        step()
        assert self.stager.settle(60)
        (torn, _found, error), *_ = self._ended
        assert error is None
        return set(torn), self._path.read_bytes()

    def close(self) -> None:
        self.stager.close(60)
        self._memory.close()
