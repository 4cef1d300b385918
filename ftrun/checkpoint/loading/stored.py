"""One rank's view of a checkpoint: its tree at once, its tensors when they are asked for."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.layout import AttemptName, attempt_key, rank_json
from ftrun.checkpoint.loading import templates, tree
from ftrun.checkpoint.loading.files import Files
from ftrun.checkpoint.loading.index import Index
from ftrun.checkpoint.loading.node_cache import NodeCache, roomy
from ftrun.checkpoint.loading.targets import uses
from ftrun.checkpoint.loading.tiers import RootCopies, SealedCopies, before_root
from ftrun.checkpoint.state import decode
from ftrun.checkpoint.words import dtype_of
from ftrun.errors import CheckpointError
from ftrun.garbage import no_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.loading.chunks import Use
    from ftrun.checkpoint.loading.templates import Target
    from ftrun.checkpoint.loading.tiers import TierName
    from ftrun.checkpoint.manifest import Manifest
    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.checkpoint.records import RankRecord, TensorEntry


def open_stored(
    root: Root,
    name: str | AttemptName,
    rank: int,
    world_size: int,
    *,
    tier: Tier | None = None,
    local: Path | None = None,
    sealed: bool = False,
) -> StoredState:
    """Open what a rank of ``world_size`` resumes from. Each rank calls this, with the name agreed on.

    Args:
        root: the checkpoint root.
        name: of the checkpoint, or of the snapshot.
        rank: this rank.
        world_size: number of ranks now.
        tier: the node's memory tier, whose sealed slots may hold the same bytes, as may those of the tier beside it
            for copies of another node's part.
        local: the node's local tier, which may, too.
        sealed: it is a snapshot in the memory tier that nobody has committed yet.

    Raises:
        CorruptCheckpoint: bytes are missing or differ from what was committed.
        CheckpointError: a file can't be read, or the snapshot isn't whole.
        UsageError: no name of a checkpoint, or one that another version of ftrun wrote.
        ValueError: the rank isn't below the world size.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    parsed = AttemptName.of(name)
    memory = SealedCopies(tier, parsed) if tier is not None else None
    nearer = before_root(parsed, tier, local, memory if sealed or (memory is not None and memory.seals) else None)
    cache = NodeCache(
        lambda: roomy(_places(local, tier), files.manifest.size if files.manifest is not None else 0),
        str(parsed),
        lambda file, first, view: root.read_into(attempt_key(parsed, file), first, view),
    )
    files = Files(root, parsed, nearer, RootCopies(root, parsed, cache), memory if sealed else None)
    try:
        with no_collections():
            return StoredState(files, rank, world_size, cache.close)
    except BaseException:
        cache.close()
        raise


def _places(local: Path | None, tier: Tier | None) -> list[Path]:
    """Where a node may keep downloads while it restores, best first."""
    near = [local, tier.path if tier is not None else None]
    system = Path(tempfile.gettempdir()) / f"ftrun-{os.getuid()}"
    return [place / "restore" for place in (*near, system) if place is not None]


class StoredState:
    """One rank's state in a checkpoint. One thread uses it; it reads with several.

    The tree has a part for each kind of state: ``tracked``, ``gradients``, ``loaders``, ``random`` and ``extra``.

    Attributes:
        name: of the checkpoint.
        step: number of finished steps in the state.
        total: number of steps that the run asked for, where it did.
        data: data position.
        world_size: number of ranks that wrote it.
        own: whether this rank was one of them. If not, the tree is rank 0's: what must differ between ranks, like
            random states, has to be made anew.

    Raises:
        CorruptCheckpoint: this rank's record is damaged.
        CheckpointError: it can't be read.
    """

    def __init__(self, files: Files, rank: int, world_size: int, on_close: Callable[[], None]) -> None:
        self._files, self._on_close = files, on_close
        self._dtypes: dict[str, torch.dtype] = {}
        self._index = Index(files, lambda name: self._dtype(name).itemsize)
        self._first = rank / world_size
        self.own = rank < files.world_size
        self._rank = rank if self.own else 0
        record = self._index.record(self._rank)
        self.name = str(files.name)
        self.step, self.total, self.data = record.step, record.total, record.data
        self.world_size = files.world_size
        # What stands for each tensor in outlines, by identity.
        self._stand_ins: dict[int, tuple[torch.Tensor, int, str]] = {}

    @property
    def manifest(self) -> Manifest | None:
        """The checkpoint's manifest; None for a snapshot in memory that isn't known to be committed."""
        return self._files.manifest

    @property
    def reason(self) -> str:
        """Why it was taken."""
        return self._files.reason

    @property
    def notes(self) -> tuple[str, ...]:
        """Which copies were found damaged, where others were read instead."""
        return tuple(self._files.notes)

    @property
    def read_bytes(self) -> dict[TierName, int]:
        """How many bytes were read so far, by the tier that they came from."""
        return self._files.read_bytes

    def names(self, kind: str) -> list[str]:
        """Keys of a part of the tree, none where there is no such part."""
        return list(self._part(self._index.record(self._rank), kind))

    def value(self, kind: str, name: str | None = None, template: Any = None) -> Any:
        """A part of the tree as the value that was stored; see :meth:`fill` for the template.

        Args:
            kind: of the part.
            name: one key of it; None for all of it.
            template: what to read it into.

        Raises:
            KeyError: there is no such part or key.
            CorruptCheckpoint: bytes are missing or differ from what was committed.
            CheckpointError: a file can't be read.
        """
        return self.fill(self.outline(kind, name), template)

    def outline(self, kind: str, name: str | None = None) -> Any:
        """A part of the tree with tensors on the meta device, to look at shapes before anything is read.

        Raises:
            KeyError: there is no such part or key.
            CorruptCheckpoint: the record, or an array in the part, is damaged.
            CheckpointError: a file can't be read.
        """
        with no_collections():
            return self._outline(self._rank, kind, name)

    def others(self, kind: str, name: str) -> Iterator[Any]:
        """Outlines of what other ranks stored under the same name, in the order of their ranks.

        Raises:
            CorruptCheckpoint: a record is damaged.
            CheckpointError: a file can't be read.
        """
        for rank in range(self.world_size):
            if rank != self._rank and name in self._part(self._index.record(rank), kind):
                yield self._outline(rank, kind, name)

    def is_shared(self, outline: Any) -> bool:
        """Whether an outline has tensors whose pieces several ranks hold."""
        return any(self._entry(rank, name).ranks != str(rank) for _, rank, name in self._wanted(outline).values())

    def fill(self, outline: Any, template: Any = None) -> Any:
        """Read the tensors of an outline, all together, and return it with them in their places.

        Args:
            outline: from :meth:`outline` or :meth:`others`, or put together from such; it is used up.
            template: a value with tensors at the same places. Where shapes fit, a tensor is read straight into the
                template's, which is handed out: of any type, strides and device, and of a DTensor this rank's part.
                All others become plain tensors of the host.

        Raises:
            CorruptCheckpoint: bytes are missing or differ from what was committed.
            CheckpointError: a file can't be read.
        """
        with no_collections():
            return self._fill(outline, template)

    def _fill(self, outline: Any, template: Any) -> Any:
        wanted = self._wanted(outline)
        pairs = {id(here): there for here, there in templates.matched(outline, template) if id(here) in wanted}
        geometry = dtensors.Geometry()
        made = {
            key: templates.target(each.shape, each.dtype, pairs.get(key), geometry)
            for key, (each, _, _) in wanted.items()
        }
        targets = templates.apart(made)
        self._read((wanted[key][1:], target) for key, target in targets.items())
        return templates.replaced(outline, {key: target.result for key, target in targets.items()})

    def _wanted(self, outline: Any) -> dict[int, tuple[torch.Tensor, int, str]]:
        """The stand-ins in an outline, and those that it has views of."""
        found = {}
        for each in templates.tensors_in(outline):
            for key in (id(each), id(each._base)):
                if key in self._stand_ins:
                    found[key] = self._stand_ins[key]
        return found

    def share_processors(self, ranks: int) -> None:
        """Read with this process's share of the processors, where so many of this machine read at the same time."""
        self._files.share_processors(ranks)

    def close(self) -> None:
        """Let go of everything. Again is no error."""
        self._on_close()
        self._stand_ins.clear()

    def _outline(self, rank: int, kind: str, name: str | None) -> Any:
        record = self._index.record(rank)
        node = record.tree[kind] if name is None else self._part(record, kind)[name]
        try:
            tensors, arrays = tree.names_in(node)
            made: dict[str, Any] = {each: self._stand_in(rank, each) for each in tensors}
            made |= self._arrays(rank, arrays)
            return decode(node, made)
        except (KeyError, TypeError, ValueError) as error:
            raise self._files.corrupt(rank_json(rank), f"has a malformed tree: {error}") from error

    def _stand_in(self, rank: int, name: str) -> torch.Tensor:
        entry = self._entry(rank, name)
        made = torch.empty(entry.shape, dtype=self._dtype(entry.dtype), device="meta")
        self._stand_ins[id(made)] = (made, rank, name)
        return made

    def _arrays(self, rank: int, names: Iterable[str]) -> dict[str, Any]:
        """NumPy arrays are few and small, and have no stand-in: read at once."""
        entries = {name: self._entry(rank, name) for name in names}
        targets = {name: templates.fresh(each.shape, self._dtype(each.dtype)) for name, each in entries.items()}
        self._read(((rank, name), target) for name, target in targets.items())
        return {name: target.result for name, target in targets.items()}

    def _read(self, wanted: Iterable[tuple[tuple[int, str], Target]]) -> None:
        by_file: defaultdict[str, list[Use]] = defaultdict(list)
        for (rank, name), target in wanted:
            dtype = self._dtype(self._entry(rank, name).dtype)
            pieces = self._index.pieces(rank, name)
            for box, tensor in target.blocks:
                found, filled = uses(pieces, tensor, box, dtype)
                if filled != box.numel:
                    raise self._index.malformed(rank, name, f"its pieces make up {filled} of {box.numel} elements")
                for file, use in found:
                    by_file[file].append(use)
        self._files.read(by_file, self._first)

    def _entry(self, rank: int, name: str) -> TensorEntry:
        return self._index.record(rank).tensors[name]

    def _dtype(self, name: str) -> torch.dtype:
        if name not in self._dtypes:
            try:
                self._dtypes[name] = dtype_of(name)
            except ValueError as error:
                raise CheckpointError(f"checkpoint {self._files.name} can't be read here: {error}") from error
        return self._dtypes[name]

    def _part(self, record: RankRecord, kind: str) -> Mapping[str, Any]:
        try:
            return tree.items_of(record.tree.get(kind, {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._files.corrupt(rank_json(record.rank), f"has a malformed tree: {error!r}") from error
