"""A committed checkpoint, opened: its records, and any part of any of its tensors, verified while it is read.

For those who read a checkpoint from outside a run: :func:`ftrun.load`, ``ftrun ckpt export``, and the reader for
``torch.distributed.checkpoint``. A run restores through :mod:`ftrun.checkpoint.loading.stored`.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from ftrun.checkpoint.layout import AttemptName, Root, attempt_key, rank_json
from ftrun.checkpoint.loading.files import Files
from ftrun.checkpoint.loading.index import Index
from ftrun.checkpoint.loading.node_cache import NodeCache
from ftrun.checkpoint.loading.targets import uses
from ftrun.checkpoint.loading.tiers import RootCopies
from ftrun.checkpoint.loading.tree import names_in
from ftrun.checkpoint.plan.pieces import Box
from ftrun.checkpoint.state import decode
from ftrun.checkpoint.words import dtype_of
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ftrun.checkpoint.loading.chunks import Use
    from ftrun.checkpoint.manifest import Manifest
    from ftrun.checkpoint.records import TensorEntry
    from ftrun.errors import CorruptCheckpoint


class Opened:
    """One rank's view of a checkpoint. One thread uses it; it reads with several.

    Nothing but the manifest is read before it is needed. Close it, or use it as a context: what was downloaded on
    the way goes then.

    Args:
        root: the checkpoint root.
        name: name of the checkpoint.
        rank: whose tensors and values are wanted.

    Raises:
        CorruptCheckpoint: the manifest is missing or damaged.
        CheckpointError: it can't be read.
        UsageError: another version of ftrun wrote it, or it has no such rank.
    """

    def __init__(self, root: Root, name: AttemptName, rank: int = 0) -> None:
        self.name, self.rank = name, rank
        self._cache = NodeCache(
            lambda: Path(tempfile.gettempdir()) / f"ftrun-{os.getuid()}" / "read",
            str(name),
            lambda file, first, view: root.read_into(attempt_key(name, file), first, view),
        )
        self._files = Files(root, name, [], RootCopies(root, name, self._cache))
        self._index = Index(self._files, lambda kind: self._dtype(kind).itemsize)
        if not 0 <= rank < self.manifest.world_size:
            raise UsageError(f"checkpoint {name} has ranks 0 to {self.manifest.world_size - 1}, and no rank {rank}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything. Again is no error."""
        self._cache.close()

    @property
    def manifest(self) -> Manifest:
        """What was committed."""
        manifest = self._files.manifest
        assert manifest is not None  # only a snapshot in memory may have none
        return manifest

    @property
    def tree(self) -> Any:
        """The rank's values, as :func:`ftrun.checkpoint.state.encode` writes them."""
        return self._index.record(self.rank).tree

    def entry(self, tensor: str) -> TensorEntry:
        """Type, shape and holders of a tensor of this rank's tree."""
        try:
            return self._index.record(self.rank).tensors[tensor]
        except KeyError:
            raise self._malformed(f"it names no tensor {tensor!r}") from None

    def dtype(self, tensor: str) -> torch.dtype:
        """Type of a tensor's elements."""
        return self._dtype(self.entry(tensor).dtype)

    def blocks(self, tensor: str) -> list[Box]:
        """The blocks into which a tensor was split, each once."""
        self.entry(tensor)
        return list(dict.fromkeys(piece.box for piece in self._index.pieces(self.rank, tensor)))

    def tensor(self, tensor: str) -> torch.Tensor:
        """All of a tensor, in CPU memory of its own.

        Raises:
            CorruptCheckpoint: bytes are missing or aren't those that were written.
            CheckpointError: they can't be read.
        """
        return self.tensors([tensor])[tensor]

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """All of some tensors, read together.

        Raises:
            CorruptCheckpoint: bytes are missing or aren't those that were written.
            CheckpointError: they can't be read.
        """
        made = {name: torch.empty(self.entry(name).shape, dtype=self.dtype(name)) for name in names}
        self.read((name, Box.whole(tuple(tensor.shape)), tensor) for name, tensor in made.items())
        return made

    def read(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Read blocks of tensors into memory, all together, each byte of a file once.

        Args:
            wanted: name of a tensor, a block in its coordinates, and a plain tensor of the block's shape: of any
                type, strides and device.

        Raises:
            CorruptCheckpoint: bytes are missing or aren't those that were written.
            CheckpointError: they can't be read.
        """
        by_file: defaultdict[str, list[Use]] = defaultdict(list)
        for name, box, target in wanted:
            found, filled = uses(self._index.pieces(self.rank, name), target, box, self.dtype(name))
            if filled != box.numel:
                what = f"its pieces make up {filled} of {box.numel} elements"
                raise self._index.malformed(self.rank, name, what)
            for file, use in found:
                by_file[file].append(use)
        self._files.read(by_file)

    def value(self, node: Any) -> Any:
        """A part of the tree as the value that it stands for, with its tensors."""
        tensors, arrays = names_in(node)
        try:
            return decode(node, self.tensors([*tensors, *arrays]))
        except ValueError as error:
            raise self._malformed(str(error)) from error

    def _dtype(self, name: str) -> torch.dtype:
        try:
            return dtype_of(name)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {self.name} can't be read here: {error}") from error

    def _malformed(self, what: str) -> CorruptCheckpoint:
        return self._files.corrupt(rank_json(self.rank), f"has a malformed tree: {what}")
