"""Which checkpoint root, and which checkpoint in it, the words on a command line mean."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.errors import CheckpointError, FtrunError, RunDirError, UsageError
from ftrun.rundir import RUNS, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.checkpoint.reader import AttemptInfo

WHERE_HELP = "Name or directory of a run, or path or URL of a checkpoint root; the latest run if left out."
NAME_HELP = "Name of a checkpoint; the newest one that can be used if left out."


@dataclass(frozen=True)
class Place:
    """What a command is about.

    Attributes:
        root: the checkpoint root.
        name: the checkpoint that was named; None where none was.
    """

    root: Root
    name: AttemptName | None

    def info(self) -> AttemptInfo:
        """The checkpoint that was named, or the newest one that can be used.

        Raises:
            UsageError: there is none.
        """
        from ftrun.checkpoint import reader

        if self.name is None:
            for name in self.root.attempts():
                info = reader.inspect(self.root, name)
                if info.status == "committed":
                    return info
            raise UsageError(f"{self.root.url} has no checkpoint that can be used; look with `ftrun ckpt ls`")
        if self.name not in self.root.attempts():
            raise UsageError(f"{self.root.url} has no checkpoint {self.name}; `ftrun ckpt ls` lists those it has")
        return reader.inspect(self.root, self.name)


def locate(where: str, name: str, cwd: Path) -> Place:
    """The root and the checkpoint that two words mean. The first one may be left out, or name both.

    Raises:
        UsageError: there is nothing of the kind.
    """
    from ftrun.checkpoint.layout import AttemptName

    if not name:
        head, _, tail = where.rstrip("/").rpartition("/")
        if AttemptName.parse(tail) is not None:
            # The bare name, or where the checkpoint lies: ROOT/ckpt/NAME.
            where, name = head.removesuffix("ckpt").rstrip("/") or ("/" if head else ""), tail
    return Place(find_root(where, cwd), AttemptName.of(name) if name else None)


def find_root(where: str, cwd: Path) -> Root:
    """The checkpoint root that a name, a run directory, a root's own path or a URL means.

    Raises:
        UsageError: there is nothing of the kind.
    """
    from ftrun.checkpoint.layout import Root
    from ftrun.cli.status import find

    if "://" in where:
        return Root.open(where)
    path = cwd / where
    is_run = RunDir(path).resolved.is_file()
    if where and not is_run and ((path / "epochs").is_dir() or (path / "ckpt").is_dir()):
        return Root.open(path)
    try:
        run_dir = find(where, cwd)
    except RunDirError as error:
        if not where:
            raise
        raise UsageError(
            f"{where!r} is no run in {cwd / RUNS}, no run directory and no checkpoint root (no epochs/ in it): "
            f"name one of these, or a root's URL. See `ls {RUNS}`."
        ) from error
    identity = run_dir.identity()
    return Root.open(run_dir.root(identity), identity.get("storage_options") or {})


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Show what goes wrong as ftrun does, and leave."""
    from ftrun.cli.app import fail

    try:
        yield
    except FtrunError as error:
        fail(error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise  # what was typed: said as everywhere
        fail(CheckpointError(f"{error}; check the storage and its permissions"))
