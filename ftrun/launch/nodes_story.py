"""One node's part in the post-mortem of all: what it saw when its workers were ended for what happened elsewhere.

Of an attempt that this node decides about, :mod:`~ftrun.launch.evidence.postmortem` writes the part. Of one that ends
for what happened elsewhere it is written here: how the workers stood is looked at before they are killed, and put down
afterwards.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING

from ftrun.launch.evidence import joined, parts
from ftrun.launch.evidence.model import Seat
from ftrun.launch.evidence.parts import Part
from ftrun.launch.nodes_clock import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.distributed import Store

    from ftrun.launch.evidence.collect import Collector, LiveRank
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.plan import LaunchPlan
    from ftrun.rendezvous.model import Round as Members

CUT_OFF = "this node is cut off"
"""How the rendezvous begins to say that the others can't be reached: they may be about to go on without this node."""
GONE_ON = "the others went on"
"""How it begins to say that they have: their workers may run beside those of this node."""

_LOOK_SECONDS = 0.15
"""For a look at workers that are about to be killed. A run directory that hangs must not keep them alive."""
_PARTS_SECONDS = 1.5
"""For what the others have to say of the end of a run."""
_PART, _PARTS = "ftrun/part/{}", "ftrun/parts"


class Story:
    """Writes down what this node has to say, and puts it together with the others' where it is this node's turn.

    Main thread of the agent. No call raises because of a file.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._clock = Clock()
        self._members: Members | None = None
        self._node = 0
        self._attempt = 0
        self._ranks: Sequence[LiveRank] = ()
        self._looked_at = 0.0
        self._seen: Evidence | None = None
        self._sent: tuple[int, Sequence[bytes]] = 0, ()  # an attempt, and what the others have sent of it
        self._told = 0  # the last attempt that this node has written a part of
        self._decides = False
        self._to_join = 0
        self._late = False  # its part was written when the others' had been put together

    @property
    def seat(self) -> Seat | None:
        """This node's place in the round that goes on."""
        if self._members is None:
            return None
        hosts = tuple(each.name for each in self._members.members)
        return Seat(self._members.generation, hosts, self._clock.offset)

    # The end of an attempt

    def look(self, collector: Collector, ranks: Sequence[LiveRank], word: str) -> None:
        """See how this node's workers stand, before they are ended for what happened elsewhere; a moment at most.

        Args:
            collector: of this node.
            ranks: all of them.
            word: why, in words.
        """
        self._ranks, self._looked_at, self._seen = ranks, time.time(), None
        if word.startswith((CUT_OFF, GONE_ON)):
            return
        at = self._looked_at
        found: list[Evidence] = []
        over = threading.Event()
        seeing = threading.Thread(
            target=lambda: found.append(collector.collect(ranks, at, thorough=False, over=over.is_set)),
            name="ftrun-look",
            daemon=True,
        )
        seeing.start()
        seeing.join(_LOOK_SECONDS)
        over.set()  # the workers are killed and waited for next
        self._seen = found[0] if found else None

    def gave_way(self, collector: Collector, word: str) -> None:
        """Write down what was seen; the workers have been killed.

        Args:
            collector: of this node.
            word: why.
        """
        ranks, seen = self._ranks, self._seen
        self._ranks, self._seen = (), None
        if not ranks or not self._attempt or self._told == self._attempt:
            return
        run_dir, attempt = self._plan.run_dir, self._attempt
        part = Part(seen or collector.afterwards(ranks, self._looked_at), word)
        with contextlib.suppress(OSError):
            parts.write(run_dir, attempt, part)
            self._told, self._decides = attempt, False
            self._late = joined.is_joined(run_dir, attempt)
        if self._late and word.startswith(CUT_OFF):  # the others have gone on without it, and nobody waits for it
            joined.join(run_dir, attempt)
            self._late = False

    def broke(self, collector: Collector, ranks: Sequence[LiveRank], words: str) -> None:
        """This launcher can't go on: its workers have been ended, and for that.

        Args:
            collector: of this node.
            ranks: all of them, as far as they are known.
            words: why, in words, as the other nodes are told it.
        """
        if self._members is not None:
            self._ranks, self._looked_at, self._seen = ranks, time.time(), None
            self.gave_way(collector, f"{self._members.members[self._node].name}: {words}")
            self._decides = self._told == self._attempt

    def decided(self) -> None:
        """This node has decided what follows, and its part is written."""
        self._told, self._decides = self._attempt, True

    # The beginning of the next one

    def share(self, store: Store, node: int, nodes: int) -> None:
        """Where run directories are not shared, send the part of the attempt before to whoever puts them together.

        That is the first node, and the one that decided.

        Args:
            store: of the round.
            node: this node's number in it.
            nodes: how many there are.

        Raises:
            RoundBroken: the round is over.
        """
        if self._plan.shares_run_dir or nodes == 1:
            return
        store.set(_PART.format(node), self._packed())
        others = [_PART.format(each) for each in range(nodes) if each != node]
        if node == 0:
            self._sent = self._attempt, store.multi_get(others)
            store.set(_PARTS, "all")
        elif self._decides and self._told == self._attempt:
            store.get(_PARTS)
            self._sent = self._attempt, store.multi_get(others)

    def _packed(self) -> str:
        if not self._told or self._told != self._attempt:
            return ""
        part = parts.read(parts.directory(self._plan.run_dir, self._told) / f"n{self._node:04d}.json")
        return json.dumps([self._told, parts.encode(parts.shortened(part))]) if part is not None else ""

    def _unpack(self) -> None:
        (wanted, texts), self._sent = self._sent, (0, ())
        for text in texts:
            with contextlib.suppress(OSError, ValueError, TypeError):
                attempt, part = json.loads(text)
                decoded = parts.decode(part)
                if decoded is not None and attempt == wanted:
                    parts.place(self._plan.run_dir, attempt, decoded.node, part)

    def begun(self, members: Members, node: int, attempt: int) -> None:
        """An attempt begins.

        Args:
            members: who takes part.
            node: this node's number among them.
            attempt: number of the attempt.
        """
        told_here = self._told == self._attempt != 0
        # After a node that was left out, and has put all together before it left, every node comes late.
        joins = (node == 0 or self._late) if self._plan.shares_run_dir else told_here
        self._to_join = self._attempt if joins else 0
        self._late = False
        self._members, self._node, self._attempt = members, node, attempt
        self._ranks, self._seen = (), None
        self._clock.begin(members.members[0], here=node == 0)

    def started(self) -> Path | None:
        """The workers run: there is time for what nobody waits for.

        Returns:
            The report of the attempt before, if this node has put it together and has not named it yet.
        """
        self._unpack()
        attempt, self._to_join = self._to_join, 0
        if not attempt:
            return None
        report = joined.join(self._plan.run_dir, attempt)
        return None if self._decides and self._told == attempt else report

    # The end of the launcher

    def close(self, *, ended: bool) -> None:
        """Put together what has come of the last attempt, where nobody has yet.

        Args:
            ended: this node has ended the run for all, which have something to say of it, too.
        """
        self._clock.close()
        run_dir, attempt = self._plan.run_dir, self._attempt
        if not attempt or self._told != attempt or self._members is None:
            return
        if ended and self._plan.shares_run_dir:
            joined.await_parts(run_dir, attempt, len(self._members.members), _PARTS_SECONDS)
        if self._late:
            joined.join(run_dir, attempt)
        elif ended or not joined.is_joined(run_dir, attempt):
            first = min(parts.stamps(run_dir, attempt), default=("", 0, 0))[0]
            if ended or self._decides or first == f"n{self._node:04d}.json":
                joined.join(run_dir, attempt)
