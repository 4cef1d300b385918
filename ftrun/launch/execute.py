"""Carrying a plan out: take the run directory, start the agent, and leave with the right code."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ftrun import durable, events, rundir
from ftrun.contract import ExitCode
from ftrun.errors import FtrunError, UsageError
from ftrun.goodput import history, screen
from ftrun.launch import family, torch_config
from ftrun.launch.console import Console
from ftrun.launch.guard import Guard
from ftrun.launch.output.outlets import Outlets

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from ftrun.launch.agent import Agent
    from ftrun.launch.director import Director
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.standbys.standby import Standbys
    from ftrun.launch.torch_config import TorchSettings


def execute(plan: LaunchPlan, command: list[str], standbys: Standbys) -> int:
    """Run a plan to its end.

    Args:
        plan: what to do.
        command: the command line, for the record.
        standbys: parked processes, some of which may be under way for the first attempt. The caller closes them.

    Returns:
        The exit code of ``ftrun``.

    Raises:
        UsageError: it can't be started; nothing has been lost.
    """
    settings = torch_config.settle(plan)
    outlets = Outlets.of_this_process(plan.run_dir.attempts)
    try:
        return _reported(plan, _execute(plan, settings, command, _Beside(standbys, outlets)))
    finally:
        outlets.close()


@dataclass(frozen=True)
class _Beside:
    """What a run has beside the agent and the workers."""

    standbys: Standbys
    outlets: Outlets


def _execute(plan: LaunchPlan, settings: TorchSettings, command: list[str], beside: _Beside) -> int:
    console = Console(Path.cwd(), beside.outlets)
    with rundir.locked(plan.run_dir.path, shared_by_nodes=plan.shared_by_nodes):
        if plan.finished and not plan.contract.allow_new_total:
            console.say(
                f"[green]✓[/] {plan.run_id} is finished; its run is in {console.short(plan.run_dir.path)}. "
                "Start over with --fresh."
            )
            return ExitCode.OK
        _prepare(plan, console)
        for note in settings.notes:
            console.warn(note)
        events.mend(plan.run_dir.events())
        log = events.EventLog(plan.run_dir.events())
        log.write(_run_started(plan, command, settings.config.nproc_per_node))
        with Guard(plan.contract.marks) as guard:
            outcome, code = _supervise(plan, settings, _Help(guard, beside), log, console)
        log.write(events.RunEnded(outcome=outcome, exit_code=code))
        console.print(screen.render(history.load(plan.run_dir), console.short(plan.run_dir.path)))
    return code


def _reported(plan: LaunchPlan, code: int) -> int:
    """The exit code as the job wants it: with ``exit_codes: torchrun`` there is 0 and there is 1."""
    return code if plan.job.config.exit_codes == "ftrun" else int(bool(code))


def _prepare(plan: LaunchPlan, console: Console) -> None:
    _check_root(plan)
    if plan.fresh:
        aside = plan.run_dir.set_aside()
        if aside is not None:
            console.say(f"the earlier run is kept in {console.short(aside)}")
    identity = {**plan.to_json(), "run_id": plan.run_id, "ftrun": metadata.version("ftrun")}
    plan.run_dir.create(identity)
    if plan.job.path is not None:
        durable.write(plan.run_dir.job_yaml, plan.job.text.encode())
    console.say(f"run {plan.run_id} in {console.short(plan.run_dir.path)}")


def _check_root(plan: LaunchPlan) -> None:
    """See that a checkpoint root outside the run directory can be written, before anything else is."""
    root = Path(plan.root)
    if root.is_relative_to(plan.run_dir.path):
        return
    probe = root / f".probe.{uuid.uuid4().hex[:8]}"
    try:
        durable.make_dirs(root)
        probe.write_bytes(b"ftrun")
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"the checkpoint root {root} can't be written: {error.strerror}. Make it writable, or choose another "
            "with checkpoint.root."
        ) from error


def _run_started(plan: LaunchPlan, command: list[str], workers: int) -> events.RunStarted:
    return events.RunStarted(
        run_id=plan.run_id,
        command=command,
        pid=os.getpid(),
        host=socket.gethostname(),
        nproc=workers,
        continued=plan.continues,
        versions={name: metadata.version(name) for name in ("ftrun", "torch")} | {"python": platform.python_version()},
    )


@dataclass(frozen=True)
class _Help:
    """What the agent is given."""

    guard: Guard
    beside: _Beside


def _supervise(
    plan: LaunchPlan, settings: TorchSettings, help_: _Help, log: events.EventLog, console: Console
) -> tuple[str, int]:
    from torch.distributed.elastic import events as torch_events
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from ftrun.launch.director import Director

    director = Director(plan, log, console)
    agent, spec = _build(plan, settings, director, help_)
    if "LOGLEVEL" not in os.environ:
        # Torch's own words on a failure name a rank by guess; ftrun says it with the cause.
        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    family.adopt_orphans()
    agent.listen()
    close = True
    handler = settings.config.event_log_handler if hasattr(settings.config, "event_log_handler") else "null"
    try:
        result = agent.run()
        torch_events.record(agent.get_event_succeeded(), handler)
    except SignalException as stopped:
        torch_events.record(agent.get_event_failed(), handler)
        # As torch does: closing the rendezvous would keep other nodes from ever meeting there again.
        close = False
        return _after_signal(stopped, agent, director, console)
    except RendezvousError as error:
        console.warn(f"the nodes did not meet: {error or type(error).__name__}. Check --rdzv-endpoint and --nnodes.")
        return "failed", ExitCode.FAILED
    except FtrunError as error:
        for line in str(error).splitlines():
            console.say(f"[red]{escape(line)}[/]")
        return "failed", ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED
    except OSError as error:
        console.say(f"[red]{escape(f'{error.filename or plan.run_dir.path}: {error.strerror or error}')}[/]")
        console.say("The launcher can't go on without it. Make room or mend it, and start again.")
        return "failed", ExitCode.FAILED
    finally:
        director.close()
        if close:
            with contextlib.suppress(RendezvousError):
                spec.rdzv_handler.shutdown()
    if result is not None and not result.is_failed():
        return director.outcome_of_success(), ExitCode.OK
    decision = director.decision
    if decision is None or result is None:
        return "failed", ExitCode.FAILED
    _pass_on_cause(result.failures, director)
    if plan.job.config.exit_codes == "torchrun" and result.failures and decision.outcome != "stopped":
        console.print(escape(str(ChildFailedError(plan.script, result.failures))))
    return decision.outcome, decision.exit_code


def _pass_on_cause(failures: dict[int, ProcessFailure], director: Director) -> None:
    """Copy the root cause to the error file that whoever started ftrun asked for, as ``torchrun`` does."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

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
    if codes and not any(codes) and None not in codes and (director.sessions_lead() or not agent.interrupted):
        return director.outcome_of_success(), ExitCode.OK  # the signal came after the work was done
    step = director.commit_step()
    if step is None:
        console.say(f"[yellow]■[/] stopped by {name}, before there was a checkpoint")
        return "interrupted", 128 + int(stopped.sigval)
    saved = all(code == ExitCode.TRY_AGAIN for code in codes) and bool(codes)
    how = "saved and stopped" if saved else "stopped without a last save"
    console.say(f"[yellow]■[/] {how} on {name}; {director.how_to_continue} from step {step:,}")
    return "stopped", ExitCode.TRY_AGAIN


def _build(plan: LaunchPlan, settings: TorchSettings, director: Director, help_: _Help) -> tuple[Agent, WorkerSpec]:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    from torch.distributed.launcher import api as launcher

    from ftrun.launch import rendezvous
    from ftrun.launch.agent import UNLIMITED_RESTARTS, Agent
    from ftrun.launch.logs import RunLogs

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
    make_handler = rendezvous.creator if settings.one_node else registry.get_rendezvous_handler
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=settings.entrypoint,
        args=tuple(settings.arguments),
        rdzv_handler=make_handler(parameters),
        max_restarts=plan.limits.max_restarts or 0 if plan.limits.exactly else UNLIMITED_RESTARTS,
        monitor_interval=1e-6,  # torch sleeps that long; the agent waits for what happens instead
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        **optional,
    )
    tee = plan.job.config.logs.tee
    shown = None if tee == "all" else set(tee)
    logs = RunLogs(plan.run_dir, settings.logs, shown, plan.job.config.env, help_.beside.outlets)
    wanted = plan.job.config.standby
    standbys = help_.beside.standbys
    standbys.configure(enabled=wanted.enabled and settings.parkable, exclude=wanted.exclude)
    interval = min(max(config.monitor_interval, 0.01), 1.0)
    agent = Agent(spec, logs, director, help_.guard, standbys, interval=interval, **settings.agent_options)
    return agent, spec
