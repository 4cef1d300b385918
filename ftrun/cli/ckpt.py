"""``ftrun ckpt``: what lies in a checkpoint root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun.errors import FtrunError, RunDirError, UsageError
from ftrun.rundir import RUNS

if TYPE_CHECKING:
    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.reader import AttemptInfo

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")


@app.callback()
def ckpt() -> None:
    """Look at checkpoints."""


@app.command("ls")
def ls(
    where: Annotated[
        str, typer.Argument(help="Name or directory of a run, or a checkpoint root; the latest run if left out.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """List checkpoints, newest first, and say of each whether it can be resumed from."""
    from ftrun.checkpoint import epochs, reader
    from ftrun.cli.app import fail

    try:
        root = find_root(where, Path.cwd())
        found = reader.attempts(root)
        record = epochs.current(root)
    except FtrunError as error:
        fail(error)
        return
    since = record.since if record is not None else 0
    rows = [_row(info, since) for info in found]
    if as_json:
        print(json.dumps({"schema_version": 1, "root": str(root.path), "checkpoints": rows}, indent=1))
    else:
        print(_table(rows) if rows else f"no checkpoints in {root.path}")


def find_root(where: str, cwd: Path) -> Root:
    """The checkpoint root that a name, a run directory or a root's own path means.

    Raises:
        UsageError: there is nothing of the kind.
    """
    from ftrun.checkpoint import layout
    from ftrun.cli.status import find

    path = cwd / where
    if where and (path / "epochs").is_dir():
        return layout.Root.open(path)
    try:
        run_dir = find(where, cwd)
    except RunDirError as error:
        if not where:
            raise
        raise UsageError(
            f"{where!r} is no run in {cwd / RUNS}, no run directory and no checkpoint root (no epochs/ in it)."
        ) from error
    return layout.Root.open(run_dir.identity().get("checkpoint_root", str(run_dir.checkpoints)))


def _row(info: AttemptInfo, since: int) -> dict[str, Any]:
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
        "size": info.size,
        "world_size": manifest.world_size if manifest else None,
        "taken_for": manifest.reason if manifest else None,
        "written_at": manifest.written_at if manifest else None,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'step':>10}  {'status':<12} {'size':>10}  {'ranks':>5}  name"]
    for row in rows:
        reason = f"   {row['reason']}" if row["reason"] else ""
        ranks = row["world_size"] or ""
        lines.append(
            f"{row['step']:>10,}  {row['status']:<12} {_size(row['size']):>10}  {ranks:>5}  {row['name']}{reason}"
        )
    return "\n".join(lines)


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
