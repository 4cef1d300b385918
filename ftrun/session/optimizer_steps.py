"""A pulse for scripts that don't know ftrun: torch's global optimizer hook counts their steps.

The hook is installed when, and if, the script imports ``torch.optim``; nothing here imports it first.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

from ftrun import events, inject
from ftrun.pulse import Phase
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

    from ftrun.contract import WorkerContract
    from ftrun.pulse import Pulse

_OPTIMIZER_MODULE = "torch.optim.optimizer"
_SECONDS_BETWEEN_EVENTS = 1.0


def watch(contract: WorkerContract, pulse: Pulse, *, rank: int) -> None:
    """Count optimizer steps into the pulse page until a Session takes it over."""
    counter = _Counter(contract, pulse, rank)
    sys.meta_path.insert(0, _WhenImported(_OPTIMIZER_MODULE, counter.install))


class _Counter:
    """Counts the steps of the first optimizer that steps; when it is gone, of the one that steps next."""

    def __init__(self, contract: WorkerContract, pulse: Pulse, rank: int) -> None:
        self._contract = contract
        self._pulse = pulse
        self._rank = rank
        self._counted: weakref.ref[Any] | None = None
        self._steps = 0
        self._said = 0
        self._said_at = 0.0

    def install(self, module: types.ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self._before)
        module.register_optimizer_step_post_hook(self._after)
        atexit.register(self._say_steps)

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._pulse.owned:
            return
        if self._counted is None:
            self._pulse.phase(Phase.STEP)
            self._say(events.StepsBegan(step=0, total=None, exact=False))
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        if self._counted() is not optimizer:
            return
        inject.fire_if_due(self._contract, self._rank, self._steps + 1)

    def _after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._pulse.owned or self._counted is None or self._counted() is not optimizer:
            return
        self._steps += 1
        self._pulse.step(self._steps)
        if self._steps == 1 or time.monotonic() - self._said_at > _SECONDS_BETWEEN_EVENTS:
            self._say_steps()

    def _say_steps(self) -> None:
        if self._steps > self._said and not self._pulse.owned:
            self._said, self._said_at = self._steps, time.monotonic()
            self._say(events.Step(step=self._steps))

    def _say(self, event: events.Event) -> None:
        if self._rank == 0:
            path = RunDir(self._contract.run_path).events(self._contract.node)
            events.EventLog(path, attempt=self._contract.attempt, rank=0).write(event)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls ``then`` with a module right after somebody else imported it."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
