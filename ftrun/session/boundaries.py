"""What happens between two steps: counting, agreeing, checkpoints when they are due, and the end of a run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import events
from ftrun.checkpoint import state
from ftrun.contract import AUTO, ExitCode
from ftrun.errors import AgreementTimeout, CheckpointError, UsageError
from ftrun.pulse import Phase
from ftrun.rundir import RunDir
from ftrun.session import parked
from ftrun.session.agreement import Agreement
from ftrun.session.callbacks import REGISTRY
from ftrun.session.checkpoints import Checkpoints
from ftrun.session.contents import Contents
from ftrun.session.filling import Filling
from ftrun.session.metrics import StepNotes
from ftrun.session.saving import Saver
from ftrun.session.stopping import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store

    from ftrun.contract import Every, WorkerContract
    from ftrun.pulse import Pulse
    from ftrun.session.place import Place
    from ftrun.session.restoration import Restoration

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 20.0


class Boundaries:
    """One worker's part in the steps of a run. Training thread, on every rank unless said otherwise.

    Attributes:
        step: steps completed, counted over the whole run.
        total: steps of the whole run; None where the script hasn't said.
        began: the first step has begun, and everything that is restored is in place.
        contents: what a checkpoint holds.
        notes: of the current step.
        filling: tells whoever fetches ahead.
        checkpoints: when they are taken.
    """

    def __init__(
        self,
        place: Place,
        contract: WorkerContract,
        store: Store | None,
        pulse: Pulse,
        restoration: Restoration,
        every: Every | None,
    ) -> None:
        self.step = restoration.step
        self.total: int | None = None
        self.began = False
        self.contents = Contents(restoration)
        self.notes = StepNotes()
        self.filling = Filling(contract, place)
        self._rank = place.rank
        self._first_of_node = place.local_rank == 0
        self._contract = contract
        self._pulse = pulse
        self._restoration = restoration
        self._log = events.EventLog(
            RunDir(contract.run_path).events(contract.node), attempt=contract.attempt, rank=place.rank
        )
        self._stop = StopRequest(place.rank, launched=not contract.alone)
        self._stop.listen_for_requests()
        self._agreement = Agreement(place, store, first_point=self.step + 1)
        self._saver = Saver(place, contract, self._log, store)
        how_often = contract.every or every or AUTO
        self.checkpoints = Checkpoints(self._saver, pulse, how_often, place, contract, self._tell)
        self.checkpoints.saved_at = self.step if restoration.checkpoint is not None else None
        self._ended = False
        pulse.own(base=self.step)

    def begin(self, *, rewind: bool = False) -> None:
        """Once: everything that is restored is in place, and signals ask for a stop.

        :meth:`ftrun.Session.steps` gets here before the first step, and takes back what building things drew since
        they were tracked. A loop of one's own gets here after its first step, whose draws and gradients must stay.
        """
        if self.began:
            return
        self._restoration.require_all_claimed()
        self.began = True
        self._restoration.tell()
        if rewind:
            self.contents.rewind()
        self._tell_restored()
        self._restoration.forget()
        # What can't be stored is said now, and not when the first checkpoint is due.
        state.encode(self.contents.states())
        self._saver.watch(self.contents.given)
        self._stop.listen()
        self._pulse.mark("restored")
        self._pulse.phase(Phase.FIRST_STEP)
        self._tell(events.StepsBegan(step=self.step, total=self.total))

    def _tell_restored(self) -> None:
        """Say where the state came from: each rank for its launcher, the first one of a node for the record."""
        event = self._restoration.event()
        if event is not None:
            self._pulse.restored(event.read)
            if self._first_of_node:
                self._log.write(event)

    def step_end(self) -> None:
        """A step is complete."""
        self.begin()
        self.step += 1
        self.filling.step(self.step)  # first: between the two nobody should think that the run goes on for longer
        self.contents.loaders.commit()
        self._pulse.step(self.step)
        if self.step == self._restoration.step + 1:
            parked.note_imports(Path(self._contract.worker_dir))
            self._saver.prepare(self.contents.states)
        self.checkpoints.announce()
        self._agree()
        for function in REGISTRY.at("step"):
            function(self.step, dict(self.notes.metrics))
        self.count_waits()
        if self._rank == 0:
            self._tell(self.notes.event(self.step, last=self.step == self.total))
        self.notes.metrics.clear()

    def count_waits(self) -> None:
        """Note what loaders were waited for up to now in this step."""
        self.notes.data_wait += self.contents.waits.since()

    def _agree(self) -> None:
        """What all ranks do at this boundary: from the step's number where that says it, else from rank 0."""
        self._stop.pass_on(self._agreement)
        meet = self.checkpoints.meet(self.step)
        instruction = self._agreement.at(self.step, self._decide, meet=meet)
        self.checkpoints.heard(instruction is not None and instruction.save)
        if instruction is not None and instruction.stop is not None:
            self._stop.agreed = instruction.stop

    def _decide(self) -> tuple[bool, str | None]:
        """Rank 0, at a point: take a checkpoint now, and stop now, because of something here or on another rank?"""
        wanted = self._stop.save_wanted(self._agreement)
        return self.checkpoints.decide(self.step, wanted=wanted), self._stop.heard(self._agreement)

    def save(self, reason: str) -> None:
        """Take a checkpoint of this step boundary."""
        self.begin()
        loaders = self.contents.loaders.states()
        self.checkpoints.take(
            self.step,
            self.total,
            reason,
            lambda: self.contents.collect(loaders),
            {"step": self.step, "loaders": {name: _shared(each) for name, each in loaders.items()}},
        )

    def _save_surely(self, reason: str) -> None:
        self.checkpoints.surely(lambda: self.save(reason))

    def ask_to_stop(self, reason: str) -> None:
        """Ask all ranks to leave. Any rank, any thread."""
        self._stop.ask(reason)

    @property
    def stops(self) -> bool:
        """Whether all ranks leave now."""
        return self._stop.agreed is not None

    # The end

    def stop_now(self) -> None:
        """Save and leave, as was asked for.

        Raises:
            SystemExit: with 75.
        """
        self._save_surely("stop")
        self._pulse.phase(Phase.END)
        self._tell(self.notes.rest())
        self._tell(events.StepsEnded(step=self.step, finished=False))
        raise SystemExit(int(ExitCode.TRY_AGAIN))

    def finish(self) -> None:
        """All steps are complete: save, and wait for the commit."""
        self._save_surely("last")
        self._pulse.phase(Phase.END)
        self._ended = True
        self._tell(events.StepsEnded(step=self.step, finished=True))

    def leave(self) -> None:
        """See :meth:`ftrun.Session.leave`."""
        if self.stops:
            self.stop_now()
        if self.began and self.checkpoints.saved_at == self.step:
            self._save_surely("user")  # taken by now: only what fails is taken again, on all ranks
        else:
            self.checkpoints.wait()
        self._pulse.phase(Phase.END)
        if self.began and not self._ended:
            self._end_early()

    def _end_early(self) -> None:
        """A loop of one's own, or one that was left early.

        Nobody but the script knows whether the state is that of a boundary now, so it isn't saved here.
        """
        self._tell(self.notes.rest())
        done = self.total is None or self.step >= self.total
        self._tell(events.StepsEnded(step=self.step, finished=done))
        saved_at = self.checkpoints.saved_at
        if self._rank == 0 and saved_at != self.step:
            last = f"its last checkpoint is of step {saved_at}" if saved_at is not None else "without a checkpoint"
            _log.warning("ftrun: the script ended at step %d, %s; ft.save() keeps the rest.", self.step, last)

    def close(self) -> None:
        """See :meth:`ftrun.Session.close`."""
        with contextlib.suppress(UsageError):  # of a metric that is no number
            self._tell(self.notes.rest())
        with contextlib.suppress(AgreementTimeout, CheckpointError):
            self.checkpoints.close(_CLOSE_SECONDS)
        self._restoration.forget()
        self.filling.close(finished=self._ended)
        self._stop.unlisten()

    def _tell(self, event: events.Event | None) -> None:
        if self._rank == 0 and event is not None:
            self._log.write(event)


def _shared(position: dict[str, Any]) -> dict[str, Any]:
    """What of a loader's state must be the same on all ranks: all but the places in this rank's own shards."""
    return {key: value for key, value in position.items() if key != "shards"}
