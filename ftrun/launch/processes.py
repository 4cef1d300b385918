"""The worker processes of one attempt on this node, behind torch's interface for them (``PContext``).

What differs from torch's: the end of a worker is noticed at once, with its time, and nothing is done about it before
the agent has looked; killing takes whole process trees; a parked process stands in for a cold start where one is
ready; all output goes through :mod:`ftrun.launch.output.attempt`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from ftrun.launch import family
from ftrun.launch.standbys.parking import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    from ftrun.launch.output.attempt import Output
    from ftrun.launch.standbys.standby import Standbys

_REAP_SECONDS = 10.0
_SETTLE_SECONDS = 2.0
"""For the last words of workers, which are evidence. It takes as long only where the logs' storage doesn't answer, or
the thread that carries them gets no processor."""
_SLICE_SECONDS = 1.0
_POLL_SECONDS = 0.05
"""Between two looks where the kernel can't say that a process has ended."""


@dataclass(frozen=True)
class Ended:
    """How and when a worker ended.

    Attributes:
        code: exit code, negative for a signal.
        at: seconds since 1970, when it was noticed.
    """

    code: int
    at: float


class Workers(PContext):
    """Starts, watches and ends the workers of one attempt. Main thread only, like the agent that owns it.

    Args:
        entrypoint: the program.
        args: its arguments, by local rank.
        envs: variables of each local rank; completed by ``logs_specs``.
        logs_specs: says where output goes and completes the environments.
        standbys: parked processes that may be taken; the other workers are started cold.
        output: makes the attempt's output from what ``logs_specs`` says.
        wrap: turns a command into what is run for a local rank, for binding to processors.
    """

    def __init__(
        self,
        entrypoint: str,
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        standbys: Standbys,
        output: Callable[[LogsDest], Output],
        wrap: Callable[[tuple[str, ...], int], tuple[str, ...]],
    ) -> None:
        # Torch's constructor is passed over: it would make a thread for each file that is shown on the console.
        self._tail_logs: list[Any] = []
        self._stdout_tail = self._stderr_tail = TailLog("", {}, sys.stdout)  # torch 2.9 starts these
        destination = logs_specs.reify(envs)
        self.error_files: dict[int, str] = destination.error_files
        self._output = output(destination)
        self._standbys = standbys
        self._argv = {rank: wrap((entrypoint, *map(str, each)), rank) for rank, each in args.items()}
        self._envs = envs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, Ended] = {}
        self._descriptors: dict[int, int] = {}
        self._poll_object = select.poll()
        self._closed = False
        self.commands: dict[int, Command] = {}

    def _start(self) -> None:
        """Start all of them; called by torch, after it has installed its signal handlers."""
        for local_rank, argv in self._argv.items():
            stdout, stderr = self._output.open(local_rank)
            environment = {**os.environ, **self._envs[local_rank]}
            self.commands[local_rank] = Command(argv, environment, stdout, stderr, os.getcwd())
        taken = self._standbys.take(self.commands)
        for local_rank, command in self.commands.items():
            process = taken.get(local_rank) or cold(command)
            self._processes[local_rank] = process
            self._watch(local_rank, process.pid)
        self._output.start()

    def settle_output(self) -> None:
        """See that what was written so far is in the log files and on the console."""
        self._output.settle(_SETTLE_SECONDS)

    def _watch(self, local_rank: int, pid: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without process descriptors
            descriptor = os.pidfd_open(pid)
            self._descriptors[local_rank] = descriptor
            self._poll_object.register(descriptor, select.POLLIN)

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    @property
    def ended(self) -> dict[int, Ended]:
        """Workers that have ended, by local rank, as far as has been noticed."""
        return self._ended

    @property
    def failed(self) -> dict[int, Ended]:
        """Workers that ended with an error."""
        return {local_rank: ended for local_rank, ended in self._ended.items() if ended.code}

    @property
    def alive(self) -> list[int]:
        """Local ranks that still run."""
        return [local_rank for local_rank in self._processes if local_rank not in self._ended]

    def look(self, timeout: float, alarm: int | None = None) -> bool:
        """Wait until a worker ends, or the time is over; whether one has ended since the last look.

        Args:
            timeout: in seconds.
            alarm: a descriptor that ends the wait, too, when it is readable; with it there is a wait even where no
                worker is left.
        """
        if not self.alive and alarm is None:
            return False
        if len(self._descriptors) < len(self.alive):
            timeout = min(timeout, _POLL_SECONDS)
        if alarm is not None:
            self._poll_object.register(alarm, select.POLLIN)
        until = time.monotonic() + timeout
        # In slices: whoever is seen to do nothing for long stands still (see main_thread).
        while not self._poll_object.poll(1000 * min(_SLICE_SECONDS, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                break
        if alarm is not None:
            self._poll_object.unregister(alarm)
        now = time.time()
        new = {rank: code for rank in self.alive if (code := self._processes[rank].poll()) is not None}
        for local_rank, code in new.items():
            self._ended[local_rank] = Ended(code, now)
            self._forget(local_rank)
        return bool(new)

    def _forget(self, local_rank: int) -> None:
        descriptor = self._descriptors.pop(local_rank, None)
        if descriptor is not None:
            self._poll_object.unregister(descriptor)
            os.close(descriptor)

    def send(self, number: int, *, groups: bool) -> None:
        """Send a signal to all that live: to the ranks alone, or to their process groups as torchrun does."""
        for local_rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if groups else os.kill)(self._processes[local_rank].pid, number)

    def kill(self, mine: set[int]) -> set[int]:
        """End all workers and everything they started, now.

        Args:
            mine: other processes of this one that lead sessions; they are spared.

        Returns:
            Pids that are still there: a process in uninterruptible sleep can't be killed, and is left behind rather
            than waited for.
        """
        self.send(signal.SIGKILL, groups=False)  # their groups hold those that tidy up, too
        left = family.clear(set(self.pids().values()), mine, deadline=time.monotonic() + 1.0)
        deadline = time.monotonic() + _REAP_SECONDS
        while self.alive and time.monotonic() < deadline:
            self.look(deadline - time.monotonic())
        left |= family.clear(set(self.pids().values()), mine, deadline=time.monotonic() + 1.0)
        return left | {self._processes[local_rank].pid for local_rank in self.alive}

    def stop(self, number: int, *, groups: bool, grace: float) -> None:
        """Ask all workers to leave and give them time for it. The caller kills what is left."""
        self.send(number, groups=groups)
        deadline = time.monotonic() + grace
        while self.alive and time.monotonic() < deadline:
            self.look(deadline - time.monotonic())

    def failures(self) -> dict[int, ProcessFailure]:
        """What torch wants to know of each worker that failed. A broken error file is evidence, not an error."""
        return {rank: self._failure(rank, ended) for rank, ended in self.failed.items()}

    def _failure(self, local_rank: int, ended: Ended) -> ProcessFailure:
        pid = self._processes[local_rank].pid
        try:
            return ProcessFailure(local_rank, pid, ended.code, self.error_files[local_rank])
        except Exception:  # torch reads the file as JSON of one shape, and raises whatever comes of that
            return ProcessFailure(local_rank, pid, ended.code, "")

    def _poll(self) -> RunProcsResult | None:
        self.look(0)
        if self.alive and not self.failed:
            return None
        return RunProcsResult(return_values=dict.fromkeys(self.ended), failures=self.failures())

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.stop(death_sig, groups=True, grace=timeout)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Show what was written last and let go of all that is held. All workers have ended before."""
        if self.alive:
            self._close(death_sig or signal.SIGTERM, timeout)
        if not self._closed:
            self._closed = True
            for local_rank in list(self._descriptors):
                self._forget(local_rank)
            self._output.close()


def cold(command: Command) -> subprocess.Popen[bytes]:
    """Start a worker from nothing, as torch does: in a session of its own, with this process's standard input."""
    return subprocess.Popen(
        command.argv,
        env=command.env,
        stdout=command.stdout,
        stderr=command.stderr,
        cwd=command.cwd,
        start_new_session=True,
    )
