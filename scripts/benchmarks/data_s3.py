"""The S3 server of the data benchmarks: moto's, which counts what goes out of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import data_peers
from common import JOBS
from peers import Absent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START = 30.0


@dataclass(frozen=True)
class Bucket:
    """A bucket with files in it.

    Attributes:
        options: for the driver.
        urls: of the files.
        counts: where the server writes the bytes that went out, by path.
    """

    options: dict[str, Any]
    urls: list[str]
    counts: Path

    def sent(self) -> int:
        """Bytes of objects that went out."""
        return sum(json.loads(self.counts.read_text()).values()) if self.counts.exists() else 0


@contextlib.contextmanager
def served(folder: Path, files: list[Path]) -> Iterator[Bucket | Absent]:
    """An S3 server with these files for the length of a ``with`` block; or why there is none."""
    python = data_peers.python()
    if isinstance(python, Absent):
        yield Absent("S3", python.why)
        return
    port, counts = folder / "port", folder / "counts.json"
    with (folder / "output.txt").open("wb") as output:
        server = subprocess.Popen([python, JOBS / "data_s3_server.py", port, counts], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START
        while not port.exists() and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if port.exists():
            yield _filled(
                python, Bucket(_options(port.read_text()), [f"s3://bench/{each.name}" for each in files], counts), files
            )
        else:
            yield Absent("S3", "moto's server did not start")
    finally:
        server.kill()
        server.wait(10)


def _options(port: str) -> dict[str, Any]:
    return {"key": "x", "secret": "y", "endpoint_url": f"http://127.0.0.1:{port}"}


_FILL = """
import fsspec, json, sys
options, files = json.loads(sys.argv[1]), sys.argv[2:]
remote = fsspec.filesystem("s3", **options)
remote.mkdir("bench")
remote.put(files, "bench/")
"""


def _filled(python: Path, bucket: Bucket, files: list[Path]) -> Bucket | Absent:
    command = [python, "-c", _FILL, json.dumps(bucket.options), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return Absent("S3", (done.stderr.strip().splitlines() or ["no word"])[-1])
    return bucket
