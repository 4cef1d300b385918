"""Readers of a small cache that are killed with -9 again and again, and what is left of it all.

Everything is forked from here, so that a life takes no time to begin.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_notes import Notes

from ftrun.data.cache.files import CachedFiles
from ftrun.data.cache.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

_FILES, _STEP, _READERS = 60, 700, 4
_LIMIT = 400_000  # bytes: a third of all files, so that they come and go
_HANG = 20.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", required=True)
    options = parser.parse_args()
    notes = Notes(options.out)
    dice = random.Random(options.seed)
    remote, root = options.out / "remote", options.out / "cache"
    remote.mkdir()
    for number in range(_FILES):
        (remote / f"{number}.bin").write_bytes(_content(number))
    storm = Storm(options.out / "log", lambda seed: _read_for_ever(remote, root, seed), dice)
    began = time.monotonic()
    kills, hangs, reads, corrupt = storm.run(options.kills)
    notes.put("seconds", 0, time.monotonic() - began)
    for name, value in {"kills": kills, "hangs": hangs, "reads": reads, "corrupt": corrupt}.items():
        notes.put(name, 0, value)
    notes.put("debris", 0, _bytes_in(root))
    for name, value in _next_start(remote, root).items():
        notes.put(name, 0, value)
    notes.put("simplecache torn", 0, _torn(options.out / "simplecache", dice, min(options.kills, 20)))


class Storm:
    """Some readers, of which one is killed again and again.

    Args:
        log: where readers write a character for each file they have read: ``.``, or ``X`` for one that is torn.
        reader: what one does; never returns.
        dice: who is killed, and when.
    """

    def __init__(self, log: Path, reader: Callable[[str], None], dice: random.Random) -> None:
        self._log, self._reader, self._dice = log, reader, dice
        self._alive: list[int] = []
        self._started = 0

    def run(self, kills: int) -> tuple[int, int, int, int]:
        """Kill so many; returns kills, hangs, files read, and how many of them were torn."""
        done = hangs = 0
        self._log.touch()
        self._start_all()
        while done < kills:
            seen = self._log.stat().st_size
            if not self._progress(seen + _READERS):
                hangs += 1
                self._end_all()
                self._start_all()
            time.sleep(self._dice.uniform(0.0, 0.05))
            self._kill(self._dice.randrange(_READERS))
            self._start()
            done += 1
        self._end_all()
        read = self._log.read_text()
        return done, hangs, len(read), read.count("X") + read.count("E")

    def _progress(self, size: int) -> bool:
        deadline = time.monotonic() + _HANG
        while time.monotonic() < deadline:
            if self._log.stat().st_size >= size:
                return True
            time.sleep(0.005)
        return False

    def _start(self) -> None:
        self._started += 1
        self._alive.append(_forked(lambda: self._reader(f"{self._started}")))

    def _start_all(self) -> None:
        for _ in range(_READERS):
            self._start()

    def _kill(self, which: int) -> None:
        _end(self._alive.pop(which))

    def _end_all(self) -> None:
        while self._alive:
            self._kill(0)


def _forked(action: Callable[[], Any]) -> int:
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(1)
    return child


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _read_for_ever(remote: Path, root: Path, seed: str) -> None:
    files = CachedFiles(root, limit=_LIMIT, reserve_free=0)
    dice = random.Random(seed)
    log = os.open(root.with_name("log"), os.O_WRONLY | os.O_APPEND)
    while True:
        number = dice.randrange(_FILES)
        try:
            with files.open(str(remote / f"{number}.bin")) as path:
                whole = path.read_bytes() == _content(number)
            os.write(log, b"." if whole else b"X")
        except Exception as error:  # counted with the torn ones, and said
            print(repr(error), flush=True)
            os.write(log, b"E")
        if dice.random() < 0.05:
            files.make_room(dice.randrange(50_000), lambda objects: [dice.random() for _ in objects])


def _next_start(remote: Path, root: Path) -> dict[str, float]:
    """What the next process finds, once it has begun: bytes of debris, and objects that aren't whole."""
    files = CachedFiles(root, limit=_LIMIT, reserve_free=0)
    files.sweep()
    torn = 0
    for number in range(_FILES):
        with files.open(str(remote / f"{number}.bin")) as path:
            torn += path.read_bytes() != _content(number)
    left = _bytes_in(root)
    files.make_room(1 << 62)  # everything goes that nobody holds
    home = Layout(root)
    return {"left": left, "torn after": torn, "held": _size(Path(home.objects))}


def _bytes_in(root: Path) -> int:
    return _size(Path(Layout(root).temps))


def _size(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def _content(number: int) -> bytes:
    size = 2000 + _STEP * number
    return (f"{number:08d}".encode() * (size // 8 + 1))[:size]


def _torn(folder: Path, dice: random.Random, kills: int) -> int:
    """With fsspec's simplecache: after how many of so many kills it gives its readers a torn file."""
    import fsspec

    remote = folder / "remote"
    remote.mkdir(parents=True)
    names = [f"{number}.bin" for number in range(8)]
    content = dice.randbytes(8 << 20)
    for name in names:
        (remote / name).write_bytes(content)

    def get(cache: Path, name: str) -> str:
        return str(fsspec.open_local(f"simplecache::file://{remote / name}", simplecache={"cache_storage": str(cache)}))

    torn = 0
    for kill in range(kills):
        cache = folder / f"cache-{kill}"
        child = _forked(lambda cache=cache: [get(cache, name) for name in names])  # type: ignore[misc]
        deadline = time.monotonic() + 5.0
        while not (cache.exists() and any(cache.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(dice.uniform(0.0, 0.03))
        _end(child)
        torn += any(Path(get(cache, name)).read_bytes() != content for name in names)
    return torn


if __name__ == "__main__":
    main()
