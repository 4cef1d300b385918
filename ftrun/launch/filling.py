"""The node's filler, as the agent sees it: started when workers have something to fetch, told where they resume.

A node that waits for a seat has one, too, if the others read files through a cache.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.checkpoint.layout import MANIFEST, AttemptName, attempt_key
from ftrun.checkpoint.manifest import Manifest
from ftrun.contract import WorkerContract
from ftrun.data.cache import settings
from ftrun.data.filler.offering import Offering
from ftrun.data.filler.places import Pointer, put_json
from ftrun.data.filler.plans import Resume
from ftrun.data.filler.process import FillerProcess
from ftrun.data.filler.shown import of_run, of_scripts
from ftrun.data.filler.spare import SpareFiller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftrun.checkpoint.memory.tier import Tier
    from ftrun.data.filler.places import FillDir
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.rounds import Round

_LOOK = 0.25
_TELL = 60.0
"""Seconds between two events of what the data cache has done."""


class Filling:
    """One launcher's filler. Main thread of the agent; nothing here waits for a disk or a remote.

    Args:
        plan: of the launch.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._node = 0
        self._process: FillerProcess | None = None
        self._looked = 0.0
        self._log: events.EventLog | None = None
        self._told: events.DataRead | None = None
        self._tell_at = 0.0
        self._spare: SpareFiller | None = None
        self._offering: Offering | None = None

    def begin(self, current: Round, node: int, tier: Tier | None, ranks: Sequence[int], world_size: int) -> None:
        """An attempt's workers are starting: have what they will read first fetched before they ask for it.

        Args:
            current: what was settled for the attempt.
            node: this node's number in it.
            tier: the node's memory tier.
            ranks: this node's.
            world_size: ranks in all.
        """
        self._node = node
        self._log = events.EventLog(self._plan.run_dir.events(node), attempt=current.attempt)
        self._tell_at = time.monotonic() + _TELL
        if node == 0 and self._may_have_spares:
            self._offering = Offering(self._plan.run_dir.path, node, lambda: _usual_cache(self._plan))
            self._offering.start()
        directory = self._pointer.read()
        asking = _Asking(self._plan, current, tier, tuple(ranks), world_size)
        # What it fetched for as a spare, too: workers take seconds to say what they read.
        for each in filter(None, (directory, self._spare and self._spare.directory)):
            threading.Thread(target=asking.tell, args=(each,), name="ftrun-resume", daemon=True).start()
        self._looked = 0.0
        self.look()

    @contextlib.contextmanager
    def waiting(self, is_spare: Callable[[], bool], report: Callable[[str], None]) -> Iterator[None]:
        """While this node waits for its next round, as a spare perhaps.

        Args:
            is_spare: whether the others are at work meanwhile; asked on another thread.
            report: is told in words what is done then, on that thread.
        """
        if not self._may_have_spares:
            yield
            return
        if self._offering is not None:
            self._offering.close()
            self._offering = None
        run_dir, usual = self._plan.run_dir.path, lambda: _usual_cache(self._plan)
        self._spare = self._spare or SpareFiller(run_dir, self._plan.node_name, usual, is_spare, report)
        self._spare.start()
        try:
            yield
        finally:
            self._spare.hand_over()

    @property
    def _may_have_spares(self) -> bool:
        plan = self._plan
        return plan.ours and plan.shared_by_nodes and plan.shares_run_dir

    def look(self) -> None:
        """See that the filler runs where there is something to fetch. Called at every turn of the monitor; cheap."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        directory = self._pointer.read()
        if self._process is not None and self._process.directory != directory:
            self._process.finish()
            self._process = None
        if directory is not None:
            if self._spare is not None and self._spare.serves(directory.pool):
                self._spare.finish()  # the workers have said what they read
            self._process = self._process or FillerProcess(directory)
            self._process.ensure()
        if now >= self._tell_at:
            self._tell()

    def pids(self) -> list[int]:
        """The filler's process, which isn't a worker's."""
        return [each.pid for each in (self._process, self._spare) if each is not None and each.pid]

    def finish(self) -> None:
        """End the filler, and record what the data cache has done for the run."""
        if self._offering is not None:
            self._offering.close()
        if self._spare is not None:
            self._spare.finish()
        if self._process is not None:
            self._process.finish()
        self._tell()

    def _tell(self) -> None:
        self._tell_at = time.monotonic() + _TELL
        run_dir = self._plan.run_dir.path
        shown = of_run(run_dir, self._node) or of_scripts(run_dir, self._node)
        if shown is None or self._log is None:
            return
        told = shown.event()
        if told != self._told:  # a run whose data is read from memory has nothing more to say
            self._told = told
            self._log.write(told)

    @property
    def _pointer(self) -> Pointer:
        return Pointer.of(self._plan.run_dir.path, self._node)


def _usual_cache(plan: LaunchPlan) -> str:
    """Where the data cache of this node's workers is unless a script names another place."""
    if plan.contract.cache:
        return plan.contract.cache
    # As a worker has it that isn't the first, which says where that is and why.
    environment = {**os.environ, **plan.job.config.env, "LOCAL_RANK": "1"}
    environment.pop(WorkerContract.VARIABLE, None)
    return str(settings.read(environment).root)


class _Asking:
    """Where the loaders were in the checkpoint that is resumed from. In a thread: its storage may be slow."""

    def __init__(
        self, plan: LaunchPlan, current: Round, tier: Tier | None, ranks: tuple[int, ...], world_size: int
    ) -> None:
        self._plan = plan
        self._current = current
        self._tier = tier
        self._ranks = ranks
        self._world_size = world_size

    def tell(self, directory: FillDir) -> None:
        """Write it down for the filler."""
        # What goes wrong here the workers will meet, and say; the filler then waits for them.
        with contextlib.suppress(OSError, ValueError):
            loaders = (self._data() or {}).get("loaders", {})
            resume = Resume(self._current.attempt, self._world_size, self._ranks, loaders)
            put_json(directory.resume, asdict(resume))

    def _data(self) -> dict[str, Any] | None:
        current = self._current
        if current.resume is None:
            return None
        if current.resume_sealed and self._tier is not None:
            found = [seal.data for _, seal in self._tier.sealed() if seal.attempt == current.resume]
            if found:
                return found[0]
        key = attempt_key(AttemptName.of(current.resume), MANIFEST)
        return Manifest.from_bytes(self._plan.open_root().read(key)).data
