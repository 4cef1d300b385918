"""What the cache's tests share: a remote with scripted faults, behind a real fsspec driver."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from ftrun.data.cache.files import CachedFiles
from ftrun.data.cache.records import Patience

QUICK = Patience(timeout=60.0, attempts=3, first=0.01, longest=0.02, stopped=60.0, lock=60.0)
"""A remote that answers is asked once, and by one, on any machine: it pauses for a moment only, and waits for as long
as a machine may stand still. Whoever tests what hangs, is stopped or holds a lock gives that less."""


class KitFS(AbstractFileSystem):
    """``kit:///some/path`` is that file; every request is written down, and may go wrong as ``faults.json`` says.

    ``faults.json`` beside the file: ``{"latency": s, "fail": n, "hang": true, "emfile": n, "truncate": bytes,
    "no_size": true, "after_read": text}``; ``fail`` and ``emfile`` count down over the requests for bytes.
    """

    protocol = "kit"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("kit://")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        faults = self._asked("info", path)
        found = os.stat(path)
        size = None if faults.get("no_size") else found.st_size
        return {"name": path, "size": size, "type": "file", "mtime": found.st_mtime_ns}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._asked("ls", f"{path}/x")
        rows = []
        for entry in os.scandir(path):
            if not entry.name.startswith(("faults", "requests", "used")):
                found = entry.stat()
                rows.append({"name": entry.path, "size": found.st_size, "type": "file", "mtime": found.st_mtime_ns})
        return rows

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        faults = self._asked("read", path)
        self._fail(faults, Path(path))
        data = Path(path).read_bytes()[start:end]
        if "after_read" in faults and Path(path).read_bytes() != faults["after_read"].encode():
            Path(path).write_text(faults["after_read"])
        return data[: faults["truncate"]] if "truncate" in faults else data

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self._fail(self._asked("read", path), Path(path))
        return open(path, mode)

    def _asked(self, what: str, path: str) -> dict[str, Any]:
        place = Path(path).parent
        with (place / "requests.log").open("a") as log:
            log.write(f"{what} {Path(path).name}\n")
        faults = self._faults(place)
        time.sleep(faults.get("latency", 0))
        while faults.get("hang") == what:
            time.sleep(0.02)
            faults = self._faults(place)
        return faults

    def _faults(self, place: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((place / "faults.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def _fail(self, faults: dict[str, Any], path: Path) -> None:
        for name, error in (
            ("fail", OSError(5, "the remote is unwell")),
            ("emfile", OSError(24, "Too many open files")),
        ):
            used = path.with_name(f"used-{name}.txt")
            count = len(used.read_text()) if used.exists() else 0
            if count < faults.get(name, 0):
                with used.open("a") as file:
                    file.write("x")
                raise error


fsspec.register_implementation("kit", KitFS, clobber=True)


class Place:
    """A remote directory, and a cache."""

    def __init__(self, path: Path) -> None:
        self.remote = path / "remote"
        self.root = path / "cache"
        self.remote.mkdir()

    def put(self, name: str, data: bytes) -> str:
        """Make a remote file; returns its URL."""
        (self.remote / name).write_bytes(data)
        return f"kit://{self.remote / name}"

    def faults(self, **faults: Any) -> None:
        # At once: requests that are under way read it.
        (self.remote / "faults.new").write_text(json.dumps(faults))
        (self.remote / "faults.new").replace(self.remote / "faults.json")

    def well(self) -> None:
        (self.remote / "faults.json").unlink()

    def requests(self, what: str = "read") -> list[str]:
        """Names of the files that were asked for."""
        log = self.remote / "requests.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(what + " ")]

    def files(self, **arguments: Any) -> CachedFiles:
        return CachedFiles(self.root, **{"reserve_free": 0, "patience": QUICK, **arguments})

    @property
    def home(self) -> Path:
        return self.root / f"uid-{os.geteuid()}"

    def debris(self) -> list[str]:
        """Temporary files."""
        return sorted(os.listdir(self.home / "t"))

    def size(self) -> int:
        """Bytes of objects and temporary files, as they lie there while nobody may change names."""
        with (self.home / "gc.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            return self._size()

    def _size(self) -> int:
        total = 0
        for room in ("o", "t"):
            for directory, _, names in os.walk(self.home / room):
                for name in names:
                    try:
                        total += os.lstat(os.path.join(directory, name)).st_size
                    except FileNotFoundError:
                        continue
        return total

    def sum(self) -> int:
        """The sum that the cache keeps."""
        import struct

        return int(struct.unpack("=8sqq", (self.home / "gc.lock").read_bytes()[:24])[1])


def content(seed: int, size: int) -> bytes:
    """Bytes that say which file they are: torn or mixed ones differ."""
    return (f"{seed:08d}".encode() * (size // 8 + 1))[:size]


def read(files: CachedFiles, url: str) -> bytes:
    with files.open(url) as path:
        return path.read_bytes()
