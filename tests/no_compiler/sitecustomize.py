"""Keeps torch's compiler out of test jobs, and what comes with it: nothing is compiled there.

That is a second and a half of CPU for each of a thousand processes. ``torch._dynamo`` is imported when an optimizer is
first used; ``torch.export`` and what Python adds to operators on the meta device come with ``import torch``. Whatever
wants more of them than the few things below gets the real ones. Python imports this by itself where ``PYTHONPATH``
names this directory.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMPILER = "torch._dynamo"
CONFIG = f"{COMPILER}.config"
META = "torch._meta_registrations"
NEED_META = ("torch._decomp", "torch._prims", "torch._refs", "torch.distributed.tensor")
"""Who asks what shape comes out of an operator has imported one of these, or the compiler."""


GENERATORS = {"torch._custom_class_base": "CustomClassBaseMeta", "torch._opaque_base": "OpaqueBaseMeta"}
"""Where the class of generators' class is: from torch 2.14 on, and before."""


class Finder:
    """Finds the stand-ins, and the real packages for all that is in them."""

    def __init__(self) -> None:
        self.left_out = {COMPILER, META, "torch.export"}

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        if name in self.left_out:
            return ModuleSpec(name, self, is_package=True)
        if name == CONFIG and COMPILER in self.left_out:  # sharded tensors look at it; it needs nothing of the rest
            (torch,) = sys.modules["torch"].__path__
            return spec_from_file_location(name, f"{torch}/_dynamo/config.py")
        package = name.rpartition(".")[0]
        wanted = META if name in NEED_META else package
        if wanted not in self.left_out:
            return None
        real(wanted)
        if name in sys.modules:
            return Loaded.spec(name)
        return PathFinder.find_spec(name, sys.modules[package].__path__)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name) if spec.name != COMPILER else Compiler(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == META:
            complete_generators()


def complete_generators() -> None:
    """Do what torch's random primitives do when they are imported, without which there are no generators."""
    complete = getattr(sys.modules["torch._C"], "_set_generator_metaclass", None)  # from torch 2.13 on
    if complete is None:
        return
    for module, name in GENERATORS.items():
        if PathFinder.find_spec(module, sys.modules["torch"].__path__):
            complete(getattr(importlib.import_module(module), name))
            return
    real(META)  # which brings them, wherever this torch has it


FINDER = Finder()


class Loaded:
    """Loads a module that has come with its package while it was looked for: Python would execute it once more."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module, self.its_spec = module, module.__spec__

    @classmethod
    def spec(cls, name: str) -> ModuleSpec:
        module = sys.modules[name]
        module.__spec__ = ModuleSpec(name, cls(module))  # which Python takes in place of any that it is given
        return module.__spec__

    def create_module(self, _spec: ModuleSpec) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.its_spec


class StandIn(types.ModuleType):
    """A module that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)  # importlib looks for some
        return getattr(real(self.__name__), name)


class Compiler(StandIn):
    """What optimizers, DistributedDataParallel and process groups call when nothing is compiled."""

    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        pass

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        return function if function is not None else lambda given: given


def real(name: str) -> types.ModuleType:
    """The module that one stands in for."""
    if name in FINDER.left_out:
        FINDER.left_out.remove(name)
        for each in (name, f"{name}.config"):
            sys.modules.pop(each, None)
        vars(sys.modules["torch"]).pop(name.rpartition(".")[2], None)
        if name == COMPILER:
            real(META)
    return importlib.import_module(name)


sys.meta_path.insert(0, FINDER)
