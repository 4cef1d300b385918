"""Which checkpoint is the latest. A manifest that is whole and fits its files is trusted, and nothing else.

Not trusted: modification times, clocks, ``LATEST``, the mere existence of a directory or file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ftrun.checkpoint.epochs import require_free_or_ours
from ftrun.checkpoint.layout import LATEST, MANIFEST, AttemptName, Root, attempt_key, bad_key
from ftrun.checkpoint.manifest import BadManifestError, Manifest, NewerFormatError
from ftrun.errors import NoValidCheckpoint

if TYPE_CHECKING:
    from collections.abc import Collection

Status = Literal["committed", "uncommitted", "invalid", "bad"]


@dataclass(frozen=True)
class AttemptInfo:
    """What lies under an attempt's name.

    Attributes:
        name: its name.
        status: ``committed``; ``uncommitted`` (no manifest: unfinished or given up); ``invalid`` (a manifest
            that is damaged or doesn't fit its files); ``bad`` (bytes were found damaged while restoring).
        reason: why it isn't committed, empty where it is.
        manifest: the manifest, where one could be read.
        size: bytes of all files together.
    """

    name: AttemptName
    status: Status
    reason: str
    manifest: Manifest | None
    size: int


@dataclass(frozen=True)
class Commit:
    """A checkpoint that may be resumed from."""

    name: AttemptName
    manifest: Manifest


@dataclass(frozen=True)
class Choice:
    """What to resume from.

    Attributes:
        commit: the newest whole checkpoint, None where none was ever made.
        skipped: name and reason of each newer one that can't be used, newest first.
    """

    commit: Commit | None
    skipped: tuple[tuple[str, str], ...]


def attempts(root: Root) -> list[AttemptInfo]:
    """Everything under the root that has an attempt's name, newest first by (epoch, step).

    Raises:
        CheckpointError: the root can't be listed.
    """
    found = []
    for name in root.attempts():
        try:
            found.append(inspect(root, name))
        except NewerFormatError as error:
            found.append(AttemptInfo(name, "invalid", str(error), None, _usage(root, name)))
    return found


def inspect(root: Root, name: AttemptName) -> AttemptInfo:
    """Look at one attempt: its manifest, and every file's presence and size. Content is not read.

    Raises:
        NewerFormatError: its manifest was written by a newer ftrun.
    """
    size = _usage(root, name)
    reason = _bad_reason(root, name)
    if reason is not None:
        return AttemptInfo(name, "bad", reason, None, size)
    try:
        content = root.read(attempt_key(name, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return AttemptInfo(name, "uncommitted", f"has no {MANIFEST}", None, size)
    except OSError as error:
        return AttemptInfo(name, "invalid", f"{MANIFEST} can't be read: {error.strerror}", None, size)
    try:
        manifest = Manifest.from_bytes(content)
    except BadManifestError as error:
        return AttemptInfo(name, "invalid", f"{MANIFEST} {error}", None, size)
    reason = _misfit(root, name, manifest)
    return AttemptInfo(name, "invalid" if reason else "committed", reason, manifest, size)


def latest(root: Root, run_id: str, *, since: int = 0, exclude: Collection[str] = frozenset()) -> Choice:
    """Choose the newest whole checkpoint of a run. One process decides, and tells the ranks.

    Args:
        root: the checkpoint root; it need not exist.
        run_id: identity of the run.
        since: epoch at which the lineage began; older commits are out of sight.
        exclude: names that are not wanted although they may be whole.

    Raises:
        NoValidCheckpoint: there are commits, and none of them can be used; the message says why.
        UsageError: a newer ftrun wrote the newest one.
        CheckpointError: the root can't be listed.
    """
    skipped: list[tuple[str, str]] = []
    for name in root.attempts():
        if name.epoch < since:
            continue
        info = inspect(root, name)
        reason = _objection(info, run_id, exclude)
        if reason is None and info.manifest is not None:
            return Choice(Commit(name, info.manifest), tuple(skipped))
        if reason is not None:
            skipped.append((str(name), reason))
    skipped = skipped or _promised(root, since)
    if skipped:
        raise NoValidCheckpoint(_no_valid(root, run_id, skipped))
    return Choice(None, ())


def resume_point(root: Root, run_id: str, *, exclude: Collection[str] = frozenset()) -> Choice:
    """What a start of this run resumes from: the newest whole commit of its lineage.

    The epoch records say where the lineage began. Where none can be read every commit is a candidate: better an old
    one than a quiet fresh start.

    Raises:
        NoValidCheckpoint: there are commits, and none of them can be used.
        UsageError: the root belongs to another run, or a newer ftrun wrote the newest commit.
        CheckpointError: the root can't be listed.
    """
    record = require_free_or_ours(root, run_id)
    return latest(root, run_id, since=record.since if record is not None else 0, exclude=exclude)


def mark_bad(root: Root, name: str | AttemptName, reason: str) -> None:
    """Note that a checkpoint's bytes are damaged, so that nobody chooses it again. Again is no error.

    Raises:
        OSError: the note can't be written.
    """
    document = {"attempt": str(name), "reason": reason}
    try:
        root.create(bad_key(AttemptName.of(name)), json.dumps(document).encode() + b"\n")
    except FileExistsError:
        return


def _objection(info: AttemptInfo, run_id: str, exclude: Collection[str]) -> str | None:
    """Why an attempt is skipped and said; None for one to use, and for one that never became a checkpoint."""
    if info.status in ("invalid", "bad"):
        return info.reason
    if info.manifest is None:
        return None
    if info.manifest.run_id != run_id:
        return f"belongs to the run {info.manifest.run_id!r}"
    if str(info.name) in exclude:
        return "was set aside for this start"
    return None


def _misfit(root: Root, name: AttemptName, manifest: Manifest) -> str:
    """How a manifest contradicts where it lies or what lies beside it; empty where it doesn't."""
    if (manifest.attempt, manifest.epoch, manifest.step) != (str(name), name.epoch, name.step):
        return f"{MANIFEST} is that of {manifest.attempt}"
    for file, record in sorted(manifest.files.items()):
        try:
            size = root.size(attempt_key(name, file))
        except OSError as error:
            return f"{file} can't be read: {error.strerror}"
        if size is None:
            return f"{file} is missing"
        if size != record.size:
            return f"{file} has {size} bytes instead of {record.size}"
    return ""


def _bad_reason(root: Root, name: AttemptName) -> str | None:
    try:
        content = root.read(bad_key(name))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"is marked as bad ({error.strerror})"
    try:
        return f"is marked as bad: {json.loads(content)['reason']}"
    except (ValueError, KeyError, TypeError):
        return "is marked as bad"


def _usage(root: Root, name: AttemptName) -> int:
    try:
        return sum(root.files(name).values())
    except OSError:  # its reason shows when its manifest is read
        return 0


def _promised(root: Root, since: int) -> list[tuple[str, str]]:
    """A commit of this lineage that LATEST remembers and that isn't there any more."""
    try:
        name = AttemptName.parse(root.read(LATEST).decode("ascii").strip())
    except (OSError, ValueError):
        return []
    if name is None or name.epoch < since:
        return []
    return [(str(name), f"{LATEST} names it, but it has no {MANIFEST}")]


def _no_valid(root: Root, run_id: str, skipped: list[tuple[str, str]]) -> str:
    lines = [f"{root.path} holds checkpoints for the run {run_id!r}, but none that can be used:"]
    lines += [f"  {name}: {reason}" for name, reason in skipped]
    lines.append(f"look with `ftrun ckpt ls {root.path}` and restore the files, or start over with --fresh")
    return "\n".join(lines)
