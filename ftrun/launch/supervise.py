"""Running the agent to its end, and what its end means: an outcome and an exit code."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from torch.distributed import DistError
from torch.distributed.elastic import events as torch_events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher

from ftrun.contract import ExitCode
from ftrun.errors import FtrunError, UsageError
from ftrun.health import as_events
from ftrun.launch import family, nodes_end, nodes_traits, rendezvous
from ftrun.launch.agent import UNLIMITED_RESTARTS, Agent
from ftrun.launch.director import Director
from ftrun.launch.logs import RunLogs
from ftrun.launch.nodes_choice import BACKEND
from ftrun.launch.nodes_group import Group
from ftrun.launch.nodes_others import Others
from ftrun.launch.nodes_still import OtherNodes
from ftrun.launch.remembering import open_memory
from ftrun.rendezvous.handler import Excluded, Handler
from ftrun.rendezvous.hosting import NotAdmitted

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from ftrun import events
    from ftrun.launch.console import Console
    from ftrun.launch.guard import Guard
    from ftrun.launch.main_thread import Watchdog
    from ftrun.launch.output.outlets import Outlets
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.standbys.standby import Standbys
    from ftrun.launch.torch_config import TorchSettings


@dataclass(frozen=True)
class Beside:
    """What a run has beside the agent and the workers.

    Attributes:
        guard: outlives the agent if it is killed.
        standbys: parked processes, some of which may be under way for the first attempt.
        outlets: the launcher's own streams.
        watchdog: watches the main thread.
    """

    guard: Guard
    standbys: Standbys
    outlets: Outlets
    watchdog: Watchdog


def supervise(
    plan: LaunchPlan, settings: TorchSettings, beside: Beside, log: events.EventLog, console: Console
) -> tuple[str, int]:
    """Run the agent until the run is over.

    Returns:
        The outcome, as :class:`ftrun.events.RunEnded` has it, and the exit code.
    """
    spec, group = _specify(plan, settings, console)
    others = None
    if group is not None:
        memory = open_memory(plan, console.warn, lambda host, entry: as_events.write(log, host, entry))
        others = Others(plan, group, memory, console)
        if reason := memory.may_join():
            memory.close()
            return _excluded(reason, console)
        group.remember(memory, plan.grace, shared=plan.shares_run_dir)
    director = Director(plan, log, console, others)
    agent = _build(plan, settings, director, beside, spec, group)
    _tell_watchdog(beside.watchdog, plan, group, agent)
    _keep_torch_quiet()
    family.adopt_orphans()
    agent.listen()
    gc.freeze()  # all that the imports have made: no later collection need go through it
    gc.enable()
    handler = getattr(settings.config, "event_log_handler", "null")
    leaving = False
    try:
        result = agent.run()
        torch_events.record(agent.get_event_succeeded(), handler)
        outcome, code = _after_end(result, plan, director, group, console)
    except SignalException as stopped:
        torch_events.record(agent.get_event_failed(), handler)
        leaving = True
        with group.absent() if group is not None else contextlib.nullcontext():  # a slow storage is no stuck launcher
            outcome, code = _after_signal(stopped, agent, director, console)
            director.close()  # what was saved last is committed before the others go on without this node
        if group is not None:
            with contextlib.suppress(SignalException):  # asked once more: the end of the process is word enough
                group.leave(signal.Signals(stopped.sigval).name)
    except Excluded as error:
        torch_events.record(agent.get_event_failed(), handler)
        outcome, code = _excluded(str(error), console)
        if group is not None:
            leaving = True
            with contextlib.suppress(SignalException):  # both as above: its part of the last snapshot is nowhere else
                with group.absent():
                    director.close()
                group.leave(str(error))
    except (RendezvousError, FtrunError, OSError, DistError) as error:
        torch_events.record(agent.get_event_failed(), handler)
        outcome, code = _after_error(error, plan, group, console)
        _leave_word(error, spec.rdzv_handler, director)
    except Exception as error:  # a mistake of ftrun's own: it is shown in full here, and the others are told which
        _leave_word(error, spec.rdzv_handler, director)
        raise
    finally:
        director.close()
        # As torch does: closing the rendezvous at a signal would keep other nodes from ever meeting there again.
        if not leaving:
            with contextlib.suppress(RendezvousError):
                spec.rdzv_handler.shutdown()
    if outcome == "finished":
        if not director.drained:  # the end of the training is in memory alone, where a reboot would take it
            return "left", ExitCode.TRY_AGAIN
        with contextlib.suppress(SignalException):  # whoever is in a hurry doesn't wait for a storage
            director.note_finished()
    return outcome, code


def _tell_watchdog(watchdog: Watchdog, plan: LaunchPlan, group: Group | None, agent: Agent) -> None:
    if group is not None:
        watchdog.limit, watchdog.company = group.stall_timeout, OtherNodes(group, agent.worker_pids, agent.idle_pids)
    elif plan.shared_by_nodes:
        watchdog.limit = 0.0  # torch's own rendezvous waits for minutes at a time


def _keep_torch_quiet() -> None:
    """Torch's own words on a failure name a rank by guess; ftrun says it with the cause. ``LOGLEVEL`` wants them."""
    if "LOGLEVEL" in os.environ:
        return
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _leave_word(error: Exception, handler: RendezvousHandler, director: Director) -> None:
    """What the others report, should this node's end be the end of the run; and the post-mortem."""
    if isinstance(handler, Handler):
        handler.last_words = nodes_end.in_short(error)
        if not isinstance(error, RendezvousError | NotAdmitted):  # otherwise the cause is elsewhere
            director.broke(handler.last_words)


def _after_error(
    error: RendezvousError | FtrunError | OSError | DistError,
    plan: LaunchPlan,
    group: Group | None,
    console: Console,
) -> tuple[str, int]:
    if isinstance(error, DistError):
        return nodes_end.unanswered(error, group, console)
    if group is not None and isinstance(error, RendezvousError):
        return nodes_end.after(error, group, console)
    if isinstance(error, RendezvousError):
        console.warn(f"the nodes did not meet: {error or type(error).__name__}. Check --rdzv-endpoint and --nnodes.")
        return "failed", ExitCode.FAILED
    code = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED
    if isinstance(error, FtrunError):
        for line in str(error).splitlines():
            console.say(f"[red]{escape(line)}[/]")
    else:
        console.say(f"[red]{escape(f'{error.filename or plan.run_dir.path}: {error.strerror or error}')}[/]")
        console.say("The launcher can't go on without it. Make room or mend it, and start again.")
    if group is not None and not isinstance(error, NotAdmitted):
        words = str(error) if isinstance(error, FtrunError) else nodes_end.in_short(error)
        group.close(words.partition("\n")[0], code)
    return "failed", code


def _excluded(reason: str, console: Console) -> tuple[str, int]:
    console.warn(f"this node leaves, and the others go on without it: {reason}")
    return "excluded", ExitCode.EXCLUDED


def _after_end(
    result: RunResult | None, plan: LaunchPlan, director: Director, group: Group | None, console: Console
) -> tuple[str, int]:
    if result is None and group is not None and group.not_needed:
        console.say("[green]✓[/] the run has finished; this node was a spare, and was not needed")
        return "finished", ExitCode.OK
    if result is not None and not result.is_failed():
        return director.outcome_of_success(), ExitCode.OK
    decision = director.decision
    if decision is None or result is None:
        return "failed", ExitCode.FAILED
    _pass_on_cause(result.failures, director)
    if plan.job.config.exit_codes == "torchrun" and result.failures and decision.outcome != "stopped":
        console.print(escape(str(ChildFailedError(plan.script, result.failures))))
    if group is not None:
        group.close(director.cause or decision.reason, decision.exit_code)
    if decision.restart:  # and none was left
        return "failed", ExitCode.FAILED
    return decision.outcome, decision.exit_code


def _pass_on_cause(failures: dict[int, ProcessFailure], director: Director) -> None:
    """Copy the root cause to the error file that whoever started ftrun asked for, as ``torchrun`` does."""
    cause = failures.get(director.rank_at_fault)
    if cause is None or not os.path.isfile(cause.error_file):
        return
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the worker's file can hold anything
            get_error_handler().dump_error_file(cause.error_file, cause.exitcode)


def _after_signal(stopped: SignalException, agent: Agent, director: Director, console: Console) -> tuple[str, int]:
    """With a commit to go on from, being stopped means "run me again"; without one it is the signal's own code."""
    name = signal.Signals(stopped.sigval).name
    codes = agent.exit_codes()
    done = bool(codes) and not any(codes) and None not in codes and not agent.meets
    if done and (director.sessions_lead() or not agent.interrupted):
        return director.outcome_of_success(), ExitCode.OK  # the signal came after the work was done
    step = director.commit_step()
    if step is None:
        before = ", before there was a checkpoint" if director.sessions_lead() else ""
        console.say(f"[yellow]■[/] stopped by {name}{before}")
        return "interrupted", 128 + int(stopped.sigval)
    saved = all(code == ExitCode.TRY_AGAIN for code in codes) and bool(codes)
    how = "saved and stopped" if saved else "stopped without a last save"
    console.say(f"[yellow]■[/] {how} on {name}; {director.how_to_continue} from step {step:,}")
    return "stopped", ExitCode.TRY_AGAIN


def _specify(plan: LaunchPlan, settings: TorchSettings, console: Console) -> tuple[WorkerSpec, Group | None]:
    """What torch's agent starts from; and the nodes of the run, where they meet through ftrun's own rendezvous."""
    config = settings.config
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = launcher._get_addr_and_port(parameters)
    # Fields that torch's configuration and worker specification share, in the versions that have them.
    shared = ("event_log_handler", "numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters")
    optional: dict[str, Any] = {
        name: getattr(config, name) for name in (*shared, "virtual_local_rank") if hasattr(config, name)
    }
    handler: RendezvousHandler
    if config.rdzv_backend == BACKEND:
        report = lambda text: console.say(f"[dim]{escape(text)}[/]")  # noqa: E731
        handler = nodes_traits.handler(parameters, plan, config.nproc_per_node, report)
    else:
        handler = (rendezvous.creator if settings.one_node else registry.get_rendezvous_handler)(parameters)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=settings.entrypoint,
        args=tuple(settings.arguments),
        rdzv_handler=handler,
        max_restarts=plan.limits.max_restarts or 0 if plan.limits.exactly else UNLIMITED_RESTARTS,
        monitor_interval=1e-6,  # torch sleeps that long; the agent waits for what happens instead
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        **optional,
    )
    return spec, Group(handler) if isinstance(handler, Handler) else None


def _build(
    plan: LaunchPlan,
    settings: TorchSettings,
    director: Director,
    beside: Beside,
    spec: WorkerSpec,
    group: Group | None,
) -> Agent:
    config = settings.config
    tee = plan.job.config.logs.tee
    shown = None if tee == "all" else set(tee)
    logs = RunLogs(plan.run_dir, settings.logs, shown, plan.job.config.env, beside.outlets)
    wanted = plan.job.config.standby
    standbys = beside.standbys
    standbys.configure(enabled=wanted.enabled and settings.parkable, exclude=wanted.exclude)
    interval = min(max(config.monitor_interval, 0.01), 1.0)
    options = settings.agent_options
    return Agent(spec, logs, director, beside.guard, standbys, group=group, interval=interval, **options)
