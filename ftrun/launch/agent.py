"""The agent: torch's :class:`LocalElasticAgent` with a few hooks. It acts; the :class:`Director` decides.

What differs from torch's:

- every round of rendezvous gets a fresh store, so that a restart never meets the keys of the last attempt;
- the round begins with one answer for all ranks: which epoch, which attempt, which commit to resume from;
- when a rank has died, its peers are killed at once, with everything they started, and nobody waits for them to
  notice;
- whether to restart is decided by policy and not by a counter alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from ftrun import error_file
from ftrun.contract import ExitCode
from ftrun.launch.failure import RankExit

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from ftrun.launch.director import Director
    from ftrun.launch.guard import Guard
    from ftrun.launch.logs import RunLogs

_REAP_SECONDS = 10.0

UNLIMITED_RESTARTS = 1_000_000
"""What torch is told as its own limit when the policy decides: high enough never to be reached."""


class Agent(LocalElasticAgent):
    """Supervises the workers of this node."""

    def __init__(self, spec: WorkerSpec, logs: RunLogs, director: Director, guard: Guard, **options: Any) -> None:
        super().__init__(spec, logs, **options)
        self._guard = guard
        self._run_logs = logs
        self._director = director
        self._stopping_since: float | None = None
        self._asked_to_leave = False

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        fresh_store(worker_group.spec.rdzv_handler)
        # Nothing may hold the old store, or torch finds its server alive and shares it again.
        worker_group.store = None
        self._store = None
        super()._rendezvous(worker_group)
        store: Any = worker_group.store
        node: Any = worker_group.group_rank
        self._run_logs.begin(self._director.begin_round(store, node))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stopping_since = None
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._guard.watch(pids.values())
        ranks = {worker_group.workers[local_rank].global_rank: pid for local_rank, pid in pids.items()}
        world_size = worker_group.workers[0].world_size
        self._director.workers_started(ranks, world_size)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        failed = self._failed_exits(worker_group)
        if not failed:
            self._director.watch()
            return self._look(worker_group)
        if self._leaving_in_order(failed):
            return RunResult(state=WorkerState.HEALTHY)
        self._kill_all(signal.SIGKILL)
        decision = self._director.decide(failed)
        result = self._look(worker_group)
        if not decision.restart:
            self._remaining_restarts = 0
        else:
            time.sleep(decision.delay)
        return result

    def _look(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _leaving_in_order(self, failed: list[RankExit]) -> bool:
        """Ranks that stop on request leave one after the other: the last ones get their grace period."""
        if any(each.exit_code != ExitCode.TRY_AGAIN for each in failed) or not self._alive():
            return False
        now = time.monotonic()
        self._stopping_since = self._stopping_since or now
        return now - self._stopping_since < self._director.grace

    def exit_codes(self) -> list[int | None]:
        """Exit codes of the last attempt's workers as far as they have ended."""
        return [process.poll() for process in self._processes().values()]

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _alive(self) -> bool:
        return any(process.poll() is None for process in self._processes().values())

    def _failed_exits(self, worker_group: WorkerGroup) -> list[RankExit]:
        failed = []
        for local_rank, process in self._processes().items():
            code = process.poll()
            if code:
                rank = worker_group.workers[local_rank].global_rank
                error = error_file.read(self._run_logs.worker_dir(rank) / "error.json")
                failed.append(RankExit(rank, process.pid, code, error))
        return failed

    def _kill_all(self, number: signal.Signals) -> None:
        """End every worker and everything in its session, and reap the workers."""
        processes = self._processes().values()
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + _REAP_SECONDS
        for process in processes:
            # A worker in uninterruptible sleep can't be reaped: go on without it rather than wait for ever.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        kill_sessions({process.pid for process in processes if process.returncode is not None})

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        if self._director.sessions_lead():
            self._ask_to_leave(death_sig)
        super()._shutdown(death_sig, *arguments, **options)
        processes = self._processes().values()
        kill_sessions({process.pid for process in processes if process.poll() is not None})

    def _ask_to_leave(self, number: signal.Signals) -> None:
        """Signal the ranks alone, not their children: a rank that loses its loader's workers can't finish its step."""
        if not self._alive():
            return
        if self._asked_to_leave:
            self._kill_all(signal.SIGKILL)  # asked a second time: now
            return
        self._asked_to_leave = True
        self._director.leaving(signal.Signals(number).name)
        for process in self._processes().values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        deadline = time.monotonic() + self._director.grace
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._alive():
            self._kill_all(signal.SIGKILL)


def fresh_store(handler: RendezvousHandler) -> None:
    """Make torch's handlers build a new store for the next round.

    They keep the first one, and workers of the next attempt then read the addresses that the dead ones left
    there. There is no public switch that keeps the store shared; these are the fields that hold it.
    """
    held = ("_store",) if handler.get_backend() == "static" else ("_bootstrap_store_info", "_shared_tcp_store_server")
    for name in held:
        if hasattr(handler, name):
            setattr(handler, name, None)


def kill_sessions(leaders: set[int]) -> None:
    """Kill what dead workers left behind: each worker leads a session of its own, and its children are in it.

    The kernel doesn't give a leader's number away while anything of its session lives.
    """
    if not leaders:
        return
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid not in leaders and os.getsid(pid) in leaders:
                os.kill(pid, signal.SIGKILL)
