"""``ftrun ckpt pin``, ``unpin`` and ``prune``: which checkpoints stay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftrun.cli.ckpt_place import NAME_HELP, WHERE_HELP, find_root, locate, told
from ftrun.config.units import format_size
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.reader import AttemptInfo
    from ftrun.checkpoint.retention import KeepPolicy

_JSON = typer.Option("--json", help="One JSON document.")


def pin(
    where: Annotated[str, typer.Argument(help=WHERE_HELP)] = "",
    name: Annotated[str, typer.Argument(help=NAME_HELP)] = "",
    reason: Annotated[str, typer.Option(help="Why, for people.")] = "",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Keep a checkpoint whatever comes."""
    with told():
        place = locate(where, name, Path.cwd())
        info = place.info()
        if info.status != "committed":
            raise UsageError(f"checkpoint {info.name} is {info.status} ({info.reason}): there is nothing to keep")
        place.root.pin(info.name, reason)
    _say(place.root, str(info.name), "pinned", as_json=as_json)


def unpin(
    where: Annotated[str, typer.Argument(help=WHERE_HELP)] = "",
    name: Annotated[str, typer.Argument(help="Name of the checkpoint.")] = "",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Take a pin back: the checkpoint goes when its time has come."""
    with told():
        place = locate(where, name, Path.cwd())
        pins = place.root.pins()
        if place.name not in pins:
            listed = ", ".join(map(str, pins)) or "none"
            raise UsageError(f"name a pinned checkpoint to unpin; pinned in {place.root.url}: {listed}")
        place.root.unpin(place.name)
    _say(place.root, str(place.name), "unpinned", as_json=as_json)


def prune(
    where: Annotated[str, typer.Argument(help=WHERE_HELP)] = "",
    keep: Annotated[int, typer.Option(help="How many of the newest to keep, at least 2.", min=2)] = 3,
    every: Annotated[int | None, typer.Option(help="Keep the first of each span of so many steps, too.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Delete old checkpoints. The newest two, pinned ones and the one that was resumed from always stay."""
    from ftrun.checkpoint.retention import KeepPolicy

    with told():
        root = find_root(where, Path.cwd())
        made = plan(root, KeepPolicy(keep, every))
        if not dry_run:
            execute(root, made)
    if as_json:
        document = {
            "schema_version": 1,
            "root": root.url,
            "dry_run": dry_run,
            "deleted": [str(info.name) for info in made.deleted],
            "freed": made.freed,
            "kept": [str(info.name) for info in made.kept],
        }
        print(json.dumps(document, indent=1))
        return
    verb = "would delete" if dry_run else "deleted"
    for info in made.deleted:
        print(f"{verb} {info.name}   {format_size(info.size)}")
    print(f"{verb} {len(made.deleted)}, {format_size(made.freed)}; {len(made.kept)} checkpoints stay in {root.url}")


@dataclass(frozen=True)
class Pruning:
    """What pruning does.

    Attributes:
        deleted: what goes, oldest first.
        kept: checkpoints that stay, newest first.
    """

    deleted: list[AttemptInfo]
    kept: list[AttemptInfo]

    @property
    def freed(self) -> int:
        """Bytes of what goes."""
        return sum(info.size for info in self.deleted)


def plan(root: Root, policy: KeepPolicy) -> Pruning:
    """Choose what goes.

    Raises:
        UsageError: the root says nowhere whose it is.
        CheckpointError: it can't be listed.
    """
    from ftrun.checkpoint import epochs, reader, retention

    record = epochs.current(root)
    if record is None:
        raise UsageError(f"{root.url} has no readable record in epochs/: whose checkpoints these are is not known")
    infos = reader.attempts(root)
    spared = retention.spared(root, record.parent)
    deleted = retention.doomed(infos, policy, run_id=record.run_id, since=record.since, spared=spared)
    gone = {info.name for info in deleted}
    kept = [info for info in infos if info.status == "committed" and info.name not in gone]
    return Pruning(deleted, kept)


def execute(root: Root, pruning: Pruning) -> None:
    """Delete.

    Raises:
        OSError: a deletion failed; what was not deleted is whole or has no manifest.
    """
    from ftrun.checkpoint import retention

    for info in pruning.deleted:
        retention.delete(root, info)


def _say(root: Root, name: str, what: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"schema_version": 1, "root": root.url, "name": name, "pinned": what == "pinned"}, indent=1))
    else:
        print(f"{what} {name} in {root.url}")
