"""Reading checkpoints outside a run: in a notebook, on another machine, on fewer devices."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.layout import AttemptName, Root
from ftrun.checkpoint.names import ATTEMPTS, EPOCHS
from ftrun.checkpoint.opened import Opened
from ftrun.checkpoint.storage.base import why
from ftrun.checkpoint.storage.drivers import local_path
from ftrun.checkpoint.tree import nest
from ftrun.checkpoint.words import TAG
from ftrun.errors import CheckpointError, CorruptCheckpoint, NoValidCheckpoint, UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)


def load(
    where: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into CPU memory, in one process, whatever wrote it.

    Every byte is verified against the checkpoint's checksums, and nothing is unpickled: a checkpoint can't run code.
    Tensors that were split over ranks (FSDP2, tensor parallel) come back whole. Without ``step`` and ``name`` it is
    the newest checkpoint that is whole; a newer one that is damaged is skipped with a warning.

    What ``ft.track(model=model, optimizer=optimizer)`` stored lies under ``tracked``; what ``dcp.save`` stored comes
    back as it was given, with texts as the keys of its dicts::

        state = ftrun.load("runs/llama")
        model.load_state_dict(state["tracked"]["model"])

        state = ftrun.load("s3://bucket/llama", step=20_000)

    Args:
        where: a checkpoint root, a run directory, one checkpoint's own directory, or a URL of a root or checkpoint.
        step: the newest checkpoint with this number of finished steps.
        name: one checkpoint by its name, as ``ftrun ckpt ls`` shows it.
        rank: whose random states and other values of its own are wanted.
        storage_options: for the driver of a URL.

    Returns:
        The state as nested dicts; tensors are plain CPU tensors without gradient.

    Raises:
        UsageError: there is no such checkpoint or rank, or a newer ftrun wrote it.
        NoValidCheckpoint: there are checkpoints, and none of them is whole.
        CorruptCheckpoint: the one that was named is damaged.
        CheckpointError: storage can't be read.
    """
    root, inside = open_root(where, storage_options)
    wanted = name or inside
    if wanted is not None and step is not None:
        raise UsageError(f"step={step} and {wanted} both choose the checkpoint; give one of them")
    damaged: list[str] = []
    while True:
        commit = choose(root, step=step, name=wanted, exclude=damaged)
        try:
            with open_rank(root, commit.name, rank) as opened:
                value = opened.value(nested(opened.tree))
        except CorruptCheckpoint as error:
            if wanted is not None:
                raise
            _log.warning("%s: skipped, and the next older one is read", error.detail)
            damaged.append(str(commit.name))
            continue
        return value if isinstance(value, dict) else {"value": value}


def open_root(
    where: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Root, str | None]:
    """The root that a path or URL means, and the name of one checkpoint where it is that checkpoint's own.

    Raises:
        UsageError: an empty path, a directory with other things in it, or a URL that no driver is installed for.
        CheckpointError: the path can't be looked into.
    """
    text = os.fspath(where).rstrip("/") or os.fspath(where)
    path = local_path(text)
    if path is None:
        parent, _, last = text.rpartition("/")
        if AttemptName.parse(last) is not None:
            return Root.open(parent.rpartition("/")[0], storage_options), last
        return Root.open(text, storage_options), None
    if AttemptName.parse(path.name) is not None:
        return Root.open(path.parent.parent), path.name
    run_dir = RunDir(path)
    try:
        is_run = run_dir.resolved.is_file()
        is_root = any((path / part).is_dir() for part in (ATTEMPTS, EPOCHS))
    except OSError as error:
        raise CheckpointError(f"{path} can't be looked into: {why(error)}; check the path and permissions") from error
    if is_run:
        identity = run_dir.identity()
        return Root.open(run_dir.root(identity), storage_options or identity.get("storage_options")), None
    if not is_root:
        _check_empty(path)
    return Root.open(path), None


def choose(
    root: Root, *, step: int | None = None, name: str | None = None, exclude: Collection[str] = frozenset()
) -> reader.Commit:
    """The commit that was asked for: one by name, the newest of a step, or the newest; of any run.

    Raises:
        UsageError: there is none, or a newer ftrun wrote it.
        NoValidCheckpoint: there are some, and none of them can be used; the message says why.
        CheckpointError: the root can't be listed.
    """
    if name is not None:
        return _by_name(root, AttemptName.of(name))
    if step is not None:
        return _by_step(root, step, exclude)
    record = epochs.current(root)
    found = [] if record else [info for info in reader.attempts(root) if info.manifest and info.status == "committed"]
    run_id = record.run_id if record else found[0].manifest.run_id if found and found[0].manifest else ""
    choice = reader.resume_point(root, run_id, exclude=exclude)
    for skipped, reason in choice.skipped:
        if skipped not in exclude:
            _log.warning("checkpoint %s is skipped: %s", skipped, reason)
    if choice.commit is None:
        raise UsageError(f"there is no checkpoint in {root.url}; `ftrun ckpt ls` shows what a root holds")
    return choice.commit


def open_rank(root: Root, name: AttemptName, rank: int) -> Opened:
    """A rank's view; what ``dcp.save`` stored is one state, and each rank's view is the same.

    Raises:
        CorruptCheckpoint: it is damaged.
        CheckpointError: it can't be read.
        UsageError: it has no such rank.
    """
    opened = Opened(root, name, rank)
    return Opened(root, name) if rank and is_dcp(opened.tree) else opened


def is_dcp(tree: Any) -> bool:
    """Whether ``dcp.save`` stored it."""
    return isinstance(tree, dict) and set(tree) == {"dcp", "paths"}


def flat(tree: Any) -> dict[str, Any]:
    """What ``dcp.save`` stored, by the names that its planner gave."""
    values = tree["dcp"]
    return dict(values["items"]) if TAG in values else dict(values)


def nested(tree: Any) -> Any:
    """A rank's tree as the user gave it: what ``dcp.save`` stored is kept flat, with the way back beside it."""
    if not is_dcp(tree):
        return tree
    paths = tree["paths"]
    return nest({tuple(paths[key]) if paths else (key,): node for key, node in flat(tree).items()})


def default_part(tree: Any) -> str:
    """Which part of a tree is the state of a training: all of what ``dcp.save`` stored, what a Session tracked."""
    return "tracked" if not is_dcp(tree) and isinstance(tree, dict) and "tracked" in tree else ""


def _check_empty(path: Path) -> None:
    """A place that isn't there, or has nothing in it, is a root without checkpoints; anything else is a mistake."""
    try:
        holds = sorted(os.listdir(path))
    except NotADirectoryError:
        raise UsageError(f"{path} is a file; name a run directory, a checkpoint root or a checkpoint in one") from None
    except OSError:
        return  # whoever lists the root says why it can't be read
    if holds:
        by_dcp = " What DCP's own writer saved, its FileSystemReader reads." if ".metadata" in holds else ""
        raise UsageError(
            f"{path} is no run directory and no checkpoint root: it holds {', '.join(holds[:3])}, but no "
            f"{RunDir(path).resolved.name}, {EPOCHS} or {ATTEMPTS}.{by_dcp}"
        )


def _by_name(root: Root, name: AttemptName) -> reader.Commit:
    info = reader.inspect(root, name)
    if info.status == "committed" and info.manifest is not None:
        return reader.Commit(name, info.manifest)
    raise NoValidCheckpoint(f"checkpoint {name} in {root.url} can't be used: {info.reason}")


def _by_step(root: Root, step: int, exclude: Collection[str]) -> reader.Commit:
    reasons, steps = [], []
    for name in root.attempts():
        if name.step != step:
            steps.append(name.step)
            continue
        info = reader.inspect(root, name)
        if info.status == "committed" and info.manifest is not None and str(name) not in exclude:
            return reader.Commit(name, info.manifest)
        reasons.append(f"{name}: {info.reason or 'is damaged'}")
    if reasons:
        raise NoValidCheckpoint("\n".join([f"no checkpoint of step {step} can be used:", *reasons]))
    some = ", ".join(map(str, sorted(set(steps))[-10:])) or "none at all"
    raise UsageError(f"{root.url} has no checkpoint of step {step}; there is {some}")
