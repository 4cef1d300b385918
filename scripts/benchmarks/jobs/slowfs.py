"""``slow://``: an object store in a directory, behind a link that all processes of the machine share.

``SLOWFS_DIR`` says where it keeps its files and ``SLOWFS_RATE`` how many bytes a second the link carries. Like an
object store it shows a file when it is whole. It reads at full speed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fsspec.spec import AbstractFileSystem

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 20


class Link:
    """Lets so many bytes a second through, whoever sends them.

    Args:
        rate: bytes a second.
        state: a file that all senders share: when the link is free again.
    """

    def __init__(self, rate: float, state: Path) -> None:
        self._rate, self._state = rate, state

    def carry(self, size: int) -> None:
        """Wait until so many bytes are through."""
        with self._shared() as file:
            free_at = struct.unpack("d", file.read(8) or bytes(8))[0]
            now = time.monotonic()  # the same clock in all processes of a machine
            through = max(now, free_at) + size / self._rate
            file.seek(0)
            file.write(struct.pack("d", through))
        time.sleep(through - now)

    @contextlib.contextmanager
    def _shared(self) -> Iterator[Any]:
        with os.fdopen(os.open(self._state, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


class SlowFile:
    """A file that is being sent."""

    def __init__(self, path: Path, link: Link, *, exclusive: bool) -> None:
        self._path, self._link = path, link
        if exclusive and path.exists():
            raise FileExistsError(path)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.{id(self)}")
        self._file = self._temporary.open("wb", buffering=0)
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._link.carry(len(piece))
            self._file.write(piece)
        return len(view)

    def flush(self) -> None: ...

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._file.close()
            self._temporary.replace(self._path)

    def discard(self) -> None:
        self.closed = True
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.discard()


class SlowFileSystem(AbstractFileSystem):
    """See the module. Paths are relative to its directory."""

    protocol = "slow"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._top = Path(os.environ["SLOWFS_DIR"])
        self._link = Link(float(os.environ["SLOWFS_RATE"]), self._top / ".link")

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        place = self._place(path)
        if mode == "rb":
            return place.open("rb")
        return SlowFile(place, self._link, exclusive=mode == "xb")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        place = self._place(path)
        status = place.stat()
        kind = "directory" if place.is_dir() else "file"
        return {"name": self._strip_protocol(path), "size": status.st_size, "type": kind}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        place = self._place(path)
        if place.is_file():
            return [self.info(path) if detail else path]
        names = [f"{path}/{each.name}" for each in sorted(place.iterdir()) if not each.name.startswith(".")]
        return [self.info(name) for name in names] if detail else names

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        self._place(path).mkdir(parents=create_parents)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._place(path).mkdir(parents=True, exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        self._place(path).rmdir()

    def rm_file(self, path: str) -> None:
        self._place(path).unlink()

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in [path] if isinstance(path, str) else path:
            place = self._place(each)
            shutil.rmtree(place) if recursive and place.is_dir() else place.unlink()

    def _place(self, path: str) -> Path:
        return self._top / self._strip_protocol(path).strip("/")


def install(folder: Path) -> dict[str, str]:
    """Make the driver known to all processes that get these variables.

    Args:
        folder: a new directory for the files, and for what announces the driver.

    Returns:
        Environment variables, but for the rate.
    """
    plugin, store = folder / "plugin", folder / "store"
    announced = plugin / "slowfs-1.0.dist-info"
    for each in (announced, store):
        each.mkdir(parents=True)
    shutil.copy(__file__, plugin / "slowfs.py")
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: slowfs\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text("[fsspec.specs]\nslow = slowfs:SlowFileSystem\n")
    return {"PYTHONPATH": str(plugin), "SLOWFS_DIR": str(store)}
