"""Reads random files of a remote through a small cache for ever, and says so when one is not what it should be."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from cache_kit import QUICK, content

from ftrun.data.cache.files import CachedFiles

warnings.simplefilter("ignore")


def main(remote: str, root: str, limit: str, seed: str, count: str) -> None:
    files = CachedFiles(root, limit=int(limit), reserve_free=0, patience=QUICK)
    threads = [
        threading.Thread(target=reader, args=(files, remote, f"{seed}-{number}", int(count))) for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    chosen = random.Random(seed)
    while any(thread.is_alive() for thread in threads):
        files.make_room(chosen.randrange(50_000), lambda objects: [chosen.random() for _ in objects])
        threads[0].join(0.05)


def reader(files: CachedFiles, remote: str, seed: str, count: int) -> None:
    chosen = random.Random(seed)
    for done in range(10**9):
        number = chosen.randrange(count)
        with files.open(f"{remote}/{number}.bin") as path:
            data = path.read_bytes()
            whole = data == content(number, 2000 + 700 * number)
            whole = whole and path.read_bytes() == data
        if not whole or done % 20 == 0:
            os.write(1, b"ok\n" if whole else b"TORN %d\n" % number)  # at once, whatever the other thread writes


if __name__ == "__main__":
    main(*sys.argv[1:])
