"""A pulse for scripts that don't know ftrun: torch's global optimizer hook counts their steps.

The hook is installed when, and if, the script imports ``torch.optim``; nothing here imports it first. In a standby
that was promoted torch is there already.

What a script does between two optimizer steps isn't known here: it may evaluate, save, or hang. So the phases are
``START`` until the first optimizer step begins, ``FIRST_STEP`` until it is complete, and ``STEP`` from then on.
"""

from __future__ import annotations

import atexit
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun import events, inject
from ftrun.pulse import Phase
from ftrun.rundir import RunDir
from ftrun.session import group_marks
from ftrun.session.when_imported import when_imported

if TYPE_CHECKING:
    import types

    from ftrun.contract import WorkerContract
    from ftrun.pulse import Pulse

_OPTIMIZER_MODULE = "torch.optim.optimizer"
_SECONDS_BETWEEN_EVENTS = 1.0


def watch(contract: WorkerContract, pulse: Pulse, *, rank: int) -> None:
    """Count optimizer steps into the pulse page until a Session takes it over."""
    when_imported(_OPTIMIZER_MODULE, _Counter(contract, pulse, rank).install)
    group_marks.watch(pulse)


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
            self._pulse.phase(Phase.FIRST_STEP)
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
        if self._steps == 1:
            from ftrun.session import parked  # the way to the script is short without it

            parked.note_imports(Path(self._contract.worker_dir))
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
