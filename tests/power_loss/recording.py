"""Running a program with everything recorded that it does to files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from power_loss import log, scratch
from power_loss.disk import Disk, File, Node

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPILER = shutil.which("gcc") or shutil.which("cc")
NO_COMPILER = "recording what a program does to files needs a C compiler (Debian: gcc, libc6-dev)"

_HERE = Path(__file__).parent


def record(
    subjects: str, names: Sequence[str], *, durable: Sequence[str] = ("root",), timeout: float = 100
) -> dict[str, list[log.Op]]:
    """Run subjects one after the other in one process, each in a directory of its own; what was done in each.

    Args:
        subjects: the module with the functions, ``power_loss.subjects_dcp``.
        names: the functions; each takes its directory.
        durable: directories in theirs that must be seen to the last byte.
        timeout: seconds for all of them.
    """
    with scratch.directory() as where:
        top, logs, tests = where / "top", where / "log", _HERE.parent
        top.mkdir()
        environment = os.environ | {
            "LD_PRELOAD": str(_build(where)),
            "POWER_LOSS_TOP": str(top),
            "POWER_LOSS_LOG": str(logs),
            "PYTHONPATH": os.pathsep.join([f"{tests}/no_compiler", str(tests), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "power_loss.perform", subjects, str(top), *names]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert result.returncode == 0, result.stdout + result.stderr
        sections = log.sections(log.parse(logs.read_bytes(), str(top)))
        for name, section in sections.items():
            verify(section, top / name, durable)
    return sections


def verify(ops: Sequence[log.Op], directory: Path, durable: Sequence[str]) -> None:
    """Replay everything and compare with the directory, bit for bit: nothing went unseen.

    Raises:
        AssertionError: something did; the text says where.
    """
    disk = Disk()
    unseen = []
    for op in ops:
        disk.do(op)
        if op.kind == log.UNSEEN:
            unseen.append((op, disk.node(op.inode)))
    for name in durable:
        for op, node in unseen:
            assert not _concerns(op, node, disk, name), f"{op} can't be followed"
        replayed, real = disk.current(name), _read(directory, name)
        assert set(replayed) == set(real), f"names differ under {name}: {set(replayed) ^ set(real)}"
        different = [path for path in real if replayed[path] != real[path]]
        assert not different, f"bytes differ from what was recorded: {different}"


def _concerns(op: log.Op, node: Node | None, disk: Disk, name: str) -> bool:
    if op.name.startswith("/") or f"{op.name}/".startswith(f"{name}/") or f"{op.path}/".startswith(f"{name}/"):
        return True
    return isinstance(node, File) and any(disk.lookup(path) is node for path in disk.current(name))


def _read(directory: Path, name: str) -> dict[str, bytes | None]:
    top = directory / name
    found = [top, *top.rglob("*")] if top.exists() else []
    return {str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes() for path in found}


def _build(where: Path) -> Path:
    assert COMPILER is not None, NO_COMPILER
    library = where / "shim.so"
    # Fortified headers define some of these functions themselves.
    flags = ["-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE"]
    command = [COMPILER, *flags, "-o", str(library), str(_HERE / "shim.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    return library
