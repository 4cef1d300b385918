"""Keeps torch's compiler out of test jobs: it is imported when an optimizer is first used, and nothing uses it there.

That is a second of CPU for each of a thousand processes. Whatever wants more of ``torch._dynamo`` than the few things
below gets the real one. Python imports this by itself where ``PYTHONPATH`` names this directory.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "torch._dynamo"
CONFIG = f"{NAME}.config"


class Finder:
    """Finds the stand-in for the package, and the real package for all that is in it."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        if name == NAME:
            return ModuleSpec(name, self, is_package=True)
        if name == CONFIG:  # sharded tensors look at it; it is small, and needs nothing of the rest
            (torch,) = sys.modules["torch"].__path__
            return spec_from_file_location(name, f"{torch}/_dynamo/config.py")
        if name.startswith(f"{NAME}."):
            real()
            return ModuleSpec(name, self) if name in sys.modules else None
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or StandIn(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None:
        pass


FINDER = Finder()


class StandIn(types.ModuleType):
    """What optimizers, DistributedDataParallel and process groups call when nothing is compiled."""

    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        pass

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        return function if function is not None else lambda given: given

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)  # importlib looks for some
        return getattr(real(), name)


def real() -> types.ModuleType:
    """The compiler itself."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        for name in (NAME, CONFIG):
            sys.modules.pop(name, None)
        vars(sys.modules["torch"]).pop("_dynamo", None)
    return importlib.import_module(NAME)


sys.meta_path.insert(0, FINDER)
