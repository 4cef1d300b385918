"""What one rank of a ``dcp.save`` stores: a safetensors file that is written while its tensors are looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import WriteItemType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ftrun.checkpoint.checksums import Checksums, FileRecord
from ftrun.checkpoint.layout import rank_shard
from ftrun.checkpoint.plan.pieces import Box, Piece, ranks_text
from ftrun.checkpoint.records import TensorEntry
from ftrun.checkpoint.refusals import tensor_problem
from ftrun.checkpoint.safetensors_stream import Layout, content, lay_out, slices
from ftrun.checkpoint.state import encode
from ftrun.checkpoint.words import dtype_name
from ftrun.errors import CheckpointError, NotStorable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint import SavePlanner, WriteItem

    from ftrun.checkpoint.dcp.records import Order
    from ftrun.checkpoint.safetensors_file import Content


@dataclass
class Payload:
    """A rank's tensors and values. One thread uses it.

    Attributes:
        layout: of its file.
        look_up: gives each tensor, by its key in the file, when its turn comes.
        entries: its tensors by their names in the checkpoint.
        pieces: where they lie.
        values: what is no tensor, as JSON, by name.
    """

    layout: Layout
    look_up: dict[str, Callable[[], torch.Tensor]]
    entries: dict[str, TensorEntry]
    pieces: tuple[Piece, ...]
    values: dict[str, Any]
    _record: FileRecord | None = field(default=None, init=False)

    @classmethod
    def of(cls, order: Order, items: list[WriteItem], planner: SavePlanner) -> Payload:
        """Lay out what a plan says.

        Raises:
            NotStorable: a value can't be stored without pickle.
            UsageError: two things have the same name.
        """
        builder = _Builder(order, planner)
        for item in items:
            builder.add(item)
        return builder.build()

    @property
    def size(self) -> int:
        """Bytes of the file; 0 where the rank has no tensors and needs none."""
        return self.layout.size if self.layout.contents else 0

    def source(self) -> Iterator[memoryview]:
        """The file's bytes, from the start."""
        sums = Checksums()
        for view in self._views():
            sums.update(view)
            yield view
        self._record = sums.record()

    def record(self) -> FileRecord:
        """What was written last."""
        if self._record is None:
            raise CheckpointError("a storage wrote a file without reading all of it")
        return self._record

    def _views(self) -> Iterator[memoryview]:
        yield memoryview(self.layout.header)
        for item in self.layout.contents:
            tensor = self.look_up[item.key]()
            if dtype_name(tensor.dtype) != item.dtype or tensor.nbytes != item.size:
                raise CheckpointError(
                    f"the planner said that {item.key!r} is {item.dtype} {list(item.shape)}, and gave "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
                )
            yield from slices(tensor)


@dataclass(frozen=True)
class _Block:
    """A part of a tensor, before it has a place in the file."""

    name: str
    content: Content
    box: Box


class _Builder:
    """Collects what a plan says."""

    def __init__(self, order: Order, planner: SavePlanner) -> None:
        self._order, self._planner = order, planner
        self._blocks: dict[str, _Block] = {}
        self._look_up: dict[str, Callable[[], torch.Tensor]] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._values: dict[str, Any] = {}

    def add(self, item: WriteItem) -> None:
        if item.type == WriteItemType.BYTE_IO:
            self._add_value(item)
        else:
            self._add_tensor(item)

    def build(self) -> Payload:
        layout = lay_out(block.content for block in self._blocks.values())
        file = rank_shard(self._order.rank)
        pieces = []
        for each, offset in zip(layout.contents, layout.offsets, strict=True):
            block = self._blocks[each.key]
            pieces.append(Piece(block.name, block.box, 0, block.box.numel, file, offset))
        return Payload(layout, self._look_up, self._entries, tuple(pieces), self._values)

    def _add_tensor(self, item: WriteItem) -> None:
        name, data = item.index.fqn, item.tensor_data
        if data is None:
            raise UsageError(f"the planner says nothing about the tensor {name!r}")
        shape, box = tuple(data.size), Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        dtype = data.properties.dtype
        self._entries[name] = TensorEntry(dtype_name(dtype), shape, self._order.holders[name])
        self._add_block(name, dtype, shape, box, lambda: self._resolve(item))

    def _resolve(self, item: WriteItem) -> torch.Tensor:
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"the planner gave a {type(tensor).__name__} for the tensor {item.index.fqn!r}")
        # Of a class of the user's own the numbers are stored where it has some: loading copies them into what is there.
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_traceable_wrapper_subclass(tensor)
        problem = tensor_problem(tensor if plain else tensor.as_subclass(torch.Tensor))
        if problem is not None:
            what, advice = problem
            advice = advice.replace("track ", "save ")
            raise NotStorable(f"{item.index.fqn!r}: {what} can't be stored without pickle; {advice}")
        return tensor

    def _add_value(self, item: WriteItem) -> None:
        name = item.index.fqn
        look_up = getattr(self._planner, "lookup_object", None)
        if look_up is None:
            raise NotStorable(
                f"{name!r}: {type(self._planner).__name__} gives it as a pickle only; extend DefaultSavePlanner, whose "
                "lookup_object gives the value itself"
            )
        encoded = encode({name: look_up(item.index)})
        ((_, self._values[name]),) = encoded.tree.items() if "$" not in encoded.tree else encoded.tree["items"]
        for key, tensor in encoded.tensors.items():
            if type(tensor) is not torch.Tensor:
                raise NotStorable(f"{name!r}: a {type(tensor).__name__} within {key!r} can't be stored as one value")
            if key in self._entries or key in self._order.holders:
                raise UsageError(f"two tensors have the name {key!r}; rename one")
            shape = tuple(tensor.shape)
            self._entries[key] = TensorEntry(dtype_name(tensor.dtype), shape, ranks_text((self._order.rank,)))
            self._add_block(key, tensor.dtype, shape, Box.whole(shape), partial(_same, tensor))

    def _add_block(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], box: Box, look_up: Callable[[], torch.Tensor]
    ) -> None:
        key = name if box.shape == shape else f"{name}[{_ranges(box)}]"
        while key in self._blocks or key == "__metadata__":
            key += "~"
        self._blocks[key] = _Block(name, content(key, dtype, box.shape), box)
        self._look_up[key] = look_up


def holders(items: list[list[WriteItem]]) -> list[dict[str, str]]:
    """By rank, and by name of each tensor that it writes a part of: the ranks that do."""
    ranks: dict[str, list[int]] = {}
    for rank, mine in enumerate(items):
        for name in {item.index.fqn for item in mine if item.type != WriteItemType.BYTE_IO}:
            ranks.setdefault(name, []).append(rank)
    texts = {name: ranks_text(tuple(found)) for name, found in ranks.items()}
    return [{item.index.fqn: texts[item.index.fqn] for item in mine if item.index.fqn in texts} for mine in items]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _ranges(box: Box) -> str:
    return ",".join(f"{start}:{start + extent}" for start, extent in zip(box.offset, box.shape, strict=True))
