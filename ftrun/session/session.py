"""The Session: a training script's side of ftrun. It restores, counts, saves, and stops when asked."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ftrun import events, inject, pulse
from ftrun.contract import Every, ExitCode, WorkerContract
from ftrun.errors import AgreementTimeout, CheckpointError, StateMismatch, UsageError
from ftrun.pulse import Phase
from ftrun.rundir import RunDir
from ftrun.session import agreement, alone, gradients, random_state, saving, tracked
from ftrun.session.agreement import Agreement
from ftrun.session.callbacks import REGISTRY
from ftrun.session.checkpoint import Checkpoint
from ftrun.session.place import Place
from ftrun.session.process_group import default_group, device_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.utils.data import Dataset

    from ftrun.data.loader import DataLoader

    T = TypeVar("T")

DEFAULT_EVERY = Every(seconds=600.0)
_EVENT_PERIOD = 0.2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_COMMIT_SECONDS = 600.0


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
        store: Any = None,
        *,
        every: Every | None = None,
    ) -> None:
        self.device = device
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self._place = place
        self._contract = contract
        self._store = store
        self._every = contract.every or every or DEFAULT_EVERY
        self._log = events.EventLog(
            RunDir(contract.run_path).events(contract.node), attempt=contract.attempt, rank=place.rank
        )
        self._tracked: dict[str, Any] = {}
        self._loaders: dict[str, DataLoader[Any]] = {}
        self._gradients = gradients.PendingGradients()
        self._metrics: dict[str, Any] = {}
        self._commits: queue.SimpleQueue[Checkpoint] = queue.SimpleQueue()
        self._total: int | None = None
        self._saved_at: int | None = None
        self._save_due = False
        self._stop: str | None = None
        self._stop_asked: str | None = None
        self._told = False
        self._began = False
        self._restore_told = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._driven = False
        self._data_wait = 0.0
        self._last_event = 0.0
        self._last_save = time.monotonic()
        self._saver = saving.Saver(place, contract, self._log, self._commits.put)
        self._pulse = pulse.Pulse(Path(contract.worker_dir) / "pulse")
        self._load()
        self._pulse.own(base=self.step)
        self._agreement = Agreement(place, store, first_point=self.step + 1)

    def _load(self) -> None:
        started = time.monotonic()
        stored = saving.load(self._contract, self._place)
        self._stored = stored
        self.step = stored.step if stored is not None else 0
        self._unclaimed = set(stored.value["tracked"]) if stored is not None else set()
        self.resume: Checkpoint | None = None
        if stored is None or self._contract.resume is None:
            return
        self._saved_at = stored.step
        self.resume = Checkpoint(
            step=stored.step,
            name=self._contract.resume,
            root=self._contract.root,
            total=stored.total,
            reason=stored.manifest.reason,
            extra=stored.value["extra"],
        )
        self._tell(events.Restored(self.step, self._contract.resume, time.monotonic() - started))

    @classmethod
    @contextlib.contextmanager
    def open(cls, *, every: int | None = None, process_group: bool = True) -> Iterator[Session]:
        """A Session for the length of a ``with`` block; :func:`ftrun.entrypoint` is this as a decorator.

        Args:
            every: steps between checkpoints, where the job doesn't say; 10 minutes otherwise.
            process_group: make the default process group where the script has not, and take it down at the end.

        Raises:
            UsageError: the run can't be resumed or its directory can't be used.
        """
        place = Place.from_environment(os.environ)
        device = device_for(place)
        interval = None if every is None else Every(steps=_positive(every))
        with (
            default_group(place, device) if process_group else contextlib.nullcontext(),
            contextlib.ExitStack() as leaving_last,
        ):
            contract = WorkerContract.from_environment(os.environ)
            helper = None
            if contract is None:
                # Every restart under torchrun brings a new store or a new count; stale answers must not be read.
                scope = f"alone-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
                store = agreement.connect(place, scope)
                helper = alone.settle(place, store, os.environ)
                contract = helper.contract
                if helper.lock is not None:
                    leaving_last.callback(helper.lock.release)
            else:
                store = agreement.connect(place, f"epoch-{contract.epoch}")
            for module in contract.callbacks:
                _import(module)
            session = cls(place, device, contract, store, every=interval)
            ended = "failed"
            try:
                yield session
                session._leave()
                ended = "finished"
            except SystemExit as leaving:
                ended = "stopped" if leaving.code == ExitCode.TRY_AGAIN else "failed"
                raise
            finally:
                session._close()
                if helper is not None and helper.lock is not None:
                    code = {"finished": 0, "stopped": int(ExitCode.TRY_AGAIN)}.get(ended, 1)
                    session._tell(events.RunEnded(outcome=ended, exit_code=code))

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
        for name, value in objects.items():
            if value is not None:
                value = tracked.unwrapped(value)
                tracked.require_stateful(name, value)
                self._restore(name, value)
                self._tracked[name] = value
                self._watch(name, value)
            self._unclaimed.discard(name)
        self._restore_rest()
        if not self._unclaimed:
            self._tell_restored()

    def _watch(self, name: str, value: Any) -> None:
        import torch

        if isinstance(value, torch.optim.Optimizer):
            self._gradients.watch(name, value)

    def _restore(self, name: str, value: Any) -> None:
        if self._stored is None or self.resume is None:
            return
        states = self._stored.value["tracked"]
        if name not in states:
            raise StateMismatch(
                f"checkpoint {self.resume.name} holds no {name!r}; it holds {', '.join(states) or 'nothing'}. "
                "Track it under its old name, leave it out, or start over with --fresh."
            )
        self._pulse.phase(Phase.RESTORE)
        tracked.restore(name, value, states[name], self.resume.name)

    def _restore_rest(self) -> None:
        """Pending gradients and random states; again at the first step, since building things draws numbers."""
        if self._stored is None or self.resume is None:
            return
        value, own = self._stored.value, self._stored.own
        pending = {name: each for name, each in value["gradients"].items() if name in self._tracked}
        if pending and self._stored.manifest.world_size != self.world_size:
            raise StateMismatch(
                f"checkpoint {self.resume.name} was taken while gradients were being accumulated, on "
                f"{self._stored.manifest.world_size} ranks; it resumes only on as many, not on {self.world_size}."
            )
        self._gradients.restore(pending)
        if own:
            random_state.restore(value["random"])
        else:
            random_state.derive(self.resume.name, self.rank)

    def loader(self, dataset: Dataset[T], *, name: str | None = None, **arguments: Any) -> DataLoader[T]:
        """A data loader that continues at the exact sample; see :class:`ftrun.DataLoader` for its arguments.

        Args:
            dataset: map-style dataset, the same on all ranks.
            name: under which its position is stored; ``data``, then ``data2`` and so on.
            arguments: ``global_batch``, ``shuffle``, ``seed``, ``num_workers`` and the rest.

        Raises:
            StateMismatch: the checkpoint's position belongs to other data.
            UsageError: arguments that can't work, or a name that is taken.
        """
        from ftrun.data.loader import DataLoader

        if self._began:
            raise UsageError("ft.loader() comes before the first step, so that it continues where it was.")
        count = len(self._loaders) + 1
        name = name or ("data" if count == 1 else f"data{count}")
        if name in self._loaders:
            raise UsageError(f"ft.loader(name={name!r}): that name is taken; give each loader its own.")
        made: DataLoader[T] = DataLoader(dataset, rank=self.rank, world_size=self.world_size, **arguments)
        stored = self._stored.value["loaders"].get(name) if self._stored is not None else None
        if stored is not None:
            made.load_state_dict(stored)
        elif self._stored is not None and self.resume is not None:
            raise StateMismatch(
                f"checkpoint {self.resume.name} holds no position of a loader {name!r}; it holds "
                f"{', '.join(self._stored.value['loaders']) or 'none'}. Make the loaders as before, or start over "
                "with --fresh."
            )
        self._loaders[name] = made
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
        self._check_batches(batches)
        self._check_total(_positive(total))
        self._driven = True
        self._begin(rewind=True)
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
        while self.step < total:
            waited = time.monotonic()
            batch = self.step if source is None else next(source, _END)
            if batch is _END:
                return
            self._data_wait += time.monotonic() - waited
            inject.fire_if_due(self._contract, self.rank, self.step + 1)
            yield batch
            self.step_end()
            if self.should_save():
                self._save("interval")
            if self._stop is not None:
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
                "--allow-new-total, or start over with --fresh."
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
        if self._unclaimed and self.resume is not None:
            names = ", ".join(sorted(self._unclaimed))
            raise StateMismatch(
                f"checkpoint {self.resume.name} holds {names}, which this script doesn't track. Track it, or give it "
                f"up with ft.track({min(self._unclaimed)}=None)."
            )
        self._began = True
        self._tell_restored()
        if rewind:
            self._restore_rest()
        self._stored = None  # its tensors are not needed any more
        self._listen()
        self._pulse.phase(Phase.STEP)
        self._tell(events.StepsBegan(step=self.step, total=self._total))

    def _tell_restored(self) -> None:
        if self.resume is None or self._restore_told:
            return
        self._restore_told = True
        for function in REGISTRY.at("restore"):
            function(self.resume)

    def _listen(self) -> None:
        """SIGTERM and SIGINT ask for a stop at the next boundary; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return

        def ask(number: int, _frame: object) -> None:
            self._stop_asked = signal.Signals(number).name
            for each in _STOP_SIGNALS:
                signal.signal(each, signal.SIG_DFL)

        for each in _STOP_SIGNALS:
            self._handlers[each] = signal.signal(each, ask)

    def log(self, **metrics: Any) -> None:
        """Note metrics of the current step: numbers, or tensors with one element. Rank 0's are kept.

        A tensor is read only when it is written down, a few times a second at most, so logging a loss that is
        still being computed does not hold the loop up.
        """
        self._metrics.update(metrics)

    def step_end(self, **metrics: Any) -> None:
        """Say that a step is complete. :meth:`steps` does this by itself; a loop of one's own calls it.

        In a loop of one's own, call it after the optimizer step, then ``if ft.should_save(): ft.save()``, then leave
        the loop ``if ft.should_stop()``.
        """
        self._begin()
        self._metrics.update(metrics)
        self.step += 1
        for each in self._loaders.values():
            each.commit()
        self._pulse.step(self.step)
        instruction = self._agreement.at(self.step, self._decide)
        steps = self._every.steps
        self._save_due = self.step % steps == 0 if steps is not None else bool(instruction and instruction.save)
        if instruction is not None and instruction.stop is not None:
            self._stop = instruction.stop
        self._tell_others()
        for function in REGISTRY.at("step"):
            function(self.step, dict(self._metrics))
        self._announce_commits()
        self._note_step()
        self._metrics.clear()
        if not self._driven:
            inject.fire_if_due(self._contract, self.rank, self.step + 1)

    def _decide(self) -> tuple[bool, str | None]:
        """Rank 0, at a point: is a save due by the clock, and was a stop asked for, here or on another rank?"""
        due = self._every.seconds is not None and time.monotonic() - self._last_save >= self._every.seconds
        return due, self._stop_asked or self._agreement.asked_to_stop()

    def _tell_others(self) -> None:
        if self._stop_asked is not None and not self._told and self.rank != 0:
            self._agreement.ask_to_stop(self._stop_asked)
            self._told = True

    def _announce_commits(self) -> None:
        functions = REGISTRY.at("commit")
        while functions:
            try:
                checkpoint = self._commits.get_nowait()
            except queue.Empty:
                return
            for function in functions:
                function(checkpoint)

    def _note_step(self) -> None:
        now = time.monotonic()
        first = self._last_event == 0.0
        last = self.step == self._total
        if self.rank != 0 or not (first or last or now - self._last_event >= _EVENT_PERIOD):
            return
        self._last_event = now
        metrics = {name: _number(name, value) for name, value in self._metrics.items()}
        self._tell(events.Step(step=self.step, metrics=metrics, data_wait=self._data_wait))
        self._data_wait = 0.0

    def should_save(self) -> bool:
        """Whether a checkpoint is due at this step boundary: the same answer on every rank."""
        return self._save_due and self._saved_at != self.step

    def save(self) -> None:
        """Take a checkpoint of this step boundary now. Called on all ranks; a second time at one step does nothing.

        Returns when the state is copied. Writing and committing go on in the background; a save that comes while
        the one before is still being written waits for it. One that fails is reported, and training goes on.
        """
        self._save("user")

    def _save(self, reason: str) -> None:
        if self._saved_at == self.step:
            return
        self._begin()
        self._saved_at = self.step
        self._save_due = False
        self._last_save = time.monotonic()
        self._pulse.phase(Phase.SAVE)
        loaders = {name: each.state_dict() for name, each in self._loaders.items()}
        data = {"step": self.step, "loaders": loaders}
        self._saver.save(self.step, self._total, reason, lambda: self._collect(loaders), data)
        self._pulse.phase(Phase.STEP)

    def _collect(self, loaders: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        for function in REGISTRY.at("save"):
            given = function()
            if given is not None and not isinstance(given, dict):
                name = getattr(function, "__qualname__", repr(function))
                raise UsageError(f'@ftrun.on("save") {name}() returned {type(given).__name__}; return a dict, or None.')
            extra.update(given or {})
        return {
            "tracked": {name: each.state_dict() for name, each in self._tracked.items()},
            "gradients": self._gradients.capture(),
            "loaders": loaders,
            "random": random_state.capture(),
            "extra": extra,
        }

    def request_stop(self, reason: str = "the script asked for it") -> None:
        """Ask all ranks to save and leave at a step boundary within about a second. Any rank may call it."""
        self._stop_asked = reason

    def should_stop(self) -> bool:
        """Whether all ranks leave now: the same answer on every rank. For loops of one's own."""
        return self._stop is not None

    def _stop_now(self) -> None:
        self._save("stop")
        self._saver.wait(_COMMIT_SECONDS)
        self._tell(events.StepsEnded(step=self.step, finished=False))
        raise SystemExit(int(ExitCode.TRY_AGAIN))

    def _finish(self) -> None:
        self._save("last")
        self._saver.wait(_COMMIT_SECONDS)
        self._announce_commits()
        self._pulse.phase(Phase.END)
        self._tell(events.StepsEnded(step=self.step, finished=True))

    def _leave(self) -> None:
        """The block ended well: what was saved is waited for, and a requested stop is honoured."""
        if self._stop is not None:
            self._stop_now()
        self._saver.wait(_COMMIT_SECONDS)
        self._announce_commits()

    def _close(self) -> None:
        # Also after an error: what was staged before it deserves its commit, within the grace that is left.
        with contextlib.suppress(AgreementTimeout, CheckpointError):
            self._saver.close(_CLOSE_SECONDS)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
            self._handlers.clear()

    def _tell(self, event: events.Event) -> None:
        if self.rank == 0:
            self._log.write(event)


_END: Any = object()
_CLOSE_SECONDS = 20.0


def _positive(number: int) -> int:
    if not isinstance(number, int) or number < 1:
        raise UsageError(f"a number of steps is a whole number from 1, not {number!r}.")
    return number


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"ft.log({name}=...): a metric is one number, not {type(value).__name__}: {error}") from error


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UsageError(
            f"callbacks: there is no module {module!r} (looked in the script's directory and the installed packages). "
            "Check its name in the job file."
        ) from error
