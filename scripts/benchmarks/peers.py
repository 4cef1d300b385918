"""The launchers that are measured: how each is called, and where the peers come from.

Peers live in a virtual environment of their own, outside the project: ``$FTRUN_BENCH_CACHE``, or
``~/.cache/ftrun-bench``. It has the same torch as the project, from the same constraints.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common import JOBS, PROJECT, VENV, say

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGES = ("numpy", "nvidia-resiliency-ext", "dlrover[k8s]", "protobuf", "torchsnapshot")
_NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MANY = ("--max-restarts", "100")


@dataclass(frozen=True)
class Launcher:
    """One way to start a training script.

    Attributes:
        name: for people.
        command: what stands before the number of processes and the script.
        session: whether its script is the one with a Session.
        environment: what it needs in its environment.
        version: which release was measured.
    """

    name: str
    command: tuple[str, ...]
    session: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    def run(self, ranks: int, script: str, *arguments: str) -> list[str]:
        """The command line for a script of ``jobs/``."""
        return [*self.command, "--nproc-per-node", str(ranks), str(JOBS / script), *arguments]

    @property
    def training(self) -> str:
        """The training that all launchers are measured with, as this one's users would write it."""
        return "with_session.py" if self.session else "with_torch_save.py"


@dataclass(frozen=True)
class Absent:
    """A peer that can't be measured here, and why."""

    name: str
    why: str


def ftrun(*options: str) -> Launcher:
    """ftrun, from the project's environment."""
    return Launcher("ftrun", (str(VENV / "ftrun"), *options), session=True)


def torchrun(*options: str, shared_store: bool = False) -> Launcher:
    """The installed torch's launcher.

    Args:
        options: more options.
        shared_store: leave its default alone, with which workers can meet the addresses of dead ones in the store.
    """
    environment = {} if shared_store else _NO_SHARED_STORE
    return Launcher("torchrun", (str(VENV / "torchrun"), *options), environment=environment)


def others(*options: str) -> list[Launcher | Absent]:
    """NVRx's and dlrover's launchers, installed if they are not."""
    try:
        bin_ = environment("peers", _PACKAGES) / "bin"
    except (OSError, subprocess.SubprocessError) as error:
        return [Absent(name, f"not installed: {last_line(error)}") for name in ("ft_launcher", "dlrover-run")]
    return [_ft_launcher(bin_, options), _dlrover(bin_, options)]


def checkpointers() -> Launcher | Absent:
    """The torchrun beside which the peers that save checkpoints are installed."""
    try:
        bin_ = environment("peers", _PACKAGES) / "bin"
    except (OSError, subprocess.SubprocessError) as error:
        return Absent("torchrun", f"not installed: {last_line(error)}")
    versions = (f"{name} {_version(bin_, name)}" for name in ("torch", "torchsnapshot", "nvidia-resiliency-ext"))
    return Launcher("torchrun", (str(bin_ / "torchrun"),), environment=_NO_SHARED_STORE, version=", ".join(versions))


def _ft_launcher(bin_: Path, options: tuple[str, ...]) -> Launcher | Absent:
    helped = _help(bin_ / "ft_launcher")
    if isinstance(helped, Absent):
        return helped
    # It refuses to start without a fault tolerance configuration, unless told; the option's name has changed.
    names = ("--ft-ignore-missing-cfg", "--ignore-missing-fault-tol-cfg")
    ignore = [name for name in names if name in helped][:1]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    command = (str(bin_ / "ft_launcher"), *ignore, *rendezvous, *options)
    version = _version(bin_, "nvidia-resiliency-ext")
    return Launcher("ft_launcher", command, environment=_NO_SHARED_STORE, version=version)


def _dlrover(bin_: Path, options: tuple[str, ...]) -> Launcher | Absent:
    helped = _help(bin_ / "dlrover-run")
    if isinstance(helped, Absent):
        return helped
    starter = Path(__file__).with_name("dlrover_run.py")
    command = (str(bin_ / "python"), str(starter), str(bin_ / "dlrover-run"), "--standalone", *options)
    return Launcher("dlrover-run", command, environment=_NO_SHARED_STORE, version=_version(bin_, "dlrover"))


def _help(program: Path) -> str | Absent:
    try:
        result = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Absent(program.name, f"does not start: {last_line(error)}")
    if result.returncode:
        return Absent(program.name, f"does not start: {(result.stderr.splitlines() or ['no word'])[-1]}")
    return result.stdout


def _version(bin_: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([bin_ / "python", "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def environment(kind: str, *packages: tuple[str, ...], sees_project: bool = False) -> Path:
    """A virtual environment with packages of others, made where it isn't there yet. The project's constraints hold.

    Args:
        kind: first part of its name.
        packages: in groups.
        sees_project: the project's packages are on its path: everything runs with the very same torch.

    Raises:
        OSError, subprocess.SubprocessError: it can't be made.
    """
    cache = Path(os.environ.get("FTRUN_BENCH_CACHE") or Path.home() / ".cache" / "ftrun-bench")
    constraints, site = PROJECT / "scripts" / "constraints.txt", sysconfig.get_path("purelib")
    key = " ".join(map(str, [constraints.read_text(), *packages, *([site] if sees_project else []), sys.version]))
    venv = cache / f"{kind}-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
    if (venv / "complete").exists():
        return venv
    say(f"installing {kind} into {venv} (a few minutes, once)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, timeout=300)
    if sees_project:
        inside = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
        (inside / "project.pth").write_text(f"import site; site.addsitedir({site!r})\n")
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "--constraint", constraints, *itertools.chain.from_iterable(packages)]
    subprocess.run(install, check=True, timeout=1800, capture_output=True, text=True)
    (venv / "complete").touch()
    return venv


def last_line(error: Exception) -> str:
    """The last words of what failed."""
    told = getattr(error, "stderr", None) or str(error)
    return (str(told).strip().splitlines() or [type(error).__name__])[-1]
