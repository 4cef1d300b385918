"""What runs at the start of a loader's worker process: what it inherits, and with whom it ends."""

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
from typing import TYPE_CHECKING

from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


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
