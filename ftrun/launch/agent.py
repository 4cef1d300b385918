"""The agent: torch's :class:`LocalElasticAgent` with its hands replaced. It acts; the :class:`Director` decides.

What differs from torch's:

- workers are :class:`~ftrun.launch.processes.Workers`: the end of one is noticed at once, and evidence is taken before
  anybody is signalled;
- every round of rendezvous gets a fresh store, so that a restart never meets the keys of the last attempt;
- the round begins with one answer for all ranks: which epoch, which attempt, which commit to resume from;
- when a rank has died, its peers are killed at once, with everything they started: a rank that waits in a collective
  has nothing left to do in order;
- a group that makes no progress is brought down and restarted, too;
- of several nodes one decides for all (:mod:`~ftrun.launch.nodes_group`), and a lost node is not blamed on a rank;
- whether to restart is decided by policy and not by a counter alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from ftrun.contract import ExitCode
from ftrun.errors import UsageError
from ftrun.launch import family, gpu_memory, nodes_address, torch_seams
from ftrun.launch.evidence.collect import LiveRank
from ftrun.launch.nodes_giving_way import GivingWay
from ftrun.launch.output.routes import Tee
from ftrun.launch.processes import Workers
from ftrun.rendezvous.handler import Excluded
from ftrun.rendezvous.round_store import RoundBroken

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from ftrun.launch.director import Director
    from ftrun.launch.evidence.model import Evidence
    from ftrun.launch.guard import Guard
    from ftrun.launch.logs import RunLogs
    from ftrun.launch.nodes_group import Group
    from ftrun.launch.standbys.standby import Standbys
    from ftrun.launch.watching.watch import Verdict

UNLIMITED_RESTARTS = 1_000_000
"""What torch is told as its own limit when the policy decides: high enough never to be reached."""

_CAUSE_SECONDS = 0.5
"""How long to wait for a rank that is at fault to end, when all that has ended fell with it."""

_STEADY_SECONDS = 0.4
"""Between two looks at the pulses of a group that has made its first steps; the end of a process is seen at once."""

_SLEEP_SECONDS = 10.0
"""A longer sleep might be taken for a launcher that stands still."""

_SETTLING_SECONDS = 30.0
"""For how long nodes that join wait for the first step of a Session, before which it can't save and leave in order."""

_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_TORCHS_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""What torch hears where the environment says nothing; before 2.10 nothing puts it there."""


class Agent(LocalElasticAgent):
    """Supervises the workers of this node.

    Args:
        spec: torch's specification; its ``monitor_interval`` is next to nothing, because waiting is done here.
        logs: where output goes.
        director: decides.
        guard: outlives this process if it is killed.
        standbys: parked processes.
        group: the nodes of the run; None where this one is alone, or they meet through one of torch's backends.
        interval: seconds between two looks at the pulses.
        options: of torch's agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RunLogs,
        director: Director,
        guard: Guard,
        standbys: Standbys,
        *,
        group: Group | None,
        interval: float,
        **options: Any,
    ) -> None:
        super().__init__(spec, logs, **options)
        self._group = group
        self._others = GivingWay(group, director, self._own_leaders) if group is not None else None
        self._guard = guard
        self._run_logs = logs
        self._director = director
        self._standbys = standbys
        self._interval = interval
        self._leave_seconds = float(options.get("shutdown_timeout", 30))
        self._stopping_since: float | None = None
        self._asked_to_leave = False
        self._heard: list[signal.Signals] = []
        self._parked = False
        self._busy = True
        self._done = False
        self._meets = False
        self._started_at = 0.0

    @property
    def meets(self) -> bool:
        """Whether the nodes meet: workers that have ended, well or not, have to be started once more."""
        return self._meets

    @property
    def interrupted(self) -> bool:
        """Whether workers were asked to leave while they ran."""
        return self._asked_to_leave

    @property
    def _workers(self) -> Workers | None:
        return self._pcontext if isinstance(self._pcontext, Workers) else None

    def worker_pids(self) -> list[int]:
        """Processes of the last attempt's workers that haven't been seen to end. Any thread."""
        workers = self._workers
        if workers is None:
            return []
        return [pid for rank, pid in list(workers.pids().items()) if rank not in workers.ended]

    def idle_pids(self) -> list[int]:
        """Processes that were started for later, and for the data cache. Any thread."""
        return [*self._standbys.pids(), *self._director.filler_pids()]

    def exit_codes(self) -> list[int | None]:
        """Exit codes of the last attempt's workers as far as they have ended."""
        workers = self._workers
        if workers is None:
            return []
        return [workers.ended[rank].code if rank in workers.ended else None for rank in workers.pids()]

    # Starting

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meets = True
        if self._group is None:
            fresh_store(worker_group.spec.rdzv_handler)
            self._meet(worker_group)
            return
        while True:
            try:
                self._meet(worker_group)
            except RoundBroken as broken:
                self._director.broken(str(broken))
            else:
                return

    def _meet(self, worker_group: WorkerGroup) -> None:
        # Nothing may hold the old store, or torch finds its server alive and shares it again.
        worker_group.store = None
        self._store = None
        with self._director.waiting():
            super()._rendezvous(worker_group)
        self._director.clock.mark("rendezvous")
        store: Any = worker_group.store
        node: Any = worker_group.group_rank
        nodes: Any = worker_group.group_world_size
        variables = {}
        if self._group is not None:
            self._group.entered(store, node)
            variables = nodes_address.for_workers(os.environ, worker_group.spec.local_addr, self._group.others)
        self._run_logs.begin(*self._director.begin_round(store, node, nodes), variables)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stopping_since = None
        self._asked_to_leave = False
        self._parked = False
        self._busy = True
        self._done = False
        self._started_at = time.monotonic()
        with torch_seams.processes_made_by(self._make_workers):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        self._guard.watch(pids.values())
        ranks = {worker_group.workers[local_rank].global_rank: pid for local_rank, pid in pids.items()}
        self._director.workers_started(ranks, worker_group.workers[0].world_size)
        return pids

    def _make_workers(self, **asked: Any) -> Workers:
        """Stand in for torch's ``start_processes``."""
        tee = Tee(
            asked["name"],
            asked["log_line_prefixes"],
            tuple(asked.get("duplicate_stdout_filters") or ()),
            tuple(asked.get("duplicate_stderr_filters") or ()),
        )
        workers = Workers(
            asked["entrypoint"],
            asked["args"],
            asked["envs"],
            asked["logs_specs"],
            self._standbys,
            lambda destination: self._run_logs.output(destination, tee),
            lambda argv, local_rank: torch_seams.bound(argv, local_rank, asked.get("numa_options")),
        )
        # Known before they are started: a signal may come in the middle of that.
        self._pcontext = workers
        self._meets = False
        try:
            workers.start()
        except OSError as error:
            workers.kill(self._own_leaders())
            workers.close()
            raise UsageError(torch_seams.cannot_start(asked["entrypoint"], error)) from error
        self._director.clock.mark("start")
        return workers

    # Watching

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        workers = self._workers
        if workers is None:
            raise AssertionError("workers are started before they are watched")
        pause = self._interval if self._busy else max(self._interval, _STEADY_SECONDS)
        workers.look(pause, self._group.alarm if self._group is not None else None)
        if self._group is not None and self._others is not None and (word := self._group.disturbance()):
            return self._give_way(worker_group, self._others, workers, word)
        self._forward()
        self._director.keep()
        if self._group is not None and workers.alive and not workers.failed and (why := self._group.left_out):
            self._leave_excluded(self._group, workers, why)
        if workers.failed:
            if self._leaving_in_order(workers):
                return RunResult(state=WorkerState.HEALTHY)
            return self._fall(worker_group, workers)
        if not workers.alive:
            return self._success(worker_group, workers)
        evidence = self._hang(worker_group, workers)
        if evidence is not None:
            return self._fall(worker_group, workers, evidence)
        self._keep_standbys(worker_group, workers)
        if self._group is not None:
            new = time.monotonic() - self._started_at < _SETTLING_SECONDS
            self._group.hold_growth(hold=new and not self._parked and self._director.sessions_lead())
        self._busy = not self._parked or self._director.clock.running or self._standbys.warming
        return RunResult(state=WorkerState.HEALTHY)

    def _hang(self, worker_group: WorkerGroup, workers: Workers) -> Evidence | None:
        """Evidence of a group that makes no progress, None while it does or may."""
        ended = {worker_group.workers[rank].global_rank: each.at for rank, each in workers.ended.items()}
        verdict = self._director.watch(ended) or self._uninterruptible(worker_group)
        if verdict is None:
            return None
        noticed = time.time()
        evidence = self._director.confirm(verdict, self._ranks(worker_group, workers))
        if evidence is not None:
            self._director.fell(noticed - verdict.waited)
        return evidence

    def _leaving_in_order(self, workers: Workers) -> bool:
        """Ranks that stop on request leave one after the other: the last ones get their grace period."""
        if any(each.code != ExitCode.TRY_AGAIN for each in workers.failed.values()) or not workers.alive:
            return False
        now = time.monotonic()
        self._stopping_since = self._stopping_since or now
        return now - self._stopping_since < self._director.grace

    def _uninterruptible(self, worker_group: WorkerGroup) -> Verdict | None:
        """Torch's own check for workers that can't even be killed, where it is switched on in the environment."""
        seconds = getattr(self, "_uninterruptible_state_timeout", 0.0)
        if seconds <= 0:
            return None
        remaining = self._remaining_restarts
        found = self._check_uninterruptible_state_timeout(worker_group, seconds)
        self._remaining_restarts = remaining  # torch has allowed none; the policy decides that
        if found is None:
            return None
        return self._director.uninterruptible(seconds)

    def _keep_standbys(self, worker_group: WorkerGroup, workers: Workers) -> None:
        """Once all ranks have made a step, park processes for the next attempt."""
        if self._remaining_restarts <= 0 and self._group is None:
            self._parked = True  # with --max-restarts used up nobody will need them
        if not self._parked and self._director.all_stepped():
            self._parked = True
            self._standbys.learn(self._run_logs.worker_dir(worker_group.workers[0].global_rank) / "imports.json")
            for local_rank, command in workers.commands.items():
                self._standbys.prepare(local_rank, command)
        self._standbys.tick()

    # The end of an attempt

    def _success(self, worker_group: WorkerGroup, workers: Workers) -> RunResult:
        if not self._done:
            self._done, self._busy = True, False
            workers.close()
            self._clear(workers)
        if self._group is not None and not self._group.finished():
            return RunResult(state=WorkerState.HEALTHY)  # should a node be lost now, these workers are needed again
        ranks = {worker_group.workers[local_rank].global_rank: None for local_rank in workers.ended}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=ranks)

    def _clear(self, workers: Workers) -> None:
        """After a good end: what shares a session with a worker is killed, daemons go on and are named."""
        processes = family.table()
        leaders = set(workers.pids().values())
        theirs = {pid for pid, each in processes.items() if each.session in leaders} - leaders
        family.kill(pid for pid in theirs if not family.tidies_up(pid))
        daemons = family.orphans(processes, {*leaders, *self._own_leaders()})
        family.reap(daemons)
        for pid in sorted(daemons):
            if processes[pid].lives and processes[pid].session not in leaders:
                self._director.daemon(pid, family.command_line(pid))

    def _exit_barrier(self) -> None:
        """Not where nodes finish together (:meth:`_success`): torch's waits five minutes for a node that is lost."""
        if self._group is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _fall(self, worker_group: WorkerGroup, workers: Workers, evidence: Evidence | None = None) -> RunResult:
        """What follows from the fall of this node's workers, or of all nodes'.

        Args:
            worker_group: torch's name for them.
            workers: the processes.
            evidence: of a hang; of ranks that fell it is taken here.
        """
        with self._group.absent() if self._group is not None else contextlib.nullcontext():
            if evidence is None:
                self._director.fell(min(each.at for each in workers.failed.values()))
                self._await_cause(worker_group, workers)
            if self._others is not None and (word := self._others.word(self._ranks(worker_group, workers), evidence)):
                return self._give_way(worker_group, self._others, workers, word)
            return self._decide(worker_group, workers, evidence)

    def _give_way(self, worker_group: WorkerGroup, others: GivingWay, workers: Workers, word: str) -> RunResult:
        """End the workers for what happened elsewhere, and meet again; that costs no restart."""
        self._meets = True
        self._end_for_others(worker_group, others, workers, word)
        self._remaining_restarts += 1  # torch is about to take one away
        return RunResult(state=WorkerState.FAILED)

    def _end_for_others(self, worker_group: WorkerGroup, others: GivingWay, workers: Workers, word: str) -> None:
        if self._group is not None and not self._group.grows:
            self._director.about_to_end(self._ranks(worker_group, workers), word)
        others.end(workers, word)

    def _decide(self, worker_group: WorkerGroup, workers: Workers, evidence: Evidence | None) -> RunResult:
        """Evidence, then the kill, then the decision."""
        clock = self._director.clock
        if evidence is None:
            workers.settle_output()
            evidence = self._director.collect(self._ranks(worker_group, workers))
        clock.mark("evidence")
        stuck = workers.kill(self._own_leaders())
        workers.close()  # its last lines come before what is said about them
        clock.mark("stop")
        decision = self._director.decide(evidence, stuck)
        if decision.left_out:
            raise Excluded(decision.left_out)
        if not decision.restart:
            self._remaining_restarts = 0
        else:
            self._before_restart(decision.delay, set(workers.pids().values()))
        failures = {worker_group.workers[rank].global_rank: each for rank, each in workers.failures().items()}
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _await_cause(self, worker_group: WorkerGroup, workers: Workers) -> None:
        """Ranks that only lost a peer can be noticed before that peer has quite ended: wait for it a little."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while workers.alive and time.monotonic() < deadline:
            if not self._director.only_victims(self._ranks(worker_group, workers)):
                return
            workers.look(deadline - time.monotonic())

    def _before_restart(self, delay: float, pids: set[int]) -> None:
        if self._group is not None:
            self._group.await_word(delay)  # where the nodes meet anyway, they wait for this one
        else:
            until = time.monotonic() + delay
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, _SLEEP_SECONDS))
        self._director.clock.mark("back-off")
        self._director.gpu_memory(gpu_memory.wait_until_free(pids))
        self._director.clock.mark("GPU memory")

    def _ranks(self, worker_group: WorkerGroup, workers: Workers) -> list[LiveRank]:
        ranks = []
        for local_rank, pid in workers.pids().items():
            rank = worker_group.workers[local_rank].global_rank
            ended = workers.ended.get(local_rank)
            code, at = (ended.code, ended.at) if ended is not None else (None, 0.0)
            ranks.append(LiveRank(rank, local_rank, pid, code, at, self._run_logs.worker_dir(rank)))
        return ranks

    def _own_leaders(self) -> set[int]:
        return {*self._standbys.pids(), *self._guard.pids(), *self._director.keeper_pids()}

    # Signals

    def listen(self) -> None:
        """Have SIGUSR1 and SIGUSR2 heard, unless torchrun's options give them to torch. Main thread."""
        asked = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _TORCHS_SIGNALS)
        to_torch = [name.strip() for name in asked.split(",")]
        for number in _FORWARDED:
            if number.name not in to_torch and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda heard, _frame: self._heard.append(signal.Signals(heard)))

        if self._group is not None:
            # Torch hears the others once it has workers, and nodes may have to wait for long before that.
            for number in signal.Signals:
                ignored = number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN  # as `nohup` asks
                if number.name in to_torch and not ignored:
                    with contextlib.suppress(OSError):  # SIGKILL; torch has its own words for what isn't a signal
                        signal.signal(number, torch_seams.end)

    def _forward(self) -> None:
        """Pass SIGUSR1 and SIGUSR2 on to the ranks that have a use for them: the others would die of it."""
        while self._heard:
            number = self._heard.pop(0)
            workers = self._workers
            pids = [workers.pids()[rank] for rank in workers.alive] if workers is not None else []
            willing = [pid for pid in pids if family.catches(pid, number)]
            for pid in willing:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._director.heard(number, len(willing))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Torch is about to start the group again, or to give it up: in a run of many nodes nobody is left by then."""
        workers = self._workers
        if self._group is not None and self._others is not None and workers is not None and workers.alive:
            self._end_for_others(worker_group, self._others, workers, self._group.disturbance())
        super()._stop_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        workers = self._workers
        if workers is not None and workers.alive:
            with self._group.absent() if self._group is not None else contextlib.nullcontext():
                self._leave(workers, death_sig)
        super()._shutdown(death_sig, *arguments, **options)

    def _leave_excluded(self, group: Group, workers: Workers, why: str) -> NoReturn:
        """Somebody has excluded this node, which is well: all ranks save before it leaves.

        Raises:
            Excluded: it leaves.
        """
        with group.absent():
            self._leave(workers, signal.SIGTERM, why)
            workers.close()
        raise Excluded(why)

    def _leave(self, workers: Workers, number: signal.Signals, why: str = "") -> None:
        """Have the workers leave in order, and kill what is left then; asked a second time, kill at once."""
        if not self._asked_to_leave:
            self._asked_to_leave = True
            if self._group is not None:
                self._group.announce_leaving(why or number.name)
            if self._director.sessions_lead():
                # The ranks alone, not their children: one that loses its loader's workers can't finish its step.
                self._director.leaving(why or number.name, asked=not why)
                workers.stop(number, groups=False, grace=self._director.grace)
            else:
                workers.stop(number, groups=True, grace=self._leave_seconds)
        stuck = workers.kill(self._own_leaders())
        if stuck:
            self._director.cannot_be_killed(stuck)


def fresh_store(handler: RendezvousHandler) -> None:
    """Make torch's handlers build a new store for the next round.

    They keep the first one, and workers of the next attempt then read the addresses that the dead ones left
    there. There is no public switch that keeps the store shared; these are the fields that hold it.
    """
    held = ("_store",) if handler.get_backend() == "static" else ("_bootstrap_store_info", "_shared_tcp_store_server")
    for name in held:
        if hasattr(handler, name):
            setattr(handler, name, None)
