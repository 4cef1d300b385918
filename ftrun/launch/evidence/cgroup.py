"""The memory controller of this process's control group, v1 and v2: kills for want of memory, and how full it is.

The kernel counts a kill in the group of the process that it killed. Workers live in the group of their agent unless
something moves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# v1 says "no limit" with the largest multiple of a page that fits.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryUse:
    """One reading. None where the kernel doesn't say.

    Attributes:
        oom_kills: processes killed for memory since the group was made, those of groups below it included under v2.
        used: bytes.
        limit: bytes; None also for no limit.
        at_limit: how often the group hit its limit: a hint, it may have found memory to free.
    """

    oom_kills: int | None = None
    used: int | None = None
    limit: int | None = None
    at_limit: int | None = None


@dataclass(frozen=True)
class MemoryGroup:
    """Where the files of one control group are."""

    directory: Path
    version: int

    def read(self) -> MemoryUse:
        """Read it now."""
        if self.version == 1:
            return MemoryUse(
                _field(self.directory / "memory.oom_control", "oom_kill"),
                _number(self.directory / "memory.usage_in_bytes"),
                _number(self.directory / "memory.limit_in_bytes"),
                _number(self.directory / "memory.failcnt"),
            )
        events = self.directory / "memory.events"
        return MemoryUse(
            _field(events, "oom_kill"),
            _number(self.directory / "memory.current"),
            _number(self.directory / "memory.max"),
            _field(events, "max"),
        )


def find(
    membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> MemoryGroup | None:
    """The group whose memory controller accounts for this process; None where there is none to be seen.

    Args:
        membership: a file like ``/proc/self/cgroup``.
        mounts: a file like ``/proc/self/mountinfo``.
    """
    paths = _paths(membership)
    version = 1 if "memory" in paths else 2
    path = paths.get("memory" if version == 1 else "")
    if path is None:
        return None
    for mount in _lines(mounts):
        directory = _directory(mount, path, version)
        if directory is not None:
            return MemoryGroup(directory, version)
    return None


def _paths(membership: Path) -> dict[str, str]:
    """Paths by controller; under ``""`` the one in the unified hierarchy."""
    found = {}
    for line in _lines(membership):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _directory(mount: str, path: str, version: int) -> Path | None:
    """Where a line of ``mountinfo`` puts the group, if it mounts the right hierarchy and the group is in it."""
    left, _, right = mount.partition(" - ")
    fields, kind = left.split(), right.split()
    if len(fields) < 5 or len(kind) < 3 or kind[0] != ("cgroup" if version == 1 else "cgroup2"):
        return None
    if version == 1 and "memory" not in kind[2].split(","):
        return None
    root, point = PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4]))
    # In a container the mount may show a part of the hierarchy only, of which the path may or may not know.
    mine = PurePosixPath(path)
    inside = mine.relative_to(root) if mine.is_relative_to(root) else PurePosixPath()
    # Under v2 a group without the controller is accounted for by the nearest one above that has it.
    above = (point / each for each in (inside, *inside.parents))
    return next((each for each in above if _accounts(each)), None)


def _accounts(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("memory.events", "memory.oom_control"))


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _field(path: Path, name: str) -> int | None:
    words = (line.split() for line in _lines(path))
    return next((int(each[1]) for each in words if len(each) == 2 and each[0] == name and each[1].isdecimal()), None)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None
