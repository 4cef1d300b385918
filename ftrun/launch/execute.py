"""Carrying a plan out: take the run directory, start the agent, and leave with the right code."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import uuid
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import durable, events, rundir
from ftrun.contract import ExitCode
from ftrun.errors import FtrunError, UsageError
from ftrun.goodput import history, screen
from ftrun.launch.console import Console

if TYPE_CHECKING:
    import argparse

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
    from torch.distributed.launcher.api import LaunchConfig

    from ftrun.launch.agent import Agent
    from ftrun.launch.director import Director
    from ftrun.launch.plan import LaunchPlan

_BOOTSTRAP = "ftrun.session.bootstrap"


def execute(plan: LaunchPlan, command: list[str]) -> int:
    """Run a plan to its end.

    Args:
        plan: what to do.
        command: the command line, for the record.

    Returns:
        The exit code of ``ftrun``.

    Raises:
        UsageError: it can't be started; nothing has been lost.
    """
    console = Console(Path.cwd())
    with rundir.locked(plan.run_dir.path, shared_by_nodes=plan.shared_by_nodes):
        if plan.finished and not plan.contract.allow_new_total:
            console.say(
                f"[green]✓[/] {plan.run_id} is finished; its run is in {console.short(plan.run_dir.path)}. "
                "Start over with --fresh."
            )
            return ExitCode.OK
        _prepare(plan, console)
        log = events.EventLog(plan.run_dir.events())
        log.write(_run_started(plan, command))
        outcome, code = _supervise(plan, log, console)
        log.write(events.RunEnded(outcome=outcome, exit_code=code))
        console.print(screen.render(history.load(plan.run_dir), console.short(plan.run_dir.path)))
    return code


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


def _run_started(plan: LaunchPlan, command: list[str]) -> events.RunStarted:
    return events.RunStarted(
        run_id=plan.run_id,
        command=command,
        pid=os.getpid(),
        host=socket.gethostname(),
        nproc=int(_local_world_size(plan.namespace)),
        continued=plan.continues,
        versions={name: metadata.version(name) for name in ("ftrun", "torch")} | {"python": platform.python_version()},
    )


def _local_world_size(namespace: argparse.Namespace) -> int:
    from torch.distributed.run import determine_local_world_size

    try:
        size = int(determine_local_world_size(namespace.nproc_per_node))
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {namespace.nproc_per_node}: {error}") from error
    if size < 1:
        raise UsageError(f"--nproc-per-node {size}: at least one worker is needed.")
    return size


def _supervise(plan: LaunchPlan, log: events.EventLog, console: Console) -> tuple[str, int]:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from ftrun.launch.director import Director

    if "LOGLEVEL" not in os.environ:
        # Torch's own words on a failure name a rank by guess; ftrun says it with the cause.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    director = Director(plan, log, console)
    agent, spec = _build(plan, director)
    close = True
    try:
        result = agent.run()
    except SignalException as stopped:
        # As torch does: closing the rendezvous would keep other nodes from ever meeting there again.
        close = False
        return _after_signal(stopped, agent, console)
    except RendezvousError as error:
        console.warn(f"the nodes did not meet: {error or type(error).__name__}. Check --rdzv-endpoint and --nnodes.")
        return "failed", ExitCode.FAILED
    except FtrunError as error:
        for line in str(error).splitlines():
            console.say(f"[red]{line}[/]")
        return "failed", ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED
    finally:
        if close:
            with contextlib.suppress(RendezvousError):
                spec.rdzv_handler.shutdown()
    if result is not None and not result.is_failed():
        return "finished", ExitCode.OK
    decision = director.decision
    if decision is None:
        return "failed", ExitCode.FAILED
    return decision.outcome, decision.exit_code


def _after_signal(stopped: SignalException, agent: Agent, console: Console) -> tuple[str, int]:
    """Workers that saved and left make it an orderly stop; otherwise it is the signal's own code."""
    name = signal.Signals(stopped.sigval).name
    codes = agent.exit_codes()
    if codes and all(code == ExitCode.TRY_AGAIN for code in codes):
        console.say(f"[yellow]■[/] stopped by {name} with a commit; the same command continues")
        return "stopped", ExitCode.TRY_AGAIN
    console.say(f"[yellow]■[/] stopped by {name}")
    return "interrupted", 128 + int(stopped.sigval)


def _build(plan: LaunchPlan, director: Director) -> tuple[Agent, WorkerSpec]:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    from torch.distributed.launcher import api as launcher

    from ftrun.launch.agent import UNLIMITED_RESTARTS, Agent
    from ftrun.launch.logs import RunLogs

    config, entrypoint, arguments = _torch_config(plan)
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
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(arguments),
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        max_restarts=plan.limits.max_restarts or 0 if plan.limits.exactly else UNLIMITED_RESTARTS,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        **optional,
    )
    tee = plan.job.config.logs.tee
    logs = RunLogs(plan.run_dir, _torch_logs(plan, config), None if tee == "all" else set(tee), plan.job.config.env)
    agent = Agent(spec, logs, director, **_agent_options(plan, config))
    return agent, spec


def _torch_config(plan: LaunchPlan) -> tuple[LaunchConfig, Any, list[str]]:
    """Torch's own configuration and command for the plan, with the bootstrap put before the script."""
    from torch.distributed.run import config_from_args

    namespace = plan.namespace
    _settle_rendezvous(namespace)
    workers = _local_world_size(namespace)
    namespace.nproc_per_node = str(workers)
    if workers > 1:
        # What torch does next anyway, with a warning of six lines.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        config, entrypoint, arguments = config_from_args(namespace)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"torch refuses these options: {error or 'no reason given'}") from error
    if not namespace.no_python and not namespace.run_path:
        arguments = [arguments[0], "-m", _BOOTSTRAP, *arguments[1:]]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    return config, entrypoint, arguments


def _settle_rendezvous(namespace: argparse.Namespace) -> None:
    """What ``torchrun`` does with its options before it makes a configuration of them."""
    alone = str(namespace.nnodes) in ("1", "1:1")
    static = namespace.rdzv_backend == "static" and not namespace.rdzv_endpoint and namespace.master_port is None
    if namespace.standalone or (static and alone):
        namespace.rdzv_backend = "c10d"
        namespace.rdzv_endpoint = "localhost:0"
        namespace.rdzv_id = str(uuid.uuid4())
    if namespace.master_port is None:
        namespace.master_port = 29500


def _torch_logs(plan: LaunchPlan, config: LaunchConfig) -> LogsSpecs | None:
    """Torch's log files, if one of torchrun's log options was given; the run directory's otherwise."""
    asked = ("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs")
    given = any(plan.launch[name].origin != "default" for name in asked if name in plan.launch)
    return config.logs_specs if given else None


def _agent_options(plan: LaunchPlan, config: LaunchConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"start_method": config.start_method}
    own_files = _torch_logs(plan, config) is None
    options["log_line_prefix_template"] = config.log_line_prefix_template or (_NoPrefix() if own_files else None)
    if hasattr(config, "shutdown_timeout"):
        given = plan.launch["shutdown_timeout"].origin != "default"
        options["shutdown_timeout"] = config.shutdown_timeout if given else int(plan.grace)
    return options


class _NoPrefix(str):
    """An empty prefix that torch doesn't take for "none given": without options, torchrun's lines have no prefix."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return True
