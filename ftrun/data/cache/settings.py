"""Where the cache lies and how much it may take, where the script doesn't say: read from the environment, once."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.contract import WorkerContract
from ftrun.errors import UsageError
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(i?)B?", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,2}(?:\.[0-9]+)?) ?%", re.ASCII)
RESERVE = "10%"


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


def read(environment: Mapping[str, str]) -> Settings:
    """The settings of the launcher, of ``$FTRUN_CACHE``, or the default ones.

    Raises:
        UsageError: the launcher's variable can't be read.
    """
    contract = WorkerContract.from_environment(environment)
    named = (contract.cache if contract else "") or environment.get("FTRUN_CACHE", "")
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
    home = environment.get("XDG_CACHE_HOME", "")
    return (Path(home) if home.startswith("/") else Path.home() / ".cache") / "ftrun" / "data"


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
