"""Checkpoints in formats of others: whole or not at all, and never over something that is no export."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ftrun import durable
from ftrun.checkpoint import export_formats, offline
from ftrun.checkpoint.tree import by_key, is_tensor, leaves, select
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftrun.checkpoint.export_formats import Written
    from ftrun.checkpoint.opened import Opened

Format = Literal["dcp", "safetensors", "torch"]

FORMATS: tuple[str, ...] = get_args(Format)
"""``dcp``: a directory for ``dcp.load`` with DCP's own reader. ``safetensors``: tensors only, in a directory.
``torch``: one file for ``torch.load(..., weights_only=True)``."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: where.
        checkpoint: name of the checkpoint.
        step: its number of finished steps.
        files: names of the files in it, its own where it is one file.
        size: bytes of all of them.
        keys: names in it.
        left_out: names of values that the format has no word for.
        changed: names of values that became something simpler, an array a tensor for instance.
    """

    path: Path
    checkpoint: str
    step: int
    files: tuple[str, ...]
    size: int
    keys: tuple[str, ...]
    left_out: tuple[str, ...]
    changed: tuple[str, ...]


def export(
    opened: Opened, path: Path, to: Format, *, what: str | None = None, force: bool = False, shard: int = 5 * 10**9
) -> Exported:
    """Write a checkpoint, or a part of it, in another format. What stands at ``path`` is whole or not there.

    Args:
        opened: the checkpoint, as one of its ranks sees it.
        path: where. A file for ``torch`` and where it ends in ``.safetensors``, a directory otherwise.
        to: the format.
        what: the part as a path of keys, ``tracked/model``; left out, what a Session tracks or all of ``dcp.save``'s.
        force: replace an earlier export.
        shard: bytes above which safetensors become several files with an index.

    Raises:
        UsageError: the path is taken, there is no such part, or the format can't hold it.
        CorruptCheckpoint: the checkpoint is damaged.
        CheckpointError: it can't be read.
        OSError: the export can't be written.
    """
    path = path.absolute()
    _check_free(path, force)
    tree = opened.tree
    chosen = offline.default_part(tree) if what is None else what
    node = select(offline.nested(tree), chosen)
    if is_tensor(node):
        node = {chosen.rstrip("/").rpartition("/")[2]: node}
    found = by_key(leaves(node))
    if not found:
        raise UsageError(f"there is nothing in {chosen or 'the checkpoint'!r} to export")
    with _becoming(path, force) as temporary:
        written = _write(opened, temporary, to, _Source(node, found), shard if path.suffix != ".safetensors" else 0)
    return _report(opened, path, written)


@dataclass(frozen=True)
class _Source:
    """What is exported: as a tree, and by its keys with dots."""

    node: object
    found: dict[str, tuple[tuple[str | int, ...], object]]


def _write(opened: Opened, path: Path, to: Format, source: _Source, shard: int) -> Written:
    if to == "torch":
        return export_formats.write_torch(opened, path, source.node, list(source.found))
    if to == "dcp":
        return export_formats.write_dcp(opened, path, source.found)
    nodes = {key: node for key, (_, node) in source.found.items()}
    return export_formats.write_safetensors(opened, path, nodes, shard)


def _report(opened: Opened, path: Path, written: Written) -> Exported:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return Exported(
        path=path,
        checkpoint=str(opened.name),
        step=opened.manifest.step,
        files=tuple(path.name if each == path else str(each.relative_to(path)) for each in files),
        size=sum(each.stat().st_size for each in files),
        keys=written.keys,
        left_out=written.left_out,
        changed=written.changed,
    )


def _check_free(path: Path, force: bool) -> None:
    if not os.path.lexists(path):
        return
    if not force:
        raise UsageError(f"{path} exists: choose another place, or replace it with --force")
    if path.is_symlink() or not _is_export(path):
        holds = "holds more than" if path.is_dir() else "is no file of"
        raise UsageError(f"{path} {holds} an export, so --force doesn't replace it: choose another place")


def _is_export(path: Path) -> bool:
    """Whether a file can be an export, or a directory has nothing in it but what an export consists of."""
    if not path.is_dir():
        return path.is_file() and (path.suffix == ".safetensors" or zipfile.is_zipfile(path))
    names = [each.name for each in path.iterdir()]
    return all(name == ".metadata" or name.endswith((".distcp", ".safetensors", ".index.json")) for name in names)


@contextlib.contextmanager
def _becoming(path: Path, force: bool) -> Iterator[Path]:
    """A name beside ``path``: what the block makes of it becomes ``path`` when it ends well, and goes when not."""
    mark = uuid.uuid4().hex[:8]
    temporary, old = (path.with_name(f".{path.name}.{mark}.{end}") for end in ("tmp", "old"))
    durable.make_dirs(path.parent)
    try:
        yield temporary
        _sync(temporary)
        if os.path.lexists(path):
            _check_free(path, force)
            path.rename(old)
        temporary.rename(path)
    except BaseException as error:
        _remove(temporary)
        if old.exists() and not path.exists():
            old.rename(path)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk doesn't say where
        raise
    durable.fsync_dir(path.parent)
    _remove(old)


def _sync(path: Path) -> None:
    """Make a file, or all of a directory, durable."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if each.is_dir():
            durable.fsync_dir(each)
        else:
            with each.open("rb") as file:
                os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
