"""``ftrun ckpt``: what lies in a checkpoint root, and what is kept there. The commands, and the first of them: ls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun.cli.ckpt_export import export_command
from ftrun.cli.ckpt_keep import pin, prune, unpin
from ftrun.cli.ckpt_place import WHERE_HELP, find_root, told
from ftrun.cli.ckpt_show import show
from ftrun.cli.ckpt_verify import verify
from ftrun.config.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.checkpoint.layout import AttemptName
    from ftrun.checkpoint.reader import AttemptInfo


def ls(
    where: Annotated[str, typer.Argument(help=WHERE_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List checkpoints, newest first, and say of each whether it can be resumed from."""
    from ftrun.checkpoint import epochs, reader

    with told():
        root = find_root(where, Path.cwd())
        found = reader.attempts(root)
        record = epochs.current(root)
        pins = set(root.pins())
    since = record.since if record is not None else 0
    rows = [_row(info, since, pins) for info in found]
    if as_json:
        print(json.dumps({"schema_version": 1, "root": root.url, "checkpoints": rows}, indent=1))
    else:
        print(_table(rows) if rows else f"no checkpoints in {root.url}")


def _row(info: AttemptInfo, since: int, pins: set[AttemptName]) -> dict[str, Any]:
    manifest = info.manifest
    status = info.status
    if status == "committed" and info.name.epoch < since:
        status_text, reason = "earlier run", "before the last --fresh"
    else:
        status_text, reason = status, info.reason
    return {
        "name": str(info.name),
        "step": info.name.step,
        "epoch": info.name.epoch,
        "status": status_text,
        "reason": reason,
        "pinned": info.name in pins,
        "size": info.size,
        "world_size": manifest.world_size if manifest else None,
        "taken_for": manifest.reason if manifest else None,
        "written_at": manifest.written_at if manifest else None,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'step':>10}  {'status':<12} {'size':>10}  {'ranks':>5}  name"]
    for row in rows:
        remarks = "; ".join([*(["pinned"] if row["pinned"] else []), *([row["reason"]] if row["reason"] else [])])
        ranks = row["world_size"] or ""
        lines.append(
            f"{row['step']:>10,}  {row['status']:<12} {format_size(row['size']):>10}  {ranks:>5}  {row['name']}"
            f"{'   ' if remarks else ''}{remarks}"
        )
    return "\n".join(lines)


def _commands() -> typer.Typer:
    functions: dict[str, Callable[..., None]] = {
        "ls": ls,
        "show": show,
        "verify": verify,
        "pin": pin,
        "unpin": unpin,
        "prune": prune,
        "export": export_command,
    }
    commands = typer.Typer(no_args_is_help=True, help="Look at checkpoints, verify them, and say which ones to keep.")
    for name, function in functions.items():
        commands.command(name)(function)
    return commands


app = _commands()
