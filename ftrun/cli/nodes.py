"""``ftrun nodes``: what is known of a run's nodes, and leaving one out or letting it in by hand.

All of it works beside a running job, whose nodes see it within seconds, and where none runs.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ftrun.cli.ckpt_place import told
from ftrun.cli.nodes_text import describe, text
from ftrun.contract import ExitCode
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.health.history import Book, Entry
    from ftrun.health.nodes_file import NodesFile
    from ftrun.health.standing import Rules
    from ftrun.rundir import RunDir

_SHOW = "show"


class _DefaultShow(TyperGroup):
    """Takes what is no command as the name of a run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``show`` in front where the user left it out."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [_SHOW, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_DefaultShow,
    help="See what is known of a run's nodes; leave one out, or let it in. `ftrun nodes [RUN] [--json]` lists them.",
)

_Host = Annotated[str, typer.Argument(metavar="HOST", help="Host name of the node.", show_default=False)]
_Run = Annotated[str, typer.Option("--run", help="Name or directory of a run; the latest one if left out.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


@app.command(_SHOW)
def show(
    run: Annotated[str, typer.Argument(help="Name or directory of a run; the latest one if left out.")] = "",
    as_json: _Json = False,
) -> None:
    """List the nodes of a run: where each stands, and what counts against it. `ftrun nodes` does the same."""
    with told():
        run_dir = _find(run)
        document = describe(run_dir, _file(run_dir).read(), _rules(run_dir), time.time())
    print(json.dumps(document, indent=1) if as_json else text(document))


@app.command()
def exclude(
    host: _Host,
    time_limit: Annotated[
        str, typer.Option("--for", help="How long, such as 2h; until it is admitted if left out.")
    ] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever reads it later.")] = "",
    run: _Run = "",
    force: Annotated[bool, typer.Option("--force", help="Also a node that this run has never seen.")] = False,
) -> None:
    """Leave a node out. One that takes part leaves with code 86 within seconds, and the others go on."""
    from ftrun.health.history import By, Excluded

    with told():
        seconds = _seconds(time_limit)
        run_dir = _find(run)
        _check_known(run_dir, host, "--force excludes it all the same", force=force)
        now = time.time()
        book = _add(run_dir, host, Excluded(now, By.USER, reason, seconds))
        first, *more = _told_of(run_dir, book, host, now)
        print(f"{run_dir.path.name}: {first}")
        for line in more:
            print(line)


@app.command()
def admit(host: _Host, run: _Run = "") -> None:
    """Let a node take part again, without a check. Nothing that happened before counts against it any more."""
    from ftrun.health.history import Admitted, By, Host
    from ftrun.health.standing import standing

    with told():
        run_dir = _find(run)
        _check_known(run_dir, host, "")
        now = time.time()
        before = standing(_file(run_dir).read().hosts.get(host, Host()), _rules(run_dir), now)
        _add(run_dir, host, Admitted(now, By.USER, ""))
        if before.exclusion is None:
            print(f"{run_dir.path.name}: {host} was not excluded ({before.state}); nothing counts against it now")
        else:
            print(f"{run_dir.path.name}: {host} may take part again; start ftrun on it where it has left")


@app.command()
def check(as_json: _Json = False) -> None:
    """Check this node under load, as one that comes back is. Exit code 1 when a result was wrong."""
    from ftrun.health import checking

    found = checking.run()
    if as_json:
        print(json.dumps({"schema_version": 1, "trouble": found.trouble, "detail": found.detail}, indent=1))
    else:
        print(f"WRONG  {found.trouble}" if found.trouble else f"nothing wrong: {found.detail}")
    if found.trouble:
        raise SystemExit(ExitCode.FAILED)


def _find(run: str) -> RunDir:
    from ftrun.cli.status import find

    return find(run, Path.cwd())


def _file(run_dir: RunDir) -> NodesFile:
    from ftrun.health.nodes_file import NodesFile

    return NodesFile(run_dir.nodes, lambda said: print(f"ftrun: {said}", file=sys.stderr))


def _rules(run_dir: RunDir) -> Rules:
    """What the run's job said of its nodes when it was last started."""
    from ftrun.config.health import Nodes
    from ftrun.launch.remembering import rules

    try:
        return rules(Nodes.model_validate(run_dir.identity()["job"]["config"]["health"]["nodes"]))
    except (KeyError, TypeError, ValueError):  # of an ftrun that knew no such section
        return rules(Nodes())


def _seconds(given: str) -> float | None:
    from ftrun.config.units import parse_duration

    if not given:
        return None
    try:
        seconds = parse_duration(given).total_seconds()
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None
    if not seconds:
        raise UsageError(f"--for {given} is no time at all; `ftrun nodes admit` ends an exclusion")
    return seconds


def _check_known(run_dir: RunDir, host: str, way_out: str, *, force: bool = False) -> None:
    """See that a host is one of the run's.

    Raises:
        UsageError: it isn't; the message names those that are.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*(#[0-9]+)?", host):
        raise UsageError(f"{host!r} is no host name; it is what `hostname` says on the node.")
    # As a writer reads it: who is about to write isn't kept from it by a damaged file.
    known = _file(run_dir).change(lambda book: book).hosts.keys() | _took_part(run_dir)
    if host in known or force:
        return
    those = f"it has seen {', '.join(sorted(known))}" if known else "it has seen no node yet"
    raise UsageError(f"{run_dir.path} has never seen a node {host!r}; {those}.{way_out and f' {way_out}.'}")


def _took_part(run_dir: RunDir) -> set[str]:
    """Hosts that launchers of the run were started on, or have met; a node may have its own launcher's events only."""
    from ftrun import events

    known: set[str] = set()
    for file in run_dir.events().parent.glob("n*.jsonl"):
        for record in events.read(file):
            if isinstance(record.event, events.RunStarted):
                known.add(record.event.host)
            elif isinstance(record.event, events.Met):
                known.update(record.event.nodes)
    return known


def _add(run_dir: RunDir, host: str, entry: Entry) -> Book:
    return _file(run_dir).change(lambda book: book.add(host, entry))


def _told_of(run_dir: RunDir, book: Book, host: str, now: float) -> list[str]:
    """What comes of leaving a node out, as far as it is known."""
    from ftrun.health import policy

    out = policy.excluded(book, _rules(run_dir), now)
    lines = [out[host]]
    seen = {name for name, each in book.hosts.items() if each.last_seen}
    left, least = len(seen - out.keys()), _least(run_dir)
    if seen and left < least:
        lines.append(f"{left} of the nodes that this run has seen are left, and it needs {least} (--nnodes)")
    if not run_dir.identity().get("shared_run_dir", True):
        lines.append(
            f"the nodes share no run directory: this counts only if it was typed on {host}, or on the node that leads "
            "the rendezvous"
        )
    return lines


def _least(run_dir: RunDir) -> int:
    try:
        return int(str(run_dir.identity()["launch"]["nnodes"]["value"]).partition(":")[0])
    except (KeyError, TypeError, ValueError):
        return 1
