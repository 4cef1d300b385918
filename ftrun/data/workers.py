"""What runs inside a loader worker process: its start, and the fetching of one batch.

The same fetching runs in the training process where the loader has no workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset, get_worker_info

from ftrun.data.randomness import preserved, sample_seed, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.order import Ticket

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Fetcher:
    """Stands between torch's loader and the user's dataset: takes a ticket, returns the collated batch.

    It collates as well, so that random numbers drawn by ``collate_fn`` are settled like those of the samples.

    Attributes:
        dataset: the user's map-style dataset.
        collate: the user's ``collate_fn``, or torch's default.
        seed: seed of the random numbers of each sample.
        sample_seeds: seed before each sample. Needs one call for each sample; without it a dataset that has
            ``__getitems__`` is asked for the whole batch at once.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int
    sample_seeds: bool

    def __getitems__(self, ticket: Ticket) -> Any:
        """Fetch and collate one batch; torch passes what the batch sampler yielded, as it is.

        Raises:
            Exception: whatever the dataset or ``collate_fn`` raises, with a note that names the sample.
            RuntimeError: one of them let a StopIteration out, which would end the epoch without a word.
        """
        if not self.sample_seeds:
            return self._collate(ticket, self._fetch_whole(ticket))
        in_training_process = get_worker_info() is None
        with preserved() if in_training_process else contextlib.nullcontext():
            samples = self._fetch_each(ticket)
            seed_everything(sample_seed(self.seed, ticket.epoch, ticket.indices[0], purpose="collate"))
            return self._collate(ticket, samples)

    def _fetch_each(self, ticket: Ticket) -> list[Any]:
        dataset, epoch, seed = self.dataset, ticket.epoch, self.seed
        samples: list[Any] = []
        try:
            if self.sample_seeds:
                for index in ticket.indices:
                    seed_everything(sample_seed(seed, epoch, index))
                    samples.append(dataset[index])
            else:
                for index in ticket.indices:
                    samples.append(dataset[index])  # noqa: PERF401  how far it got says which sample failed
        except Exception as error:
            index = ticket.indices[len(samples)]
            _note(error, f"sample index {index} of epoch {epoch}{_file_of(dataset, index)}")
            raise
        return samples

    def _fetch_whole(self, ticket: Ticket) -> list[Any]:
        if not getattr(self.dataset, "__getitems__", None):
            return self._fetch_each(ticket)
        try:
            samples: list[Any] = self.dataset.__getitems__(ticket.indices)
        except Exception as error:
            _note(error, f"sample indices {ticket.indices} of epoch {ticket.epoch}")
            raise
        return samples

    def _collate(self, ticket: Ticket, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            _note(error, f"the batch of sample indices {ticket.indices} of epoch {ticket.epoch}, in collate_fn")
            raise


@dataclass(frozen=True)
class WorkerStart:
    """The ``worker_init_fn`` that ftrun gives to torch. Runs once in each new worker, before its first batch.

    Attributes:
        trainer: process id of the training process.
        started_by_main_thread: whether the training process starts its workers from its main thread.
        user: the user's ``worker_init_fn``, called last, or None.
    """

    trainer: int
    started_by_main_thread: bool
    user: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """Tie the worker's life to the training process, leave signals to it, then call the user's."""
        self._die_with_trainer()
        if isinstance(multiprocessing.current_process(), multiprocessing.context.ForkProcess):
            close_inherited("/dev/nvidia")
        # The training process decides what Ctrl-C means. Its handler has been inherited and would run here
        # too, and a worker that dies of Ctrl-C takes away the batch that a clean stop still needs. SIGTERM
        # has been given back its meaning by torch: it ends the worker.
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        _show_users_dataset()
        if self.user is not None:
            self.user(worker_id)

    def _die_with_trainer(self) -> None:
        # The kernel sends the signal when the *thread* that started this process ends, so it suits workers of
        # the main thread only; and a fork server is not the training process. Both leave the watching to a
        # thread.
        direct_child = os.getppid() == self.trainer
        if direct_child and self.started_by_main_thread and sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self.trainer:  # it ended before the kernel was asked
                _kill_self()
        else:
            threading.Thread(target=_watch_trainer, name="ftrun-trainer-watch", daemon=True).start()


def _watch_trainer() -> None:
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        multiprocessing.connection.wait([trainer.sentinel])
        _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _show_users_dataset() -> None:
    # A worker_init_fn opens files on `get_worker_info().dataset`: that is the user's dataset, not our
    # wrapper.
    info = get_worker_info()
    if info is not None and hasattr(info.dataset, "dataset"):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # a frozen class in newer torch


def close_inherited(prefix: str) -> None:
    """Close this process's descriptors of files whose path begins so.

    A worker that is stuck holds on to what it inherited: with a GPU's device files, to the memory there that the
    training process, when it has died, should have given back.
    """
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                if os.readlink(f"/proc/self/fd/{name}").startswith(prefix):
                    os.close(int(name))


def _file_of(dataset: Any, index: int) -> str:
    """Which file a sample is, where the dataset has ``urls``; through any Subset."""
    try:
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        urls = getattr(dataset, "urls", None)
        return "" if urls is None else f" ({urls[index]})"
    except Exception:  # this is about an error of the dataset, which must not be lost for another
        return ""


def _note(error: Exception, what: str) -> None:
    if isinstance(error, StopIteration):
        raise RuntimeError(f"StopIteration came out while ftrun was loading {what}") from error
    error.add_note(f"ftrun was loading {what}")
