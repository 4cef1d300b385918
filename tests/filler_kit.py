"""What the filler's tests share: orders of many kinds, a remote that a subprocess can reach, and runs that read it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cache_kit import Place, content

import ftrun
from ftrun.data.filler import registering
from ftrun.data.filler.places import FillDir, Pool, read_json
from ftrun.data.filler.registering import Berth
from ftrun.data.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.data.cache.files import CachedFiles
    from ftrun.data.filler.registering import Registered

SIZE = 2_000
N = 96
WAIT = 60.0


class Remote(Place):
    """A directory behind a slow driver, which processes of the test reach, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        site = path / "site"
        site.mkdir()
        tests = Path(__file__).parent
        no_compiler = tests / "no_compiler" / "sitecustomize.py"
        lines = [
            "import importlib.util, sys",
            f"spec = importlib.util.spec_from_file_location('no_compiler', {str(no_compiler)!r})",
            "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
            f"sys.path.append({str(tests)!r})",
            "try:",
            "    import fsspec",
            "except ImportError:",
            "    pass",
            "else:",
            "    fsspec.register_implementation('kit', 'cache_kit.KitFS', clobber=True)",
        ]
        (site / "sitecustomize.py").write_text("\n".join(lines))
        self.environment = {"PYTHONPATH": f"{site}{os.pathsep}{Path(ftrun.__file__).parent.parent}"}

    def fill(self, n: int = N) -> list[str]:
        """Make files; returns their URLs."""
        return [self.put(f"f{number:04d}.bin", content(number, SIZE)) for number in range(n)]

    def reads(self) -> Counter[str]:
        """How often each file was downloaded."""
        return Counter(self.requests("read"))

    def fill_dir(self, run: Path) -> FillDir:
        return Pool.of(self.root).run(run, 0)

    def shown(self, run: Path) -> dict[str, Any]:
        return read_json(self.fill_dir(run).shown) or {}


class Urls:
    """A dataset of files, without decoding."""

    def __init__(self, urls: list[str], files: CachedFiles) -> None:
        self.urls = urls
        self.files = files

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> int:
        with self.files.open(self.urls[index]) as path:
            return int(path.read_bytes()[:8])


def loader(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"global_batch": 8, "shuffle": True, "seed": 3, **arguments}
    return DataLoader(dataset, **given)


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


@contextlib.contextmanager
def filler(directory: FillDir, remote: Remote, parent: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The real process, as a child of the test."""
    command = [sys.executable, "-m", "ftrun.data.filler", str(directory.path), str(parent or os.getpid())]
    process = subprocess.Popen(command, env={**os.environ, **remote.environment}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def berth(run: Path, attempt: int = 1, world: int = 1, ranks: tuple[int, ...] = (0,)) -> Berth:
    """The place in a run from which an order is registered."""
    run.mkdir(exist_ok=True)
    return Berth(run, 0, attempt, world, ranks)


def registered(where: Berth, made: Any, name: str = "data") -> Registered:
    found = registering.register(where, name, made)
    assert found is not None
    found.settle(WAIT)
    return found
