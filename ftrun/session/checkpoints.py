"""When a Session takes a checkpoint, and that what it took becomes durable."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.checkpoint import interval
from ftrun.errors import AgreementTimeout, CheckpointError, Disagreement
from ftrun.pulse import Phase
from ftrun.session.callbacks import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.contract import Every, WorkerContract
    from ftrun.pulse import Pulse
    from ftrun.session.place import Place
    from ftrun.session.saving import Saver

_log = logging.getLogger(__name__)

_COMMIT_SECONDS = 1600.0  # the keeper gives up before
_FIRST_SECONDS = 60.0
RETRY_DELAYS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds between the tries to commit a last state: a full disk or a storage that is away gets a few minutes."""
_WORTH_SAYING = 0.25
_PATIENCE = 2.0
"""Seconds for a slot to become free: for steps that are shorter than a drain, and not for a storage that is away."""
_FREE_SECONDS, _SHARE = 10.0, 0.01
"""What all such waits together may take: so many seconds, and then this part of the time. A storage that is always too
slow for the interval must not slow training down."""


class Interval:
    """The time between checkpoints, where it is a time; chosen again after each commit where it is ``auto``.

    Attributes:
        seconds: between two checkpoints, None where steps count.
    """

    def __init__(self, every: Every, place: Place, contract: WorkerContract) -> None:
        self._auto = every.auto
        self._began = time.monotonic()
        self._seen = interval.Failures(contract.failures, contract.uptime, place.world_size)
        self._said = 0.0
        self.seconds = every.seconds
        if self._auto:
            # One checkpoint soon: it says what they cost here.
            self.seconds = min(_FIRST_SECONDS, interval.choose(0.1, 0.0, self._seen).seconds)

    def measured(self, stall: float, drain: float) -> events.IntervalChosen | None:
        """A checkpoint cost so much; what to record, where the choice has changed noticeably.

        Args:
            stall: seconds that it held training up.
            drain: seconds from its snapshot to its commit.
        """
        if not self._auto:
            return None
        uptime = self._seen.seconds + time.monotonic() - self._began
        chosen = interval.choose(stall, drain, interval.Failures(self._seen.count, uptime, self._seen.workers))
        self.seconds = chosen.seconds
        if abs(chosen.seconds - self._said) <= _WORTH_SAYING * self._said:
            return None
        self._said = chosen.seconds
        return events.IntervalChosen(chosen.seconds, chosen.stall, chosen.between_failures, chosen.bound)


class Checkpoints:
    """One rank's checkpoints in an attempt. Training thread only.

    Args:
        saver: takes snapshots.
        pulse: told of the time that saving takes.
        every: how often, if the clock or the steps decide.
        place: where this rank stands.
        contract: what the launcher told this worker.
        tell: records an event, on rank 0.
    """

    def __init__(
        self,
        saver: Saver,
        pulse: Pulse,
        every: Every,
        place: Place,
        contract: WorkerContract,
        tell: Callable[[events.Event], None],
    ) -> None:
        self._saver = saver
        self._pulse = pulse
        self._steps = every.steps
        self._interval = Interval(every, place, contract)
        self._leads = place.rank == 0
        self._tell = tell
        self._due = False
        self._skipping = False
        self._waited = 0.0
        self._began = self._last = time.monotonic()
        self.saved_at: int | None = None

    # When

    def meet(self, step: int) -> bool:
        """Whether all ranks know by the number of a step that a checkpoint may be due after it."""
        return self._steps is not None and step % self._steps == 0

    def decide(self, step: int, *, wanted: bool) -> bool:
        """Rank 0, at a point: is a checkpoint due, by the clock, by the steps or by request, and is there room for it?

        Args:
            step: steps completed.
            wanted: somebody has asked for one.
        """
        seconds = self._interval.seconds if self._steps is None else None
        late = seconds is not None and time.monotonic() - self._last >= seconds
        if not (wanted or late or self.meet(step)):
            return False
        if self._has_room():
            self._skipping = False
            return True
        if not self._skipping or self._steps is not None:
            self._tell(events.SaveSkipped(step=step))
        self._skipping = True
        return False

    def _has_room(self) -> bool:
        """Whether a slot in memory is free, or is in a moment; once that was in vain there is no more waiting."""
        began = time.monotonic()
        left = max(_FREE_SECONDS, _SHARE * (began - self._began)) - self._waited
        deadline = began + (0.0 if self._skipping else min(_PATIENCE, left))
        while not (free := self._saver.may_save()) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._waited += time.monotonic() - began
        return free

    def heard(self, save: bool) -> None:
        """What all ranks were told at a point, or that the step was none."""
        self._due = save

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due at this step boundary: the same answer on every rank."""
        return self._due and self.saved_at != step

    # Taking

    def take(
        self,
        step: int,
        total: int | None,
        reason: str,
        collect: Callable[[], dict[str, Any]],
        data: dict[str, Any],
    ) -> None:
        """Take a checkpoint of a step boundary; a second time at one boundary does nothing."""
        if self.saved_at == step:
            return
        self.saved_at = step
        self._due = False
        self._last = time.monotonic()
        with self._pulse.during(Phase.SAVE):
            self._saver.save(step, total, reason, collect, data)

    def surely(self, take: Callable[[], None]) -> None:
        """Take the last state of this attempt, and return when it is committed.

        What fails is tried again, on all ranks alike, while the state is in memory: nobody will make it again.

        Args:
            take: calls :meth:`take`.

        Raises:
            Disagreement: the ranks stand at different positions, as they will at every further try.
            CheckpointError: the last try failed, too.
            AgreementTimeout: it takes too long.
        """
        take()
        for delay in RETRY_DELAYS:
            try:
                self.wait()
            except Disagreement:
                raise
            except (CheckpointError, AgreementTimeout) as error:
                if self._leads:
                    _log.warning(
                        "ftrun: %s; this is the last state, so it is taken again in %g s, as it is then", error, delay
                    )
            else:
                return
            time.sleep(delay)
            self.saved_at = None
            take()
        self.wait()

    def wait(self) -> None:
        """Return when everything that was taken is committed.

        Raises:
            CheckpointError: the last one was not.
            AgreementTimeout: it takes too long.
        """
        with self._pulse.during(Phase.SAVE):
            self._saver.wait(_COMMIT_SECONDS)
        self.announce()

    def announce(self) -> None:
        """Call ``commit`` callbacks for what was committed since the last call. At every step boundary; cheap."""
        committed = self._saver.poll()
        if not committed:
            return
        stall, drain = self._saver.stall_seconds, self._saver.commit_seconds
        if stall is not None and drain is not None:
            chosen = self._interval.measured(stall, drain)
            if chosen is not None:
                self._tell(chosen)
        for checkpoint in committed:
            for function in REGISTRY.at("commit"):
                function(checkpoint)

    def close(self, timeout: float) -> None:
        """Let go; what was staged before gets so many seconds for its commit.

        Raises:
            CheckpointError: the last one failed.
            AgreementTimeout: it takes longer.
        """
        self._saver.close(timeout)
