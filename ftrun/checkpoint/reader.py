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
from ftrun.checkpoint.storage.base import UnreachableError, why
from ftrun.errors import CheckpointError, NoValidCheckpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
    return [_info(root, name) for name in root.attempts()]


def inspect(root: Root, name: AttemptName) -> AttemptInfo:
    """Look at one attempt: its manifest, and every file's presence and size. Content is not read.

    Raises:
        NewerFormatError: its manifest was written by a newer ftrun.
        CheckpointError: a remote storage is away.
    """
    return _examine(root, name, _files(root, name))


def _info(root: Root, name: AttemptName) -> AttemptInfo:
    files = _files(root, name)
    try:
        return _examine(root, name, files)
    except NewerFormatError as error:
        return AttemptInfo(name, "invalid", str(error), None, sum(files.values()))


def _examine(root: Root, name: AttemptName, files: Mapping[str, int]) -> AttemptInfo:
    """As :func:`inspect`, with the attempt's listing. A remote storage is asked for nothing that the listing knows."""
    size = sum(files.values())
    reason = _bad_reason(root, name)
    if reason is not None:
        return AttemptInfo(name, "bad", reason, None, size)
    if root.remote and MANIFEST not in files:
        return AttemptInfo(name, "uncommitted", f"has no {MANIFEST}", None, size)
    try:
        content = root.read(attempt_key(name, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return AttemptInfo(name, "uncommitted", f"has no {MANIFEST}", None, size)
    except UnreachableError:
        raise
    except OSError as error:
        return AttemptInfo(name, "invalid", f"{MANIFEST} can't be read: {why(error)}", None, size)
    try:
        manifest = Manifest.from_bytes(content)
    except BadManifestError as error:
        return AttemptInfo(name, "invalid", f"{MANIFEST} {error}", None, size)
    reason = _misfit(root, name, manifest, files)
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
        # A directory is asked for each file, which is fresher than a listing; the sum of their sizes is of no interest.
        info = _examine(root, name, _files(root, name) if root.remote else {})
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
        CheckpointError: the root holds nothing at all.
        OSError: the note can't be written.
    """
    if not root.epochs() and not root.attempts():
        # What is written where a root was mounted is out of sight when it is back.
        raise CheckpointError(f"{root.url} is empty, so {name} is not marked as bad in it: is it mounted?")
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


def _misfit(root: Root, name: AttemptName, manifest: Manifest, files: Mapping[str, int]) -> str:
    """How a manifest contradicts where it lies or what lies beside it; empty where it doesn't."""
    if (manifest.attempt, manifest.epoch, manifest.step) != (str(name), name.epoch, name.step):
        return f"{MANIFEST} is that of {manifest.attempt}"
    # A large job has tens of thousands of files: what is the same for all of them is looked up once.
    storage, remote, top = root.storage, root.remote, attempt_key(name, "")
    for file, record in sorted(manifest.files.items()):
        try:
            size = files.get(file) if remote else storage.size(top + file)
        except OSError as error:
            return f"{file} can't be read: {why(error)}"
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
    except UnreachableError:
        raise
    except OSError as error:
        return f"may be marked as bad: {root.url}/{bad_key(name)} can't be read ({why(error)})"
    try:
        return f"is marked as bad: {json.loads(content)['reason']}"
    except (ValueError, KeyError, TypeError):
        return "is marked as bad"


def _files(root: Root, name: AttemptName) -> dict[str, int]:
    try:
        return root.files(name)
    except OSError as error:
        if not root.remote:  # its reason shows when its manifest is read
            return {}
        raise CheckpointError(f"can't list {name} in {root.url}: {why(error)}; check permissions") from error


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
    lines = [f"{root.url} holds checkpoints for the run {run_id!r}, but none that can be used:"]
    lines += [f"  {name}: {reason}" for name, reason in skipped]
    lines.append(f"look with `ftrun ckpt ls {root.url}` and restore the files, or start over with --fresh")
    return "\n".join(lines)
