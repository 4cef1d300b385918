"""Where the cache lies and how much it may take, where the script doesn't say: read from the environment, once."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.contract import WorkerContract
from ftrun.data.cache import filesystems
from ftrun.errors import UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(i?)B?", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,2}(?:\.[0-9]+)?) ?%", re.ASCII)
RESERVE = "10%"
_TEMPORARY = ("/var/tmp", "/tmp")  # noqa: S108 - in an own directory there; the first outlives the machine's restart


@dataclass(frozen=True)
class Settings:
    """The cache that a process uses unless told otherwise.

    Attributes:
        root: its directory.
        limit: bytes that it may take; None for no limit but free space.
        reserve: free space that it leaves: ``10%`` or a number of bytes.
        since: what was learned of remote files before this time is asked again: when the run began.
    """

    root: Path
    limit: int | None
    reserve: str
    since: float


def read(environment: Mapping[str, str], root: str | Path | None = None) -> Settings:
    """The settings of the launcher, of ``$FTRUN_CACHE``, or the default ones.

    Args:
        environment: of the process.
        root: that was named otherwise; then no other is looked for.

    Raises:
        UsageError: the launcher's variable can't be read.
    """
    contract = WorkerContract.from_environment(environment)
    named = root or (contract.cache if contract else "") or environment.get("FTRUN_CACHE", "")
    root = Path(named) if named else _default(environment)
    if contract is None:
        return Settings(root.absolute(), None, RESERVE, time.time())
    return Settings(root.absolute(), contract.cache_limit, contract.cache_reserve, began(contract.run_path))


def began(run: Path) -> float:
    """When a run first started: the same for all its ranks and attempts; now, where there is no run."""
    try:
        return RunDir(run).resolved.stat().st_mtime
    except OSError:
        return time.time()


def _default(environment: Mapping[str, str]) -> Path:
    """Where nobody names a place: the user's own cache directory if it is good for it, else one for temporary files."""
    home = environment.get("XDG_CACHE_HOME", "")
    usual = (Path(home) if home.startswith("/") else Path(os.path.expanduser("~")) / ".cache") / "ftrun" / "data"
    why_not = _why_not(usual)
    if not why_not:
        return usual
    other = for_a_while(environment)
    if other is None:
        return usual  # whoever uses it says what is wrong with it
    if environment.get("LOCAL_RANK", "0") == "0":
        _say(f"the data cache is in {other}, as {usual} {why_not}; data.cache in the job file or $FTRUN_CACHE moves it")
    return other


def _why_not(path: Path) -> str:
    """Why no cache may lie there; empty where one may."""
    try:
        name = filesystems.refused(filesystems.magic_of(path))
    except OSError as error:
        return f"can't be looked at ({error.strerror})"
    if name is not None:
        return f"lies on {name}"
    there = next(each for each in (path, *path.parents) if os.path.exists(each))  # False, too, where one may not look
    return "" if os.access(there, os.W_OK | os.X_OK) else "can't be written to"


def for_a_while(environment: Mapping[str, str], others: Sequence[str] = _TEMPORARY) -> Path | None:
    """A directory of this user's own on a local disk, which the system may clear one day; None where there is none."""
    for place in filter(None, (environment.get("TMPDIR"), *others)):
        path = Path(place) / f"ftrun-cache-{os.geteuid()}"
        if not os.path.isabs(place) or _why_not(path):
            continue
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            found = path.lstat()
            # Anybody may have made that: what is trusted with data must be nobody else's, and no link to elsewhere.
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
                return path
    return None


@functools.cache
def _say(what: str) -> None:
    """Once in a process."""
    _log.warning("ftrun: %s", what)


def size_in_bytes(value: int | str | None, name: str = "limit") -> int | None:
    """A size as people write it: ``200GB`` (powers of 1000), ``1.5TiB`` (of 1024), or bytes.

    Raises:
        UsageError: it is no size, or not more than nothing.
    """
    if value is None:
        return None
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** "BKMGTP".index(unit.upper() or "B"))
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        size = -1
    if size < 0:
        raise UsageError(f"{name} of the data cache: {value!r} is no size; write 200GB, 1.5TiB or a number of bytes")
    return size


def reserve_of(value: int | str, total: int) -> int:
    """Bytes to leave free on a disk of ``total`` bytes: a share such as ``10%``, or a size.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(value, str) and (found := _SHARE.fullmatch(value.strip())):
        return int(total * float(found[1]) / 100)
    size = size_in_bytes(value, "reserve_free")
    assert size is not None
    return size
