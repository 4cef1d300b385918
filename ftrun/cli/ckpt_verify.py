"""``ftrun ckpt verify``: read every byte of checkpoints and compare it with what was committed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun.cli.ckpt_place import NAME_HELP, WHERE_HELP, locate, told
from ftrun.config.units import format_size
from ftrun.contract import ExitCode
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.checkpoint.layout import Root
    from ftrun.checkpoint.reader import AttemptInfo
    from ftrun.checkpoint.verify import Damage
    from ftrun.cli.ckpt_place import Place


@dataclass(frozen=True)
class Verdict:
    """What verifying one checkpoint found.

    Attributes:
        name: of the checkpoint.
        status: as ``ftrun ckpt ls`` shows it.
        size: bytes that were to be read.
        seconds: that it took.
        damages: what is wrong.
        marked: it was marked as bad.
        deleted: it was deleted while it was read, as a run does that goes on.
    """

    name: str
    status: str
    size: int
    seconds: float
    damages: list[Damage]
    marked: bool = False
    deleted: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is there and nothing is wrong."""
        return not self.damages and not self.deleted


def verify(
    where: Annotated[str, typer.Argument(help=WHERE_HELP)] = "",
    name: Annotated[str, typer.Argument(help=NAME_HELP)] = "",
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints of the root.")] = False,
    mark_bad: Annotated[bool, typer.Option("--mark-bad", help="Never resume from one that is damaged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Read every byte of a checkpoint and check every checksum. Exit code 1 when something is damaged.

    Where none is named, newer ones that are passed over because of damage are shown too.
    """
    with told():
        place = locate(where, name, Path.cwd())
        if everything and place.name is not None:
            raise UsageError(f"--all means all checkpoints of the root, and {place.name} one; give one of them")
        verdicts = [examine(place.root, info, mark_bad=mark_bad) for info in _chosen(place, everything=everything)]
    if as_json:
        print(
            json.dumps(
                {"schema_version": 1, "root": place.root.url, "checkpoints": list(map(_row, verdicts))}, indent=1
            )
        )
    else:
        print(
            "\n".join(line for verdict in verdicts for line in _lines(verdict)) or f"no checkpoints in {place.root.url}"
        )
    if not all(verdict.whole or (everything and verdict.deleted) for verdict in verdicts):
        raise SystemExit(ExitCode.FAILED)


def _chosen(place: Place, *, everything: bool) -> list[AttemptInfo]:
    """What is asked for; with the newest one that can be used, what a start passes over for it because of damage."""
    from ftrun.checkpoint import reader

    if everything:
        return [info for info in reader.attempts(place.root) if info.status in ("committed", "invalid")]
    newest = place.info()
    if place.name is not None:
        return [newest]
    newer = (reader.inspect(place.root, name) for name in place.root.attempts() if name > newest.name)
    return [*(info for info in newer if info.status == "invalid"), newest]


def examine(root: Root, info: AttemptInfo, *, mark_bad: bool) -> Verdict:
    """Verify one checkpoint.

    Raises:
        CheckpointError: a remote storage is away, or the mark can't be written.
    """
    from ftrun.checkpoint import reader, verify
    from ftrun.checkpoint.layout import MANIFEST, attempt_key

    began = time.monotonic()
    damages = verify.verify(root, info.name, info.manifest) if info.manifest is not None else []
    if info.manifest is None or (info.status == "invalid" and not damages):  # no manifest, or not the one of this place
        damages = [verify.of_manifest(root, info.name, info.reason)]
    if damages and info.manifest is not None and root.size(attempt_key(info.name, MANIFEST)) is None:
        # Its manifest goes first when a checkpoint is deleted: what is missing is no damage.
        return Verdict(str(info.name), info.status, 0, time.monotonic() - began, [], deleted=True)
    # A save that is still on its way has no manifest either: it may be whole in a moment.
    marks = mark_bad and info.status != "uncommitted" and any(each.certain for each in damages)
    if marks:
        reader.mark_bad(root, info.name, verify.marking(damages))
    size = info.manifest.size if info.manifest is not None else info.size
    return Verdict(str(info.name), info.status, size, time.monotonic() - began, damages, marks)


def _row(verdict: Verdict) -> dict[str, Any]:
    document = asdict(verdict) | {"whole": verdict.whole}
    document["damages"] = [asdict(each) for each in verdict.damages]
    return document


def _lines(verdict: Verdict) -> list[str]:
    if verdict.deleted:
        return [f"{verdict.name}   deleted while it was read"]
    if verdict.whole:
        return [f"{verdict.name}   whole: {format_size(verdict.size)} read in {verdict.seconds:.1f} s"]
    if verdict.status == "uncommitted":
        return [f"{verdict.name}   NOT COMMITTED: it has no manifest; the save goes on, or was given up"]
    word = "DAMAGED" if any(each.certain for each in verdict.damages) else "NOT READABLE"
    mark = ", marked as bad" if verdict.marked else ""
    return [f"{verdict.name}   {word}{mark}", *(f"  {each}" for each in verdict.damages)]
