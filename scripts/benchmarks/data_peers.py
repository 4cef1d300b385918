"""Where the data benchmarks' peers and tools come from: an environment that sees the project's own torch.

It lies beside the launchers' one, in ``$FTRUN_BENCH_CACHE`` or ``~/.cache/ftrun-bench``. The project's packages are on
its path, so that all loaders are measured with the same torch, and so that ftrun can read S3 there.
"""

from __future__ import annotations

import functools
import subprocess
from typing import TYPE_CHECKING

from common import VENV
from peers import Absent, environment, last_line

if TYPE_CHECKING:
    from pathlib import Path

_PEERS = ("torchdata", "mosaicml-streaming", "litdata")
_TOOLS = ("mfusepy", "moto[server]", "s3fs")


@functools.cache
def python() -> Path | Absent:
    """An interpreter with ftrun, the peers and the tools; installed if it is not there."""
    try:
        return environment("data", _PEERS, _TOOLS, sees_project=True) / "bin" / "python"
    except (OSError, subprocess.SubprocessError) as error:
        return Absent("the data peers", f"not installed: {last_line(error)}")


def ours() -> Path:
    """The project's interpreter."""
    return VENV / "python"


def version(package: str) -> str:
    """Which release of a peer is measured."""
    found = python()
    if isinstance(found, Absent):
        return found.why
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([found, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
