"""Where the data benchmarks' peers and tools come from: an environment that sees the project's own torch.

It lies beside the launchers' one, in ``$FTRUN_BENCH_CACHE`` or ``~/.cache/ftrun-bench``. The project's packages are on
its path, so that all loaders are measured with the same torch, and so that ftrun can read S3 there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from common import PROJECT, VENV, say
from peers import Absent

_PEERS = ("torchdata", "mosaicml-streaming", "litdata")
_TOOLS = ("mfusepy", "moto[server]", "s3fs")
_CONSTRAINTS = PROJECT / "scripts" / "constraints.txt"


@functools.cache
def python() -> Path | Absent:
    """An interpreter with ftrun, the peers and the tools; installed if it is not there."""
    try:
        return _environment() / "bin" / "python"
    except (OSError, subprocess.SubprocessError) as error:
        told = (str(getattr(error, "stderr", "") or error).strip().splitlines() or [type(error).__name__])[-1]
        return Absent("the data peers", f"not installed: {told}")


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


def _environment() -> Path:
    cache = Path(os.environ.get("FTRUN_BENCH_CACHE") or Path.home() / ".cache" / "ftrun-bench")
    site = sysconfig.get_path("purelib")
    key = f"{_CONSTRAINTS.read_text()} {_PEERS} {_TOOLS} {site} {sys.version}"
    venv = cache / f"data-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
    if (venv / "complete").exists():
        return venv
    say(f"installing the data peers into {venv} (a few minutes, once)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, timeout=300)
    Path(sysconfig.get_path("purelib", vars=_in(venv)), "project.pth").write_text(
        f"import site; site.addsitedir({site!r})\n"
    )
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "--constraint", _CONSTRAINTS, *_PEERS, *_TOOLS]
    subprocess.run(install, check=True, timeout=1800, capture_output=True, text=True)
    (venv / "complete").touch()
    return venv


def _in(venv: Path) -> dict[str, str]:
    return {"base": str(venv), "platbase": str(venv)}
