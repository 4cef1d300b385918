"""``ftrun ckpt export``: a checkpoint in a format that other programs read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun.cli.ckpt_place import locate, told
from ftrun.config.units import format_size
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.checkpoint.export import Exported
    from ftrun.cli.ckpt_place import Place


class To(StrEnum):
    """The formats."""

    dcp = "dcp"
    safetensors = "safetensors"
    torch = "torch"


def export_command(  # noqa: PLR0913  (a command's options are its parameters)
    where: Annotated[
        str, typer.Argument(help="Name or directory of a run, a checkpoint root, or one checkpoint's own directory.")
    ],
    out: Annotated[str, typer.Argument(help="Where to: a file for torch, a directory otherwise.")],
    to: Annotated[To, typer.Option("--to", help="The format: dcp, safetensors or torch.")],
    step: Annotated[int | None, typer.Option(help="The newest checkpoint of this step.")] = None,
    name: Annotated[str, typer.Option(help="One checkpoint, by its name in `ftrun ckpt ls`.")] = "",
    what: Annotated[
        str | None, typer.Option(help="A part of it, for instance tracked/model. Default: all that is tracked.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a checkpoint for other programs: dcp.load, safetensors, or torch.load with weights_only.

    The newest whole checkpoint is taken unless --step or --name says otherwise. Tensors that were split over ranks
    come out whole. Every byte is verified while it is read.
    """
    with told():
        if step is not None and name:
            raise UsageError("--step and --name both choose the checkpoint; give one of them")
        done = _export(locate(where, name, Path.cwd()), _path(out), to, _Choice(step, what, force))
    print(json.dumps(_document(done, to), indent=1) if as_json else _text(done))


def _path(out: str) -> Path:
    protocol, mark, rest = out.partition("://")
    if not mark and out:
        return Path(out)
    if protocol == "file" and rest.startswith("/"):
        return Path(rest)
    raise UsageError(f"{out!r} is no path: an export is written to this machine; choose a path, and copy from there")


@dataclass(frozen=True)
class _Choice:
    """What of the checkpoint root to take, and how."""

    step: int | None
    what: str | None
    force: bool


def _export(place: Place, out: Path, to: To, choice: _Choice) -> Exported:
    from ftrun.checkpoint import export, offline

    name = str(place.name) if place.name is not None and choice.step is None else None
    commit = offline.choose(place.root, step=choice.step, name=name)
    with offline.open_rank(place.root, commit.name, 0) as opened:
        return export.export(opened, out, to.value, what=choice.what, force=choice.force)


def _document(done: Exported, to: To) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "path": str(done.path),
        "format": to.value,
        "checkpoint": done.checkpoint,
        "step": done.step,
        "size": done.size,
        "files": done.files,
        "keys": done.keys,
        "left_out": done.left_out,
        "changed": done.changed,
    }


def _text(done: Exported) -> str:
    what = f"{_count(len(done.keys), 'value')}, {format_size(done.size)} in {_count(len(done.files), 'file')}"
    lines = [f"{done.path}: {what}, from {done.checkpoint} (step {done.step:,})"]
    if done.left_out:
        lines.append(f"left out, being no tensors: {_some(done.left_out)}")
    if done.changed:
        lines.append(f"made simpler for torch.load(weights_only=True): {_some(done.changed)}")
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
