"""The callbacks: what a script, a framework or a job adds to a run without owning its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    _Function = TypeVar("_Function", bound=Callable[..., Any])

MOMENTS = ("save", "restore", "commit", "step", "preempt", "alert")
_LIST = ", ".join(MOMENTS)


class Registry:
    """Functions by moment, in the order they were registered."""

    def __init__(self) -> None:
        self._functions: dict[str, list[Callable[..., Any]]] = {moment: [] for moment in MOMENTS}

    def add(self, moment: str, function: Callable[..., Any]) -> None:
        """Register a function, once.

        Raises:
            UsageError: there is no such moment.
        """
        self.require(moment)
        if function not in self._functions[moment]:
            self._functions[moment].append(function)

    def require(self, moment: str) -> None:
        """Refuse what is no moment.

        Raises:
            UsageError: there is no such moment.
        """
        if moment not in self._functions:
            raise UsageError(f'ftrun.on({moment!r}): no such moment; write @ftrun.on("save"), one of {_LIST}.')

    def at(self, moment: str) -> tuple[Callable[..., Any], ...]:
        """The functions of a moment."""
        return tuple(self._functions[moment])


# Decorators run while modules are imported, before there is a Session: this is where they leave their functions.
REGISTRY = Registry()


def on(moment: str) -> Callable[[_Function], _Function]:
    """Register a function for a moment of the run; use as a decorator, in the script or in a job's ``callbacks``.

    All run on the training thread, on every rank unless said otherwise. What they raise fails the rank.

    ========== =================== ====================================================================
    moment     called with         when
    ========== =================== ====================================================================
    save       ()                  a snapshot is taken; the dict it returns goes into the checkpoint
    restore    (checkpoint)        after tracked objects are restored; ``checkpoint.extra`` has the dicts
    commit     (checkpoint)        at the first step boundary after this rank knows that it is durable
    step       (step, metrics)     a step is complete
    preempt    (notice)            the node goes away at ``notice.deadline`` (nothing sends it yet)
    alert      (alert)             the hardware looks bad (nothing sends it yet)
    ========== =================== ====================================================================

    Raises:
        UsageError: there is no such moment.
    """
    REGISTRY.require(moment)  # now: @ftrun.on without parentheses would never come to register anything

    def register(function: _Function) -> _Function:
        REGISTRY.add(moment, function)
        return function

    return register
