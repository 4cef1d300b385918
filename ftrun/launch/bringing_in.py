"""Makes checkpoints of snapshots whose parts lie on several nodes, before the leader chooses what to resume from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.markup import escape

from ftrun.checkpoint import epochs, holdings, reader
from ftrun.checkpoint.keeper import commit
from ftrun.checkpoint.keeper.commit import Ballot, Verdict
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.keeper.votes import some
from ftrun.checkpoint.layout import MANIFEST, is_given_up
from ftrun.errors import NoValidCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ftrun.checkpoint.holdings import Parts
    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.launch.gathering import Gathering
    from ftrun.launch.keeping import Keeping

STILL = 5.0
"""Seconds without a byte that moves, after which the keepers are waited for no longer: a restart shouldn't take so
long that the steps since the checkpoint before cost less."""
LONGEST = 60.0
"""Seconds in all, however much moves."""
_STRAY = 2.0
"""The same as STILL for parts that no node of the round has: a keeper whose launcher is gone may be at them."""
_LONGEST_LOOK = 1.0
"""A pause between two looks counts for no more: where this machine stood still, so did the keepers, perhaps."""
_TELL = 3.0
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 0.3


@dataclass
class BringingIn:
    """One leader's work on one round. Main thread.

    Attributes:
        root: the checkpoint root.
        run_id: identity of the run.
        keeping: this node's keeper and memory.
        gathering: what the others say.
        say: tells people, as markup, what is waited for.
        skipped: attempts that did not become checkpoints, and why.
    """

    root: Root
    run_id: str
    keeping: Keeping
    gathering: Gathering
    say: Callable[[str], object]
    skipped: dict[str, str] = field(default_factory=dict)
    _ballots: dict[AttemptName, Ballot] = field(default_factory=dict)
    _said: bool = False

    def all_but(self, unwanted: Collection[str]) -> dict[str, str]:
        """Have what lies in the nodes' memories committed, where it is newer than every commit.

        Args:
            unwanted: names of attempts that nobody wants.

        Returns:
            Which attempts did not become checkpoints, and why.

        Raises:
            CheckpointError: the root can't be used.
            OSError: the storage failed.
        """
        found = self.gathering.collect(self.keeping.holdings())
        if self.gathering.alone:  # what is whole here can be resumed from as it is
            found = [each for each in found if len(each.ranks) < each.world_size]
        record = epochs.require_free_or_ours(self.root, self.run_id) if found else None
        if record is None:
            return {}
        unwanted = {*unwanted, *map(str, self.root.bad())}
        known = holdings.together(found, self._newest_commit(unwanted), record.since)
        parts = [each for each in known if str(each.name) not in unwanted]
        if parts:
            self.keeping.drain()
            self.newest(parts)
        return self.skipped

    def _newest_commit(self, unwanted: Collection[str]) -> AttemptName | None:
        try:
            found = reader.resume_point(self.root, self.run_id, exclude=unwanted).commit
        except NoValidCheckpoint:
            return None
        return found.name if found is not None else None

    def newest(self, found: Collection[Parts]) -> AttemptName | None:
        """Have the newest attempt committed that can be; None where none can.

        Raises:
            OSError: the storage failed.
        """
        deadline = time.monotonic() + LONGEST
        for parts in sorted(found, key=lambda each: each.name, reverse=True):
            reason = self._bring(parts, deadline)
            if not reason:
                return parts.name
            self.skipped[str(parts.name)] = reason
        return None

    def _bring(self, parts: Parts, deadline: float) -> str:
        """Wait for one attempt's commit; why there won't be one, empty once it is there."""
        seen, still, pause = "", 0.0, _FIRST_PAUSE
        began = now = time.monotonic()
        while True:
            files = self.root.files(parts.name)
            found = self._look(parts, files)
            if isinstance(found, Verdict):
                return "" if found.committed else found.reason
            absent = parts.missing(besides=self._spoken(parts.name))
            before, now = now, time.monotonic()
            self._tell(parts, now - began)
            still += min(now - before, _LONGEST_LOOK)
            if (sign := f"{self._moved()}\n{sum(files.values())} {len(files)}") != seen:
                seen, still = sign, 0.0
            waits = now < deadline and still < (_STRAY if absent else STILL)
            if absent and not (waits and any(_is_of(absent, file) for file in files)):
                if set(absent) - parts.adopted().ranks:
                    return self._lost(parts, absent)
                parts, still = self._adopted(parts, absent), 0.0
            elif not waits:
                return f"its parts were not drained in time: {found}"
            time.sleep(pause)
            pause = min(_LAST_PAUSE, 1.5 * pause)

    def _adopted(self, parts: Parts, absent: Collection[int]) -> Parts:
        """Have nodes that have copies of what a lost node had stand in for it."""
        nodes = [each.node for each in parts.copies if not set(absent).isdisjoint(each.ranks)]
        self.gathering.order(str(parts.name), nodes)
        if self.gathering.node in nodes:
            self.keeping.adopt(str(parts.name))
        return parts.adopted()

    def _moved(self) -> str:
        """How far the keepers are: another text whenever something has moved."""
        return f"{self.keeping.moved()}\n{self.gathering.moved()}"

    def _tell(self, parts: Parts, waited: float) -> None:
        if waited > _TELL and not self._said:
            self._said = True
            self.say(
                f"waits until the snapshot of step {parts.name.step:,}, which lies in the nodes' memories, is in "
                f"{escape(self.root.url)}: at most {LONGEST:g} s, and while bytes move"
            )

    def _look(self, parts: Parts, files: Mapping[str, int]) -> Verdict | str:
        ballot = self._ballots.setdefault(parts.name, Ballot(self.root, parts.name, Faults()))
        if MANIFEST in files or any(map(is_given_up, files)):
            return ballot.look(leads=False)
        return commit.finish(ballot, files, self.run_id)

    def _spoken(self, name: AttemptName) -> Iterator[int]:
        """Ranks whose files are in the root, as their node has said."""
        for record in self._ballots[name].done.values():
            yield from record.words

    def _lost(self, parts: Parts, absent: tuple[int, ...]) -> str:
        """No node has some ranks' parts. So that no keeper waits for them, the attempt is given up."""
        reason = (
            f"the part of rank {some(absent)} lies on no node that is here: it was not whole in time, or its node is "
            "lost"
        )
        if self.gathering.complete:  # else the one that hasn't spoken may have it
            commit.give_up(self.root, parts.name, self.gathering.node, reason)
        return reason


def _is_of(ranks: Collection[int], file: str) -> bool:
    """Whether a file, finished or not, is one of some ranks'."""
    name = file.rpartition("/")[2].lstrip(".")
    return name[:1] == "r" and name[1:6].isdecimal() and int(name[1:6]) in ranks
