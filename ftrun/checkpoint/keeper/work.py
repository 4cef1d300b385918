"""One node's part of one attempt to save, as the keeper sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import FileRecord
from ftrun.checkpoint.layout import AttemptName, rank_json
from ftrun.checkpoint.manifest import is_count, is_file_name
from ftrun.checkpoint.records import About, DoneRecord, Seal, Word
from ftrun.checkpoint.sealed import UnsealedError, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.checkpoint.memory.tier import Slot


@dataclass(frozen=True)
class NodeWork:
    """One node's part of an attempt.

    Attributes:
        name: the attempt.
        seals: of its ranks, ascending; at least one.
        slots: where they lie in memory, in the same order; empty where they don't any more.
        drained: ranks whose slot may be filled again.
        superseded: ranks without a seal here that have sealed a newer attempt.
        files: what its files are, once they are copied.
        committed: it is a checkpoint.
    """

    name: AttemptName
    seals: tuple[Seal, ...]
    slots: tuple[Slot, ...] = ()
    drained: frozenset[int] = frozenset()
    superseded: frozenset[int] = frozenset()
    files: dict[str, FileRecord] = field(default_factory=dict)
    committed: bool = False

    @property
    def first(self) -> Seal:
        """The seal of its lowest rank."""
        return self.seals[0]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the node that haven't sealed."""
        return tuple(sorted(set(self.first.node_ranks) - {seal.rank for seal in self.seals}))

    @property
    def leads(self) -> bool:
        """Whether rank 0 is here, so that this node commits."""
        return 0 in self.first.node_ranks

    @property
    def alone(self) -> bool:
        """Whether all ranks are on this node."""
        return len(self.first.node_ranks) == self.first.world_size > 0

    @property
    def empty(self) -> bool:
        """Whether it only stands in for a node that sealed nothing."""
        return not self.first.node_ranks

    @property
    def sealed(self) -> dict[str, tuple[str, FileRecord]]:
        """Path in memory of each file, and what its bytes are."""
        return {name: place for seal in self.seals for name, place in seal.files.items()}

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(record.size for _, record in self.sealed.values())

    @property
    def done(self) -> DoneRecord:
        """This node's word, once its files are copied."""
        first = self.first
        about = About(
            run_id=first.run_id,
            world_size=first.world_size,
            step=first.step,
            total=first.total,
            reason=first.reason,
            data=first.data,
            parent=first.parent,
            torch=first.torch,
        )
        return DoneRecord(first.node, self.files, {seal.rank: seal.word for seal in self.seals}, about)

    def to_bytes(self) -> bytes:
        """What another keeper needs to go on when the slots are filled again."""
        files = {name: record.to_json() for name, record in self.files.items()}
        seals = [each.to_json() for each in self.seals]
        return seal({"seals": seals, "files": files, "committed": self.committed})

    @classmethod
    def from_bytes(cls, content: bytes) -> NodeWork:
        """Read it back.

        Raises:
            ValueError: it isn't whole, or something else.
        """
        document = unseal(content)
        try:
            seals = [Seal.from_json(each) for each in document["seals"]]
            files = {name: FileRecord.from_json(record) for name, record in document["files"].items()}
            work = works((), seals)[seals[0].attempt]
            return replace(work, files=files, committed=document["committed"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnsealedError("is no node's part of a checkpoint") from error


def unsealed(name: AttemptName, run_id: str, node: int) -> NodeWork:
    """A stand-in for the work of a node that sealed nothing of an attempt: it has no ranks and no files."""
    nobody = Seal(
        attempt=str(name),
        run_id=run_id,
        rank=0,
        world_size=0,
        node=node,
        node_ranks=(),
        step=name.step,
        total=None,
        reason="",
        data=None,
        parent=None,
        torch="",
        run_attempt=0,
        files={},
        word=Word("", {}),
        sealed_at=0.0,
    )
    return NodeWork(name, (nobody,))


def works(sealed: Iterable[tuple[Slot, Seal]], loose: Iterable[Seal] = ()) -> dict[str, NodeWork]:
    """Group seals by attempt. Those that contradict themselves or the first one of their attempt are left out.

    Args:
        sealed: seals and where they lie in memory.
        loose: seals that don't lie in memory any more.
    """
    pairs: list[tuple[Slot | None, Seal]] = [*sealed, *((None, each) for each in loose)]
    pairs = [pair for pair in pairs if is_sane(pair[1])]
    newest: dict[int, AttemptName] = {}
    found: dict[str, dict[int, tuple[Slot | None, Seal]]] = {}
    for slot, each in sorted(pairs, key=lambda pair: pair[1].rank):
        name = AttemptName.of(each.attempt)
        newest[each.rank] = max(name, newest.get(each.rank, name))
        members = found.setdefault(each.attempt, {})
        if not members or _fits(each, next(iter(members.values()))[1]):
            members[each.rank] = slot, each
    return {attempt: _work(attempt, list(members.values()), newest) for attempt, members in found.items()}


def _work(attempt: str, members: list[tuple[Slot | None, Seal]], newest: dict[int, AttemptName]) -> NodeWork:
    name = AttemptName.of(attempt)
    absent = set(members[0][1].node_ranks) - {each.rank for _, each in members}
    return NodeWork(
        name=name,
        seals=tuple(each for _, each in members),
        slots=tuple(slot for slot, _ in members if slot is not None),
        superseded=frozenset(rank for rank in absent if newest.get(rank, name) > name),
    )


def is_sane(each: Seal) -> bool:
    """Whether a seal says what the seal of a rank could say."""
    name = AttemptName.parse(each.attempt) if isinstance(each.attempt, str) else None
    numbers = (each.rank, each.world_size, each.node, each.step, *each.node_ranks)
    if name is None or not all(map(is_count, numbers)) or name.step != each.step:
        return False
    ranks = set(each.node_ranks)
    in_range = all(rank < each.world_size for rank in ranks) and len(ranks) == len(each.node_ranks)
    return each.rank in ranks and in_range and rank_json(each.rank) in each.files and all(map(is_file_name, each.files))


def _fits(one: Seal, other: Seal) -> bool:
    facts = (one.run_id, one.world_size, one.node, one.node_ranks, one.parent)
    return facts == (other.run_id, other.world_size, other.node, other.node_ranks, other.parent)
