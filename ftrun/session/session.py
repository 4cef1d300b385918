"""The Session: a training script's side of ftrun. It restores, counts, saves, and stops when asked."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from ftrun import events, inject, pulse
from ftrun.checkpoint import state
from ftrun.contract import AUTO, ExitCode
from ftrun.errors import AgreementTimeout, CheckpointError, StateMismatch, UsageError
from ftrun.pulse import Phase
from ftrun.rundir import RunDir
from ftrun.session import gradients, parked, random_state, tracked
from ftrun.session.agreement import Agreement
from ftrun.session.callbacks import REGISTRY
from ftrun.session.checkpoints import Checkpoints
from ftrun.session.filling import Filling
from ftrun.session.metrics import StepNotes
from ftrun.session.restoration import Restoration
from ftrun.session.saving import Saver
from ftrun.session.stopping import StopRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed import Store
    from torch.utils.data import Dataset

    from ftrun.contract import Every, WorkerContract
    from ftrun.data.loader import DataLoader
    from ftrun.session.checkpoint import Checkpoint
    from ftrun.session.place import Place

    T = TypeVar("T")

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 20.0
_END: Any = object()
_PHASES = {"eval": Phase.EVAL, "save": Phase.SAVE}


class Session:
    """One worker's part in a run. Made by :func:`ftrun.entrypoint` or :meth:`open`; one per process.

    All methods are called on the training thread, and on every rank unless said otherwise.

    Attributes:
        device: this rank's device; its own GPU where there are GPUs.
        rank: global rank.
        world_size: number of workers.
        local_rank: rank on this node.
        step: steps completed, counted over the whole run.
        resume: the checkpoint that this attempt resumes from, or None for a fresh start.
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        contract: WorkerContract,
        store: Store | None = None,
        *,
        every: Every | None = None,
    ) -> None:
        self.device = device
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self._contract = contract
        events_file = RunDir(contract.run_path).events(contract.node)
        self._log = events.EventLog(events_file, attempt=contract.attempt, rank=place.rank)
        self._pulse = pulse.Pulse(Path(contract.worker_dir) / "pulse")
        with self._pulse.during(Phase.RESTORE):
            self._restoration = Restoration(contract, place)
        self.resume: Checkpoint | None = self._restoration.checkpoint
        self.step = self._restoration.step
        self._tracked: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._loaders: dict[str, DataLoader[Any]] = {}
        self._gradients = gradients.PendingGradients()
        self._notes = StepNotes()
        self._filling = Filling(contract, place)
        self._stop = StopRequest(place.rank)
        self._stop.listen_for_requests()
        self._agreement = Agreement(place, store, first_point=self.step + 1)
        self._saver = Saver(place, contract, self._log, store)
        how_often = contract.every or every or AUTO
        self._checkpoints = Checkpoints(self._saver, self._pulse, how_often, place, contract, self._tell)
        self._checkpoints.saved_at = self.step if self.resume is not None else None
        self._pulse.own(base=self.step)
        self._total: int | None = None
        self._began = False
        self._ended = False
        self._driven = False

    @classmethod
    @contextlib.contextmanager
    def open(cls, *, every: int | None = None, process_group: bool = True) -> Iterator[Session]:
        """A Session for the length of a ``with`` block; :func:`ftrun.entrypoint` is this as a decorator.

        Args:
            every: steps between checkpoints, where the job doesn't say; chosen by what they cost otherwise.
            process_group: make the default process group where the script has not, and take it down at the end.

        Raises:
            UsageError: the run can't be resumed or its directory can't be used.
        """
        from ftrun.session import opening  # which needs this class

        with opening.opened(every=every, process_group=process_group) as session:
            yield session

    def track(self, **objects: Any) -> None:
        """Say what a checkpoint holds, and get it back: when there is a commit, every object is restored here.

        Track models, optimizers, schedulers, scalers, averages: anything with ``state_dict`` and
        ``load_state_dict``. Models wrapped in DistributedDataParallel or torch.compile are stored as if they were
        not. Loaders from :meth:`loader` are tracked by themselves, and so are the random states.

        ``name=None`` says that what a checkpoint holds under that name is given up.

        Raises:
            StateMismatch: an object's shapes don't fit the checkpoint, or the checkpoint has no such name.
            UsageError: an object has no state, or steps have begun.
        """
        if self._began:
            raise UsageError("ft.track() comes before the first step, so that what it restores is used by all of them.")
        with self._pulse.during(Phase.RESTORE):
            self._track(objects)
        if self._restoration.all_claimed:
            self._pulse.mark("restored")
            self._restoration.tell()

    def _track(self, objects: dict[str, Any]) -> None:
        unwrapped = {name: tracked.unwrapped(value) for name, value in objects.items() if value is not None}
        for name, value in unwrapped.items():
            tracked.require_stateful(name, value)
        for name in objects.keys() - unwrapped.keys():
            self._restoration.give_up(name)
        self._restoration.give_all(unwrapped, {**self._tracked, **unwrapped})
        for name, value in unwrapped.items():
            self._given[name], self._tracked[name] = objects[name], value
            if isinstance(value, torch.optim.Optimizer):
                self._gradients.watch(name, value)
        self._restoration.give_rest(self._gradients, set(self._tracked))

    def loader(self, dataset: Dataset[T], *, name: str | None = None, **arguments: Any) -> DataLoader[T]:
        """A data loader that continues at the exact sample; see :class:`ftrun.DataLoader` for its arguments.

        Args:
            dataset: the same on all ranks.
            name: under which its position is stored; ``data``, then ``data2`` and so on.
            arguments: ``global_batch``, ``shuffle``, ``seed``, ``num_workers`` and the rest. ``rank`` and
                ``world_size`` are those of the data-parallel group where that isn't all ranks: the ranks of a
                tensor-parallel group must get the same samples.

        Raises:
            StateMismatch: the checkpoint's position belongs to other data.
            UsageError: arguments that can't work, a name that is taken, or steps have begun.
        """
        from ftrun.data.loader import DataLoader

        if self._began:
            raise UsageError("ft.loader() comes before the first step, so that it continues where it was.")
        count = len(self._loaders) + 1
        name = name or ("data" if count == 1 else f"data{count}")
        if name in self._loaders:
            raise UsageError(f"ft.loader(name={name!r}): that name is taken; give each loader its own.")
        share = {"rank": self.rank, "world_size": self.world_size, **arguments}
        made: DataLoader[T] = DataLoader(dataset, **share)
        self._restoration.give_loader(name, made)
        self._loaders[name] = made
        self._filling.register(name, made)
        return made

    def steps(self, batches: Iterable[T] | None = None, *, total: int) -> Iterator[T]:
        """Yield batches until ``total`` steps of the run are complete, over as many epochs as that takes.

        One iteration of the loop is one step. After each, the position counts, callbacks run, and a checkpoint is
        taken when it is due; after the last one too, and the loop ends when that is committed.

        Args:
            batches: a loader from :meth:`loader`, or an object with ``state_dict`` and ``load_state_dict`` that is
                tracked; None yields the number of each step, from 0.
            total: steps of the whole run, those before a resume included.

        Raises:
            StateMismatch: the checkpoint was taken with another total, or holds what this script doesn't track.
            UsageError: ``batches`` has no position, so it could not continue exactly.
            SystemExit: with 75, when the run was asked to stop and its state is committed.
        """
        if self._driven:
            raise UsageError("ft.steps() is running already: one loop over steps can't be inside another.")
        self._check_batches(batches)
        self._check_total(positive(total))
        self._driven = True
        self._begin(rewind=True)
        self._filling.drive(batches, total)
        try:
            while self.step < total:
                before = self.step
                yield from self._epoch(batches, total)
                if self.step == before:
                    raise UsageError("ft.steps(): the loader yields no batch, so no step can be made.")
            self._finish()
        finally:
            self._driven = False

    def _epoch(self, batches: Iterable[T] | None, total: int) -> Iterator[Any]:
        source = iter(batches) if batches is not None else None
        starting = source is not None
        while self.step < total:
            waited = time.monotonic()
            # A loader's workers start with the first batch of an epoch, which may take as long as a first step.
            with self._pulse.during(Phase.FIRST_STEP) if starting else contextlib.nullcontext():
                batch = self.step if source is None else next(source, _END)
            starting = False
            if batch is _END:
                return
            self._notes.data_wait += time.monotonic() - waited
            inject.fire_if_due(self._contract, self.rank, self.step + 1)
            yield batch
            self.step_end()
            if self.should_save():
                self._save("interval")
            if self.should_stop():
                self._stop_now()

    def _check_batches(self, batches: object) -> None:
        known = batches is None or any(batches is each for each in self._loaders.values())
        if known or any(batches is each for each in self._tracked.values()):
            return
        raise UsageError(
            f"ft.steps() got a {type(batches).__name__} whose position it doesn't know, so a resumed run would see "
            "other samples. Make it with ft.loader(...), or track it: ft.track(loader=...) with state_dict and "
            "load_state_dict."
        )

    def _check_total(self, total: int) -> None:
        then = self.resume.total if self.resume is not None else None
        if then is not None and then != total and not self._contract.allow_new_total:
            raise StateMismatch(
                f"the checkpoint was taken in a run of {then:,} steps, and the script now asks for {total:,}. "
                f"Schedules that depend on the total would bend. Ask for {then:,} again, go on anyway with "
                f"{self._contract.to_allow_new_total}, or {self._contract.to_start_over}."
            )
        self._total = total
        self._pulse.expect(total)

    def _begin(self, *, rewind: bool = False) -> None:
        """Once: everything that is restored is in place, and signals ask for a stop.

        :meth:`steps` gets here before the first step, and takes back what building things drew since
        :meth:`track`. A loop of one's own gets here after its first step, whose draws and gradients must stay.
        """
        if self._began:
            return
        self._restoration.require_all_claimed()
        self._began = True
        self._restoration.tell()
        if rewind:
            self._restoration.settle_optimizers(self._tracked)
            self._restoration.give_rest(self._gradients, set(self._tracked))
        self._tell(self._restoration.event())
        self._restoration.forget()
        # What can't be stored is said now, and not when the first checkpoint is due.
        state.encode({"tracked": self._states()})
        self._saver.watch(self._given)
        self._stop.listen()
        self._pulse.mark("restored")
        self._pulse.phase(Phase.FIRST_STEP)
        self._tell(events.StepsBegan(step=self.step, total=self._total))

    def log(self, **metrics: Any) -> None:
        """Note metrics of the current step: numbers, or tensors with one element. Rank 0's are kept.

        A tensor is read only when it is written down, a few times a second at most, so logging a loss that is
        still being computed does not hold the loop up.
        """
        self._notes.metrics.update(metrics)

    def step_end(self, **metrics: Any) -> None:
        """Say that a step is complete. :meth:`steps` does this by itself; a loop of one's own calls it.

        In a loop of one's own, call it after the optimizer step, then ``if ft.should_save(): ft.save()``, then leave
        the loop ``if ft.should_stop()``.
        """
        self._begin()
        self._notes.metrics.update(metrics)
        self.step += 1
        for each in self._loaders.values():
            each.commit()
        self._filling.step(self.step)
        self._pulse.step(self.step)
        if self.step == self._restoration.step + 1:
            parked.note_imports(Path(self._contract.worker_dir))
            self._saver.prepare(lambda: {"tracked": self._states()})
        self._checkpoints.announce()
        self._agree()
        for function in REGISTRY.at("step"):
            function(self.step, dict(self._notes.metrics))
        if self.rank == 0:
            self._tell(self._notes.event(self.step, last=self.step == self._total))
        self._notes.metrics.clear()
        if not self._driven:
            inject.fire_if_due(self._contract, self.rank, self.step + 1)

    def _agree(self) -> None:
        """What all ranks do at this boundary: from the step's number where that says it, else from rank 0."""
        self._stop.pass_on(self._agreement)
        meet = self._checkpoints.meet(self.step)
        instruction = self._agreement.at(self.step, self._decide, meet=meet)
        self._checkpoints.heard(instruction is not None and instruction.save)
        if instruction is not None and instruction.stop is not None:
            self._stop.agreed = instruction.stop

    def _decide(self) -> tuple[bool, str | None]:
        """Rank 0, at a point: take a checkpoint now, and stop now, because of something here or on another rank?"""
        wanted = self._stop.save_wanted(self._agreement)
        return self._checkpoints.decide(self.step, wanted=wanted), self._stop.heard(self._agreement)

    def should_save(self) -> bool:
        """Whether a checkpoint is due at this step boundary: the same answer on every rank."""
        return self._checkpoints.due(self.step)

    def save(self) -> None:
        """Take a checkpoint of this step boundary now. Called on all ranks; a second time at one step does nothing.

        Returns when everything is copied that something else than the optimizer's step may change. The rest is copied
        beside the next forward and backward, and writing and committing go on in the background. While two saves are
        on their way it waits for the first. One that fails is reported, and training goes on.
        """
        self._save("user")

    def _save(self, reason: str) -> None:
        self._begin()
        loaders = {name: each.state_dict() for name, each in self._loaders.items()}
        self._checkpoints.take(
            self.step,
            self._total,
            reason,
            lambda: self._collect(loaders),
            {"step": self.step, "loaders": {name: _shared(each) for name, each in loaders.items()}},
        )

    def _save_surely(self, reason: str) -> None:
        self._checkpoints.surely(lambda: self._save(reason))

    def _collect(self, loaders: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        for function in REGISTRY.at("save"):
            given = function()
            if given is not None and not isinstance(given, dict):
                name = getattr(function, "__qualname__", repr(function))
                raise UsageError(f'@ftrun.on("save") {name}() returned {type(given).__name__}; return a dict, or None.')
            extra.update(given or {})
        return {
            "tracked": self._states(),
            "gradients": self._gradients.capture(),
            "loaders": loaders,
            "random": random_state.capture(),
            "extra": extra,
        }

    def _states(self) -> dict[str, Any]:
        return {name: tracked.state_of(name, each, self._tracked) for name, each in self._tracked.items()}

    @contextlib.contextmanager
    def phase(self, name: Literal["eval", "save"]) -> Iterator[None]:
        """Say what the script does for the length of a block, so that nobody takes it for a step that hangs.

        ::

            with ft.phase("eval"):
                evaluate(model)

        Each phase has a limit of its own, under ``watch`` in the job file. What ftrun does itself, checkpoints and
        the first step for two, is known without this.

        Args:
            name: ``eval``, or ``save`` for what the script stores by itself.

        Raises:
            UsageError: there is no such phase.
        """
        if name not in _PHASES:
            raise UsageError(f"ft.phase({name!r}): there is no such phase; say {' or '.join(map(repr, _PHASES))}.")
        with self._pulse.during(_PHASES[name]):
            yield

    def request_stop(self, reason: str = "the script asked for it") -> None:
        """Ask all ranks to save and leave at a step boundary within about a second. Any rank may call it."""
        self._stop.ask(reason)

    def should_stop(self) -> bool:
        """Whether all ranks leave now: the same answer on every rank. For loops of one's own."""
        return self._stop.agreed is not None

    def _stop_now(self) -> None:
        self._save_surely("stop")
        self._pulse.phase(Phase.END)
        self._tell(self._notes.rest())
        self._tell(events.StepsEnded(step=self.step, finished=False))
        raise SystemExit(int(ExitCode.TRY_AGAIN))

    def _finish(self) -> None:
        self._save_surely("last")
        self._pulse.phase(Phase.END)
        self._ended = True
        self._tell(events.StepsEnded(step=self.step, finished=True))

    def leave(self) -> None:
        """The script's part ended well: what was saved is waited for, and a stop that was agreed on is honoured.

        Called by :meth:`open` as its block ends.
        """
        if self.should_stop():
            self._stop_now()
        if self._began and self._checkpoints.saved_at == self.step:
            self._save_surely("user")  # taken by now: only what fails is taken again, on all ranks
        else:
            self._checkpoints.wait()
        self._pulse.phase(Phase.END)
        if self._began and not self._ended:
            # A loop of one's own, or one that was left early. Nobody but the script knows whether the state is that
            # of a boundary now, so it isn't saved here.
            self._tell(self._notes.rest())
            done = self._total is None or self.step >= self._total
            self._tell(events.StepsEnded(step=self.step, finished=done))
            saved_at = self._checkpoints.saved_at
            if self.rank == 0 and saved_at != self.step:
                last = f"its last checkpoint is of step {saved_at}" if saved_at is not None else "without a checkpoint"
                _log.warning("ftrun: the script ended at step %d, %s; ft.save() keeps the rest.", self.step, last)

    def close(self) -> None:
        """Let go of everything, after an error too: what was staged before it gets a moment for its commit.

        Called by :meth:`open` last of all.
        """
        with contextlib.suppress(UsageError):  # of a metric that is no number
            self._tell(self._notes.rest())
        with contextlib.suppress(AgreementTimeout, CheckpointError):
            self._checkpoints.close(_CLOSE_SECONDS)
        self._restoration.forget()
        self._filling.close(finished=self._ended)
        self._stop.unlisten()

    def _tell(self, event: events.Event | None) -> None:
        if self.rank == 0 and event is not None:
            self._log.write(event)


def _shared(position: dict[str, Any]) -> dict[str, Any]:
    """What of a loader's state must be the same on all ranks: all but the places in this rank's own shards."""
    return {key: value for key, value in position.items() if key != "shards"}


def positive(number: int) -> int:
    """A number of steps.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(number, int) or number < 1:
        raise UsageError(f"a number of steps is a whole number from 1, not {number!r}.")
    return number
