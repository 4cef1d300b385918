"""Which way each stream of each rank goes, decided before anything is opened. No effects."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.multiprocessing import LogsDest

OUT, ERR = "stdout", "stderr"


@dataclass(frozen=True)
class Tee:
    """How torch's own ``--tee`` shows lines.

    Attributes:
        name: role, for the prefix where none is given.
        prefixes: what is put before each line, by local rank; None for ``[role0]:``.
        stdout_filters: lines of standard output that hold any of these go to a file of their own as well.
        stderr_filters: likewise for standard error.
    """

    name: str = "default"
    prefixes: Mapping[int, str] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()

    def prefix(self, local_rank: int) -> str:
        """What precedes each line of a rank."""
        given = (self.prefixes or {}).get(local_rank)
        return given if given is not None else f"[{self.name}{local_rank}]:"


@dataclass(frozen=True)
class Launcher:
    """What the launcher's own streams are.

    Attributes:
        out_terminal: standard output is a terminal.
        err_terminal: standard error is one.
        one: both are the same terminal, pipe or file, so that the order between them can be seen.
    """

    out_terminal: bool = False
    err_terminal: bool = False
    one: bool = False


@dataclass(frozen=True)
class Route:
    """Where one stream of a worker comes from and goes to.

    Attributes:
        streams: the worker's streams that are written into it: one of them, or both.
        file: the log file.
        links: further names of that file.
        outlet: the launcher's stream that shows it; None where it isn't shown.
        terminal: the worker finds a terminal there.
        prefix: precedes each line that is shown; None to show bytes as they come.
        filtered: a file for the lines that hold any of ``filters``; empty for none.
        filters: see there.
    """

    streams: tuple[str, ...]
    file: Path
    links: tuple[Path, ...] = ()
    outlet: str | None = None
    terminal: bool = False
    prefix: str | None = None
    filtered: str = ""
    filters: tuple[str, ...] = field(default=())


def filtered(destination: LogsDest, stream: str) -> str:
    """Torch's file for filtered lines; it has none before 2.10."""
    return str(getattr(destination, f"filtered_{stream}", ""))


def settle(
    destination: LogsDest, directories: Mapping[int, Path], tee: Tee, launcher: Launcher
) -> dict[int, tuple[Route, ...]]:
    """The routes of each local rank.

    A stream whose file lies in the rank's own directory is ftrun's: shown as it comes, if it is shown. Any other file
    was asked for with torchrun's options: the run directory gets a further name of it, and what is shown has prefixes.

    Args:
        destination: files, and what is shown, from :meth:`RunLogs.reify`.
        directories: the own directory of each local rank.
        tee: how torch shows lines.
        launcher: what the launcher's own streams are.
    """
    return {rank: _of_rank(rank, destination, directory, tee, launcher) for rank, directory in directories.items()}


def _of_rank(rank: int, destination: LogsDest, directory: Path, tee: Tee, launcher: Launcher) -> tuple[Route, ...]:
    out = _route(
        OUT,
        directory / f"{OUT}.log",
        (destination.stdouts.get(rank, ""), destination.tee_stdouts.get(rank, "")),
        (tee.prefix(rank), filtered(destination, OUT), tee.stdout_filters),
        launcher.out_terminal,
    )
    err = _route(
        ERR,
        directory / f"{ERR}.log",
        (destination.stderrs.get(rank, ""), destination.tee_stderrs.get(rank, "")),
        (tee.prefix(rank), filtered(destination, ERR), tee.stderr_filters),
        launcher.err_terminal,
    )
    as_they_come = all(each.outlet and each.prefix is None for each in (out, err))
    if launcher.one and as_they_come:
        return (Route((OUT, ERR), out.file, links=(err.file,), outlet=OUT, terminal=out.terminal),)
    return out, err


def _route(
    stream: str, own: Path, files: tuple[str, str], tee: tuple[str, str, tuple[str, ...]], terminal: bool
) -> Route:
    file, shown_file = files
    shown = bool(file) and shown_file == file
    if file in ("", os.devnull) or Path(file) == own:
        outlet = stream if shown and file != os.devnull else None
        return Route((stream,), own, outlet=outlet, terminal=terminal and outlet is not None)
    if not shown:
        return Route((stream,), Path(file), links=(own,))
    prefix, filtered, filters = tee
    return Route(
        (stream,), Path(file), (own,), stream, prefix=prefix, filtered=filtered if filters else "", filters=filters
    )
