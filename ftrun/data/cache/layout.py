"""The cache's directory: where each thing lies, who may use it, and which version of the layout it has.

``ROOT/uid-1000/`` holds: ``VERSION``; ``gc.lock``; ``o/ab/KEY.jpg`` objects; ``u/cd/SLOT`` pointers; ``t/KEY``
temporary files; ``p/`` a page of counters for each process; ``index/ab`` where the objects of ``o/ab`` came from.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ftrun.data.cache import filesystems, regular
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
_ROOMS = ("o", "u", "t", "p", "index")
OURS = {*_ROOMS, "gc.lock", "VERSION"}
_HOW = "choose another with data.cache in the job file, $FTRUN_CACHE or CachedFiles(root=...)"


class OtherVersion(UsageError):
    """The cache is of another layout, or nobody can say of which."""


class Layout:
    """Paths below one user's directory of a root. Strings: they are made for every file that is opened."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / f"uid-{os.geteuid()}"
        self.lock = f"{self.home}/gc.lock"
        self.temps = f"{self.home}/t"
        self.pages = f"{self.home}/p"
        self.objects = f"{self.home}/o"
        self.pointers = f"{self.home}/u"
        self._shards: dict[str, Path] = {}

    def object(self, key: str, suffix: str) -> str:
        """An object."""
        return f"{self.objects}/{key[:2]}/{key}{suffix}"

    def object_path(self, key: str, suffix: str) -> Path:
        """The same for users. To take a directory's path apart is half of what making a path costs: done once each."""
        directory = self._shards.get(key[:2])
        if directory is None:
            directory = self._shards[key[:2]] = self.home / "o" / key[:2]
        return directory / f"{key}{suffix}"

    def pointer(self, slot: str) -> str:
        """A URL's pointer."""
        return f"{self.pointers}/{slot[:2]}/{slot}"

    def temp(self, key: str) -> str:
        """What an object is before it is whole."""
        return f"{self.temps}/{key}"

    def index(self, shard: str) -> str:
        """Lines ``KEY CRC "URL"`` of the objects whose keys begin with two digits; empty ones between them."""
        return f"{self.home}/index/{shard}"

    def check(self) -> None:
        """Refuse a root that no cache may lie in. Changes nothing.

        Raises:
            UsageError: a network or FUSE filesystem, somebody else's directory, another layout, no directory.
        """
        self._check_disk()
        try:
            found = os.lstat(self.home)
        except (FileNotFoundError, PermissionError):
            return
        except NotADirectoryError as error:
            raise UsageError(f"data cache {self.root}: there is a file in the way ({error}); {_HOW}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"data cache {self.home} is no directory; remove it, or {_HOW}")
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"data cache {self.home} belongs to user {found.st_uid} and not to you ({os.geteuid()}); {_HOW}"
            )
        if found.st_mode & 0o077:
            raise UsageError(f"data cache {self.home} is open to other users; type `chmod 700 {self.home}`, or {_HOW}")
        self._check_version()

    def make(self) -> None:
        """Make what is missing.

        Raises:
            UsageError: see :meth:`check`, or we may not write there.
            OSError: the disk is full, read-only or broken.
        """
        self.check()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.home.mkdir(mode=0o700, exist_ok=True)
        except PermissionError as error:
            raise UsageError(f"data cache {self.root}: you may not write there ({error}); {_HOW}") from error
        self.check()
        for room in _ROOMS:
            regular.make_directory(f"{self.home}/{room}")
        regular.make_way(self.lock)
        # All who come at once write the same; nobody truncates what others read.
        version = os.open(self.home / "VERSION", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(version, f"{VERSION}\n".encode())
        finally:
            os.close(version)

    def _check_disk(self) -> None:
        try:
            name = filesystems.refused(filesystems.magic_of(self.root))
        except PermissionError:
            return
        if name is not None:
            raise UsageError(
                f"data cache {self.root} lies on {name}, where locks and renames can't be relied on, and which is "
                f"hardly faster than the data's own place; {_HOW}, to a directory on a local disk"
            )

    def _check_version(self) -> None:
        text = self._version()
        if not text:
            strange = sorted(set(os.listdir(self.home)) - OURS)
            if strange:
                raise UsageError(
                    f"data cache {self.home} holds {strange[0]!r}, which is not the cache's, and no VERSION; {_HOW}"
                )
        elif text != str(VERSION):
            age = "a newer" if text.isdigit() and int(text) > VERSION else "another"
            raise OtherVersion(
                f"data cache {self.home} was written by {age} version of ftrun (layout {text[:20]!r}, this one reads "
                f"{VERSION}); type `ftrun cache clear --root {self.root}` to throw it away, or {_HOW}"
            )

    def _version(self) -> str:
        try:
            return regular.read(f"{self.home}/VERSION").decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise OtherVersion(
                f"data cache {self.home}: its VERSION can't be read ({error}); type `ftrun cache clear --root "
                f"{self.root}` to throw it away, or {_HOW}"
            ) from error


def knows_no_allocation(error: OSError) -> bool:
    """Whether an error says that the filesystem can't reserve space."""
    return error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
