"""What one ``dcp.load`` reads: everything in the state by the names that DCP gives it, and where each of it lies."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType

from ftrun.checkpoint import offline
from ftrun.checkpoint.plan.pieces import Box
from ftrun.checkpoint.tree import by_key, is_tensor, is_whole, leaves, select, stored_name
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import LoadPlanner, ReadItem

    from ftrun.checkpoint.opened import Opened


@dataclass(frozen=True)
class Found:
    """What a load reads.

    Attributes:
        opened: the checkpoint.
        nodes: everything in the state by its name there, as the checkpoint's JSON.
        paths: where each was in the nested state.
        blocks: by name of each tensor, the blocks that it is read in.
    """

    opened: Opened
    nodes: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    blocks: dict[str, list[Box]]

    @classmethod
    def of(cls, opened: Opened, prefix: str | None) -> Found:
        """Look into a checkpoint: all of it, or the part under a path of keys.

        Raises:
            CorruptCheckpoint: its records are damaged.
            CheckpointError: they can't be read.
            UsageError: there is no such part.
        """
        tree = opened.tree
        if offline.is_dcp(tree) and prefix is None:
            # By the names that the planner gave them, whatever planner it was.
            nodes = offline.flat(tree)
            paths = {name: tuple(path) for name, path in (tree["paths"] or {}).items()}
        else:
            part = select(offline.nested(tree), offline.default_part(tree) if prefix is None else prefix)
            found = by_key(leaves(part))
            nodes = {name: node for name, (_, node) in found.items()}
            paths = {name: path for name, (path, _) in found.items()}
        blocks = {name: _blocks(opened, node) for name, node in nodes.items() if is_tensor(node)}
        return cls(opened, nodes, paths, blocks)

    def metadata(self) -> Metadata:
        """What DCP's planners need to know."""
        return Metadata(
            state_dict_metadata={name: self._describe(name) for name in self.nodes},
            planner_data=dict(self.paths) or None,
            storage_data=str(self.opened.name),
            storage_meta=StorageMeta(checkpoint_id=str(self.opened.name)),
        )

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Read items to where the planner wants them: what is stored as it is all together, the rest one by one."""
        direct: list[tuple[str, Box, torch.Tensor]] = []
        commits: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            node = self.nodes[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self.opened.value(node)))
                continue
            box, target = self._wanted(item), planner.resolve_tensor(item).detach()
            if tuple(target.shape) != box.shape:
                raise UsageError(f"{item.storage_index.fqn!r}: {list(box.shape)} go into {list(target.shape)}")
            if is_whole(node):
                direct.append((node["name"], box, target))
            else:
                target.copy_(_within(self.opened.value(node), box))
            commits.append((item, target))
        self.opened.read(direct)
        for item, target in commits:
            planner.commit_tensor(item, target)

    def _wanted(self, item: ReadItem) -> Box:
        """What an item asks for, in coordinates of the whole tensor."""
        base = item.storage_index.offset or (0,) * len(item.lengths)
        offset = tuple(first + inner for first, inner in zip(base, item.storage_offsets, strict=True))
        return Box(offset, tuple(item.lengths))

    def _describe(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        if name not in self.blocks:
            return BytesStorageMetadata()
        node = self.nodes[name]
        shape = self.opened.entry(node["name"]).shape if is_whole(node) else node["shape"]
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in self.blocks[name]]
        properties = TensorProperties(dtype=self.opened.dtype(stored_name(node)))
        return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _blocks(opened: Opened, node: Any) -> list[Box]:
    """The blocks of one tensor. A view is read as a whole, and so is what DCP would find split in two ways at once."""
    if not is_whole(node):
        return [Box.whole(tuple(node["shape"]))]
    boxes = opened.blocks(node["name"])
    if len({box.offset for box in boxes}) < len(boxes):
        return [Box.whole(opened.entry(node["name"]).shape)]
    return boxes


def _within(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (first, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, first, extent)
    return tensor


def _pickled(value: Any) -> io.BytesIO:
    """A value in the form that DCP's load planners take: as a pickle, made here of a value that is plain data."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
