"""The parts from which commits are made: files that are whole or absent, epochs, marks, pins."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NoReturn

from ftrun import durable
from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.layout import AttemptName, Root
from power_loss.lives import killed_at_each_operation
from power_loss.perform import mark

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = b"old" * 400, b"new" * 500
ATTEMPT = AttemptName(1, 5, "0123abcd")


def write(directory: Path) -> None:
    file = directory / "root" / "file"
    file.parent.mkdir()
    durable.write(file, OLD)
    mark(directory, "start")
    durable.write(file, NEW)
    mark(directory, "returned")


def create(directory: Path) -> None:
    mark(directory, "start")
    durable.make_dirs(directory / "root" / "deep" / "deeper")
    durable.create(directory / "root" / "deep" / "deeper" / "file", NEW)
    mark(directory, "returned")


def creating(directory: Path) -> None:
    mark(directory, "start")
    Root.open(directory / "root").put("deep/deeper/file", lambda: iter([memoryview(NEW)]), len(NEW))
    mark(directory, "returned")


def create_without_links(directory: Path) -> None:
    """On a filesystem that has no hard links, as FUSE ones often haven't."""

    def link(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    kept, os.link = os.link, link
    try:
        create(directory)
    finally:
        os.link = kept


def claims(directory: Path) -> None:
    root = Root.open(directory / "root")
    mark(directory, "start")
    for number in (1, 2, 3):
        assert epochs.claim(root, "run", fresh=number == 2, parent=None).epoch == number
        mark(directory, f"claimed-{number}")


def marked_bad(directory: Path) -> None:
    root = Root.open(directory / "root")
    root.make_attempt(ATTEMPT)
    mark(directory, "start")
    reader.mark_bad(root, ATTEMPT, "bytes differ")
    mark(directory, "returned")


def pinned(directory: Path) -> None:
    root = Root.open(directory / "root")
    mark(directory, "start")
    root.pin(ATTEMPT, "for the paper")
    mark(directory, "pinned")
    root.pin(ATTEMPT, "again")
    mark(directory, "again")


def after_a_kill(directory: Path) -> None:
    """Somebody who made the directories, or the file, was killed before it had synced them."""
    killed_at_each_operation(directory, lambda _: None, _make, _make_and_tell)


def _make(directory: Path) -> None:
    Root.open(directory / "root").create("deep/deeper/file", NEW)


def _make_and_tell(directory: Path) -> None:
    root = Root.open(directory / "root")
    try:
        root.create("deep/deeper/file", NEW)
    except FileExistsError:
        mark(directory, "exists")
    else:
        mark(directory, "returned")
    root.create("deep/deeper/another", NEW)
    mark(directory, "another")


def claims_after_a_kill(directory: Path) -> None:
    killed_at_each_operation(directory, lambda _: None, _claim, _claim_and_tell)


def _claim(directory: Path) -> None:
    epochs.claim(Root.open(directory / "root"), "run", fresh=False, parent=None)


def _claim_and_tell(directory: Path) -> None:
    epoch = epochs.claim(Root.open(directory / "root"), "run", fresh=False, parent=None).epoch
    mark(directory, f"claimed-{epoch}")
