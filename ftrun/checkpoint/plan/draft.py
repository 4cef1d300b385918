"""What of a plan stays the same from save to save while the structure does, and the plan that it makes of one state."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftrun.checkpoint import dtensors
from ftrun.checkpoint.layout import rank_shard
from ftrun.checkpoint.plan.layout import Layout, Part, lay_out
from ftrun.checkpoint.plan.ownership import Item, Share, divide
from ftrun.checkpoint.plan.pieces import Piece, ranks_of, ranks_text
from ftrun.checkpoint.plan.sources import Source, sources
from ftrun.checkpoint.records import TensorEntry, Word
from ftrun.checkpoint.words import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from ftrun.checkpoint.state import Encoded


class Copy(NamedTuple):
    """Something to copy. A tuple, because thousands are made at every save.

    Attributes:
        name: of the tensor that it belongs to.
        tensor: what to copy: a block of any strides, or a run in one dimension; on any device.
        piece: where it goes.
    """

    name: str
    tensor: torch.Tensor
    piece: Piece


_to_copy = functools.partial(tuple.__new__, Copy)  # three times as fast as the class


@dataclass(frozen=True)
class Plan:
    """What a rank stores in one save.

    Attributes:
        draft: what it has in common with the plans of other saves.
        tensors: of the state.
    """

    draft: Draft
    tensors: Mapping[str, torch.Tensor]

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors of the rank's tree, those included of which others store every byte."""
        return self.draft.entries

    @functools.cached_property
    def copies(self) -> tuple[Copy, ...]:
        """What to copy, in the order in which it lies in the file. Made when asked for: there may be thousands."""
        names = self.draft.layout.names
        parts = [self.tensors[name] for name in names]
        for number, take in self.draft.takes.items():
            parts[number] = _taken(parts[number], take)
        return tuple(map(_to_copy, zip(names, parts, self.pieces, strict=True)))

    def some(self, numbers: Sequence[int]) -> list[Copy]:
        """A few of the copies."""
        return [self._copy(number) for number in numbers]

    def _copy(self, number: int) -> Copy:
        name, take = self.draft.layout.names[number], self.draft.takes.get(number)
        tensor = self.tensors[name]
        return Copy(name, tensor if take is None else _taken(tensor, take), self.pieces[number])

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What lies where in the file."""
        return self.draft.layout.pieces

    @property
    def header(self) -> bytes:
        """What stands before the tensors in the file; empty when there is none."""
        return self.draft.layout.header

    @property
    def size(self) -> int:
        """Bytes of the file; 0 when this rank stores no tensor."""
        return self.draft.layout.size

    @functools.cached_property
    def verify(self) -> Mapping[str, torch.Tensor]:
        """Tensors that ranks share because they were once the same.

        The CRC32C of each, all of its bytes row by row, must be taken in this save.
        """
        return {name: self.tensors[name] for name in self.draft.verify}

    @property
    def shared(self) -> Mapping[str, str]:
        """Digest of what ranks share, without those checksums, by the text of the ranks."""
        return self.draft.shared

    def with_digests(self, digests: Mapping[str, str]) -> Mapping[str, TensorEntry]:
        """The entries with the checksums of what was to be verified, in hexadecimal; as they are where nothing was."""
        if not self.verify:
            return self.entries
        found = {name: dataclasses.replace(self.entries[name], digest=digests[name]) for name in self.verify}
        return {**self.entries, **found}

    def word(self, digests: Mapping[str, str], position: str) -> Word:
        """What this rank says in short.

        Args:
            digests: checksums of what was to be verified.
            position: digest of step, total and data position.
        """
        seen: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self.verify):
            seen[self.entries[name].ranks].append(f"{name!r} {digests[name]}")
        groups = {
            ranks: _digest([base, *seen[ranks]]) if ranks in seen else base for ranks, base in self.shared.items()
        }
        return Word(position, groups)


@dataclass(frozen=True)
class Group:
    """Ranks that hold a plain tensor alike.

    Attributes:
        ranks: ascending, two or more.
        known: whether torch keeps it so; else its checksum is taken at every save.
    """

    ranks: tuple[int, ...]
    known: bool


@dataclass(frozen=True)
class _Take:
    """How to get at what is copied, where that isn't the tensor as it is.

    Attributes:
        block: for a DTensor the number of the block that is copied, -1 where it has one only; None for a plain tensor.
        share: the run of it; None for all.
    """

    block: int | None
    share: Share | None


@dataclass(frozen=True)
class Draft:
    """All of a plan but the tensors.

    Attributes:
        entries: all tensors of the rank's tree, those included of which others store every byte.
        layout: of the file.
        takes: for those pieces, by their numbers, for which a part of a tensor is copied, how to get it.
        verify: names of tensors that are to be verified.
        shared: digest of what ranks share, by the text of the ranks.
    """

    entries: Mapping[str, TensorEntry]
    layout: Layout
    takes: Mapping[int, _Take]
    verify: tuple[str, ...]
    shared: Mapping[str, str]

    def plan(self, tensors: Mapping[str, torch.Tensor]) -> Plan:
        """The plan for tensors of the structure that the draft was made for."""
        return Plan(self, tensors)


def draft(encoded: Encoded, rank: int, groups: Mapping[str, Group]) -> Draft:
    """Decide who stores what.

    Args:
        encoded: the state.
        rank: this rank.
        groups: plain tensors that other ranks hold alike, by name.

    Raises:
        NotStorable: a DTensor's local part is not what its placements say.
        CheckpointError: more tensors than a file can name.
    """
    found = sources(encoded, rank)
    holders = [groups[each.name].ranks if each.name in groups else each.replicas for each in found]
    mine = _shares(found, holders, rank)
    parts = [_part(found[share.item], share) for share in mine]
    layout = lay_out(parts, rank_shard(rank))
    blocks = _block_numbers(found)
    takes = {}
    for number, part in enumerate(layout.order):
        share = mine[part]
        whole = parts[part].is_block
        if blocks[share.item] is not None or not whole:
            takes[number] = _Take(blocks[share.item], None if whole else share)
    entries = _entries(encoded, rank, groups)
    verify = tuple(name for name, group in groups.items() if not group.known)
    return Draft(entries, layout, takes, verify, _shared(entries, found, holders, rank))


def _shares(found: Sequence[Source], holders: Sequence[tuple[int, ...]], rank: int) -> list[Share]:
    """What this rank stores: runs of the sources, in their order."""
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, source in enumerate(found):
        if source.box.numel:
            together[holders[number]].append(number)
    mine = []
    for ranks, numbers in together.items():
        numbers.sort(key=lambda each: (found[each].name, found[each].box))
        shares = divide([_item(found[each]) for each in numbers], len(ranks))[ranks.index(rank)]
        mine += [Share(numbers[share.item], share.start, share.stop) for share in shares]
    return sorted(mine, key=lambda share: share.item)


def _item(source: Source) -> Item:
    return Item(source.box.numel, source.tensor.dtype.itemsize, source.tensor.is_contiguous())


def _part(source: Source, share: Share) -> Part:
    itemsize = source.tensor.dtype.itemsize
    return Part(source.name, source.dtype, itemsize, source.shape, source.box, share.start, share.stop)


def _block_numbers(found: Iterable[Source]) -> list[int | None]:
    """Of each source, which block of its DTensor it is, -1 where that has one only; None for a plain tensor."""
    counts = Counter(source.name for source in found)
    before: Counter[str] = Counter()
    numbers: list[int | None] = []
    for source in found:
        alone = -1 if counts[source.name] == 1 else before[source.name]
        numbers.append(None if source.ranks is None else alone)
        before[source.name] += 1
    return numbers


def _taken(tensor: torch.Tensor, take: _Take) -> torch.Tensor:
    if take.block is not None:
        tensor = dtensors.local(tensor) if take.block < 0 else dtensors.holding(tensor).blocks[take.block][1]
    return tensor if take.share is None else tensor.view(-1)[take.share.start : take.share.stop]


def _entries(encoded: Encoded, rank: int, groups: Mapping[str, Group]) -> dict[str, TensorEntry]:
    entries = {}
    geometry = dtensors.Geometry()
    for name, tensor in encoded.tensors.items():
        ranks: tuple[int, ...] = (rank,)
        if dtensors.is_dtensor(tensor):
            ranks = geometry.ranks(tensor)
        elif name in groups:
            ranks = groups[name].ranks
        entries[name] = TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape), ranks_text(ranks))
    return entries


def _shared(
    entries: Mapping[str, TensorEntry], found: Sequence[Source], holders: Sequence[tuple[int, ...]], rank: int
) -> dict[str, str]:
    """What ranks must see alike: the tensors that they share, and the blocks that they share out among them."""
    lines: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        lines[entry.ranks].append(f"{name!r} {entry.dtype} {entry.shape}")
    for source, ranks in zip(found, holders, strict=True):
        if source.box.numel and len(ranks) > 1:
            where = f"{source.box.offset} {source.box.shape} {source.tensor.is_contiguous()}"
            lines[ranks_text(ranks)].append(f"{source.name!r} {where}")
    # A rank speaks for groups that it is in, and of what is its own alone nobody else knows.
    mine = sorted(ranks for ranks in lines if ranks != str(rank) and rank in ranks_of(ranks))
    return {ranks: _digest(sorted(lines[ranks])) for ranks in mine}


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
