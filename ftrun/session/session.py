"""The Session: a training script's side of ftrun. It restores, counts, saves, and stops when asked."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ftrun import inject, pulse
from ftrun.errors import StateMismatch, UsageError
from ftrun.pulse import Phase
from ftrun.session.boundaries import Boundaries
from ftrun.session.restoration import Restoration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.distributed import Store
    from torch.utils.data import Dataset

    from ftrun.contract import Every, WorkerContract
    from ftrun.data.loader import DataLoader
    from ftrun.session.checkpoint import Checkpoint
    from ftrun.session.place import Place

    T = TypeVar("T")

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
        self._pulse = pulse.Pulse(Path(contract.worker_dir) / "pulse")
        with self._pulse.during(Phase.RESTORE):
            self._restoration = Restoration(contract, place)
        self.resume: Checkpoint | None = self._restoration.checkpoint
        self._boundaries = Boundaries(place, contract, store, self._pulse, self._restoration, every)
        self._contents = self._boundaries.contents
        self._checkpoints = self._boundaries.checkpoints
        self._driven = False

    @property
    def step(self) -> int:
        """Steps completed, counted over the whole run."""
        return self._boundaries.step

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
        if self._boundaries.began:
            raise UsageError("ft.track() comes before the first step, so that what it restores is used by all of them.")
        with self._pulse.during(Phase.RESTORE):
            self._contents.track(objects)
        if self._restoration.all_claimed:
            self._pulse.mark("restored")
            self._restoration.tell()

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

        if self._boundaries.began:
            raise UsageError(
                "ft.loader() comes before the first step, so that it continues where it was. Make it once, before the "
                "loop over epochs: each loop over it begins the next epoch. A loader whose position nobody needs, for "
                "an evaluation, is ftrun.DataLoader(dataset, rank=ft.rank, world_size=ft.world_size, ...)."
            )
        name = self._contents.name_for(name)
        share = {"rank": self.rank, "world_size": self.world_size, **arguments}
        made: DataLoader[T] = DataLoader(dataset, **share)
        self._restoration.give_loader(name, made)
        follower, dropped = self._boundaries.filling.register(name, made)
        self._contents.take_in(name, made, follower, dropped)
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
        self._boundaries.begin(rewind=True)
        self._boundaries.filling.drive(batches, total, self.step)
        try:
            while self.step < total:
                before = self.step
                yield from self._epoch(batches, total)
                if self.step == before:
                    raise UsageError("ft.steps(): the loader yields no batch, so no step can be made.")
            self._boundaries.finish()
        finally:
            self._driven = False

    def _epoch(self, batches: Iterable[T] | None, total: int) -> Iterator[Any]:
        source = iter(batches) if batches is not None else None
        starting = source is not None
        counted = self._contents.waits.counts(batches)
        while self.step < total:
            waited = time.monotonic()
            # A loader's workers start with the first batch of an epoch, which may take as long as a first step.
            with self._pulse.during(Phase.FIRST_STEP) if starting else contextlib.nullcontext():
                batch = self.step if source is None else next(source, _END)
            starting = False
            if batch is _END:
                return
            if not counted:  # by the loader itself
                self._boundaries.notes.data_wait += time.monotonic() - waited
            inject.fire_if_due(self._contract, self.rank, self.step + 1)
            yield batch
            self.step_end()
            if self.should_save():
                self._boundaries.save("interval")
            if self.should_stop():
                self._boundaries.stop_now()

    def _check_batches(self, batches: object) -> None:
        if batches is None or self._contents.has_position(batches):
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
        self._boundaries.total = total
        self._pulse.expect(total)

    def log(self, **metrics: Any) -> None:
        """Note metrics of the current step: numbers, or tensors with one element. Rank 0's are kept.

        A tensor is read only when it is written down, a few times a second at most, so logging a loss that is
        still being computed does not hold the loop up.
        """
        self._boundaries.notes.metrics.update(metrics)

    def step_end(self, **metrics: Any) -> None:
        """Say that a step is complete. :meth:`steps` does this by itself; a loop of one's own calls it.

        In a loop of one's own, call it after the optimizer step, then ``if ft.should_save(): ft.save()``, then leave
        the loop ``if ft.should_stop()``.
        """
        self._boundaries.notes.metrics.update(metrics)
        self._boundaries.step_end()
        if not self._driven:
            inject.fire_if_due(self._contract, self.rank, self.step + 1)

    def should_save(self) -> bool:
        """Whether a checkpoint is due at this step boundary: the same answer on every rank."""
        return self._checkpoints.due(self.step)

    def save(self) -> None:
        """Take a checkpoint of this step boundary now. Called on all ranks; a second time at one step does nothing.

        Returns when everything is copied that something else than the optimizer's step may change. The rest is copied
        beside the next forward and backward, and writing and committing go on in the background. While two saves are
        on their way it waits for the first. One that fails is reported, and training goes on.
        """
        self._boundaries.save("user")

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
        self._boundaries.count_waits()
        with self._pulse.during(_PHASES[name]):
            yield
        self._contents.waits.since()  # an evaluation's waits for its own data are no step's

    def request_stop(self, reason: str = "the script asked for it") -> None:
        """Ask all ranks to save and leave at a step boundary within about a second. Any rank may call it."""
        self._boundaries.ask_to_stop(reason)

    def should_stop(self) -> bool:
        """Whether all ranks leave now: the same answer on every rank. For loops of one's own."""
        return self._boundaries.stops

    def leave(self) -> None:
        """The script's part ended well: what was saved is waited for, and a stop that was agreed on is honoured.

        Called by :meth:`open` as its block ends.
        """
        self._boundaries.leave()

    def close(self) -> None:
        """Let go of everything, after an error too: what was staged before it gets a moment for its commit.

        Called by :meth:`open` last of all.
        """
        self._boundaries.close()


def positive(number: int) -> int:
    """A number of steps.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(number, int) or number < 1:
        raise UsageError(f"a number of steps is a whole number from 1, not {number!r}.")
    return number
