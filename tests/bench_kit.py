"""What the tests of scripts/bench share: its modules, imported as it imports them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "scripts" / "benchmarks"


@pytest.fixture(name="bench")
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the benchmarks, or of their jobs, by its name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS / "jobs")
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
