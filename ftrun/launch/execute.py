"""Carrying a plan out: take the run directory, start the agent, and leave with the right code."""

from __future__ import annotations

import os
import platform
import socket
import uuid
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from ftrun import durable, events, rundir
from ftrun.checkpoint.keeper import seats
from ftrun.contract import ExitCode
from ftrun.errors import RunDirTaken, UsageError
from ftrun.goodput import history, screen
from ftrun.launch import nodes_apart, nodes_here, torch_config
from ftrun.launch.console import Console
from ftrun.launch.guard import Guard
from ftrun.launch.main_thread import Watchdog
from ftrun.launch.nodes_log import NodeLog
from ftrun.launch.output.outlets import Outlets

if TYPE_CHECKING:
    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.standbys.standby import Standbys
    from ftrun.launch.torch_config import TorchSettings


_WORD_SECONDS = 2.0


def execute(plan: LaunchPlan, command: list[str], standbys: Standbys) -> int:
    """Run a plan to its end.

    Args:
        plan: what to do.
        command: the command line, for the record.
        standbys: parked processes, some of which may be under way for the first attempt. The caller closes them.

    Returns:
        The exit code of ``ftrun``.

    Raises:
        RunDirTaken: another launcher has the run directory; nothing has been written.
        UsageError: it can't be started; nothing has been lost.
    """
    settings = torch_config.settle(plan)
    outlets = Outlets.of_this_process(plan.run_dir.attempts)
    try:
        return _reported(plan, _execute(plan, settings, command, standbys, outlets))
    finally:
        outlets.close()


def _execute(
    plan: LaunchPlan, settings: TorchSettings, command: list[str], standbys: Standbys, outlets: Outlets
) -> int:
    from ftrun.launch.supervise import Beside, supervise  # which imports torch's agent

    console = Console(Path.cwd(), outlets)
    most = nodes_here.MOST if nodes_here.all_here(plan.launch) else 1
    locked = rundir.locked(plan.run_dir.path, shared_by_nodes=plan.shared_by_nodes, most_here=most)

    def tell(text: str) -> None:
        console.warn(text)
        outlets.flush(_WORD_SECONDS)  # the end of the process may follow

    with Watchdog(tell, reported=lambda code: _reported(plan, code)) as watchdog, locked as number:
        _require_new(plan)
        plan = replace(plan, node_name=nodes_here.name(number))
        if plan.finished and not plan.contract.allow_new_total:
            console.say(
                f"[green]✓[/] {plan.run_id} is finished; its run is in {console.short(plan.run_dir.path)}. "
                f"Start over with {_way_to_start_over(plan)}, or go on to another total with --allow-new-total."
            )
            seats.clear(plan.run_dir.path)
            return ExitCode.OK
        _prepare(plan, console)
        for note in settings.notes:
            console.warn(note)
        log = NodeLog(plan.run_dir, lambda: _describe(plan)) if plan.ours else events.EventLog(plan.run_dir.events())
        if not plan.ours:
            events.mend(plan.run_dir.events())
        log.write(_run_started(plan, command, settings.config.nproc_per_node))
        with Guard(plan.contract.marks) as guard:
            outcome, code = supervise(plan, settings, Beside(guard, standbys, outlets, watchdog), log, console)
            watchdog.code = code
        log.write(events.RunEnded(outcome=outcome, exit_code=code))
        if not isinstance(log, NodeLog) or log.first:
            console.print(screen.render(history.load(plan.run_dir), console.short(plan.run_dir.path)))
    return code


def _way_to_start_over(plan: LaunchPlan) -> str:
    """Nodes that meet through ftrun's own rendezvous have no ``--fresh``: see :func:`_prepare`."""
    if not (plan.ours and plan.shared_by_nodes):
        return "--fresh"
    return "another --name" + (" and another checkpoint.root" if plan.job.config.checkpoint.root else "")


def _reported(plan: LaunchPlan, code: int) -> int:
    """The exit code as the job wants it: with ``exit_codes: torchrun`` there is 0 and there is 1."""
    return code if plan.job.config.exit_codes == "ftrun" else int(bool(code))


def _require_new(plan: LaunchPlan) -> None:
    """A name by the second, free when it was planned, may have been used by a run that is over by now."""
    if plan.takes_a_free_name and plan.run_dir.exists():
        raise RunDirTaken(f"{plan.run_dir.path} holds another run, which began in the same second. Start again.")


def _prepare(plan: LaunchPlan, console: Console) -> None:
    _check_root(plan)
    if plan.fresh and plan.ours and plan.shared_by_nodes:
        raise UsageError(
            f"--fresh: several nodes work in {plan.run_dir.path}, and each of them would move aside what another has "
            "begun. Move it away by hand before you start them, or choose another --name."
        )
    if plan.fresh:
        aside = plan.run_dir.set_aside()
        if aside is not None:
            console.say(f"the earlier run is kept in {console.short(aside)}")
    # Beside others that may be at work, this node may still be refused: who leads the first round describes the run.
    if not (plan.ours and plan.shares_run_dir and plan.run_dir.exists()):
        _describe(plan)
    console.say(f"run {plan.run_id} in {console.short(plan.run_dir.path)}")
    if not plan.shares_run_dir:
        console.say(f"[dim]{escape(nodes_apart.word(plan))}[/]")


def _describe(plan: LaunchPlan) -> None:
    identity = {**plan.to_json(), "run_id": plan.run_id, "ftrun": metadata.version("ftrun")}
    plan.run_dir.create(identity)
    if plan.job.path is not None:
        durable.write(plan.run_dir.job_yaml, plan.job.text.encode())


def _check_root(plan: LaunchPlan) -> None:
    """See that a checkpoint root outside the run directory can be written, before anything else is."""
    opened = plan.open_root()
    if opened.remote:
        return  # its first request says it
    root = opened.path
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
