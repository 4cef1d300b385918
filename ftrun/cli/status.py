"""``ftrun status``: how a run is doing, from its events, its checkpoints and what its keeper shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun import rundir
from ftrun.cli.status_data import data, data_text
from ftrun.cli.status_drain import drain_text, draining
from ftrun.cli.status_memory import memory, memory_text
from ftrun.cli.status_root import is_finished, usable_commit
from ftrun.config.units import format_duration
from ftrun.errors import FtrunError, RunDirError
from ftrun.goodput import history as histories
from ftrun.goodput import ledger
from ftrun.goodput.screen import headline
from ftrun.rundir import RUNS, RunDir

if TYPE_CHECKING:
    from ftrun.goodput.history import History


_MOST_FAILURES = 3


def status(
    run: Annotated[str, typer.Argument(help="Name or directory of a run; the latest one if left out.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show how a run is doing."""
    from ftrun.cli.app import fail

    try:
        run_dir = find(run, Path.cwd())
    except FtrunError as error:
        fail(error)
        return
    document = describe(run_dir, histories.load(run_dir))
    print(json.dumps(document, indent=1) if as_json else _text(document))


def find(run: str, cwd: Path) -> RunDir:
    """The run that a name or path means; the one that was started or wrote an event last if nothing is given.

    Raises:
        RunDirError: there is none.
    """
    if run:
        places = (cwd / RUNS / run, cwd / run)
        for path in places:
            if RunDir(path).resolved.is_file():
                return RunDir(path)
        # Runs without a name lie in a directory of their script's.
        found = [inside for path in places for inside in _runs(path, "*")]
        if not found:
            raise RunDirError(f"no run {run!r} in {cwd / RUNS}, and no run directory of that path. See `ls {RUNS}`.")
    elif RunDir(cwd).resolved.is_file():
        return RunDir(cwd)
    else:
        found = _runs(cwd / RUNS, "*") + _runs(cwd / RUNS, "*/*")
        if not found:
            raise RunDirError(f"no runs in {cwd / RUNS}. Start one with `ftrun train.py`, or name its directory.")
    return RunDir(max(found, key=_last_touched))


def _runs(folder: Path, pattern: str) -> list[Path]:
    return [file.parent for file in folder.glob(f"{pattern}/job.resolved.json")]


def _last_touched(path: Path) -> float:
    run_dir = RunDir(path)
    files = (*run_dir.event_files(), run_dir.resolved)  # one whose nodes haven't met yet has no events
    return max((each.stat().st_mtime for each in files if each.exists()), default=0.0)


def describe(run_dir: RunDir, past: History) -> dict[str, Any]:
    """The run as one JSON document."""
    alive = past.outcome is None and rundir.in_use(run_dir.path)
    book = ledger.account(past.records, until=time.time() if alive else None)
    state = past.outcome or ("running" if alive else "dead" if past.launches else "new")
    if past.node and state == "finished" and not is_finished(run_dir):
        state = "left"  # the workers here have ended well; whether that was the end of the run, the first one knows
    left = past.total - past.step if past.total is not None else None
    found = usable_commit(run_dir)
    return {
        "schema_version": 1,
        "run": past.run_id or run_dir.path.name,
        "run_dir": str(run_dir.path),
        "state": state,
        "exit_code": past.exit_code,
        "pid": past.pid if alive else None,
        "step": past.step,
        "total": past.total,
        "steps_per_second": past.pace,
        "seconds_left": left / past.pace if alive and left is not None and past.pace else None,
        "world_size": past.world_size,
        "node": past.node,
        "attempts": past.attempts,
        "restarts": past.restarts,
        "lost_steps": past.lost_steps,
        "loss": past.losses[-1][1] if past.losses else None,
        "last_commit": found.commit,
        "root_problem": found.problem or None,
        "draining": draining(run_dir.path),
        "memory": memory(run_dir, past.records),
        "data": data(run_dir.path, past.records),
        "commits": len(past.commits),
        "failed_saves": past.save_failures,
        "failures": [
            {
                "attempt": fall.attempt,
                "step": fall.what.step,
                "cause": fall.what.cause,
                "rank": fall.what.failed_rank,
                "message": fall.what.message,
                "seconds_to_training": fall.seconds_to_training,
            }
            for fall in past.falls
        ],
        "seconds": book.seconds,
        "wall_seconds": book.wall,
        "goodput": book.goodput,
    }


def _no_commit(document: dict[str, Any]) -> str:
    if document["root_problem"]:
        return f"not known, {document['commits']} so far: {document['root_problem']}"
    if document["commits"]:
        return f"none that can be used, of {document['commits']}; see `ftrun ckpt ls`"
    return "none yet" if document["state"] == "running" else "none"


def _elsewhere(document: dict[str, Any]) -> str:
    """What a node can't know that has a run directory of its own, and isn't the first one; empty where it is."""
    if not document["node"]:
        return ""
    return f"  step       known on the first node; this one is number {document['node']} of the run, from 0"


def _time(document: dict[str, Any]) -> str:
    return f"  time       {format_duration(document['wall_seconds'])}   {document['goodput']:.0%} of it in new steps"


def _text(document: dict[str, Any]) -> str:
    total = f" of {document['total']:,}" if document["total"] else ""
    pace = document["steps_per_second"]
    speed = f"   {pace:.3g} steps/s" if pace and document["state"] == "running" else ""
    left = document["seconds_left"]
    commit, again = document["last_commit"], document["lost_steps"]
    shown = document["failures"][-_MOST_FAILURES:]
    lines = [
        f"{document['run']}   {document['state'].replace('_', ' ')}   {document['run_dir']}",
        _elsewhere(document)
        or f"  step       {document['step']:,}{total}{speed}" + (f"   {format_duration(left)} left" if left else ""),
        f"  loss       {document['loss']:.4g}" if document["loss"] is not None else "",
        f"  commit     step {commit['step']:,}   {commit['name']}"
        if commit
        else f"  commit     {_no_commit(document)}",
        drain_text(document["draining"]),
        *memory_text(document["memory"], running=document["state"] == "running"),
        *data_text(document["data"]),
        f"  attempts   {document['attempts']}",
        f"  restarts   {document['restarts']}" + (f"   {again:,} steps done again" if again else ""),
        *(f"             step {each['step']:,}: {headline(str(each['message']))}" for each in shown),
        "" if document["node"] else _time(document),
    ]
    if document["state"] == "dead":
        lines.append("  The launcher is gone without a word. The same command continues from the last commit.")
    return "\n".join(line for line in lines if line)
