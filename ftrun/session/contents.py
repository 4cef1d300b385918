"""What a checkpoint holds of one rank: what the script tracks, its loaders, gradients, and the random states."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ftrun.errors import UsageError
from ftrun.session import random_state, tracked
from ftrun.session.callbacks import REGISTRY
from ftrun.session.gradients import PendingGradients
from ftrun.session.loaders import Loaders, Waits
from ftrun.session.states import States
from ftrun.session.unreduced import SAID, has_unreduced

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.loader import DataLoader
    from ftrun.session.loaders import Follower
    from ftrun.session.restoration import Restoration

_log = logging.getLogger(__name__)


class Contents:
    """Takes in what the script gives a Session, puts its state back where there is a checkpoint, and collects it.

    Training thread, on every rank.

    Attributes:
        loaders: those that the Session has made.
        waits: how long loaders were waited for.
        given: tracked objects by name, as the script gave them, wrappers included.
    """

    def __init__(self, restoration: Restoration) -> None:
        self.loaders = Loaders()
        self.waits = Waits()
        self.given: dict[str, Any] = {}
        self._tracked: dict[str, Any] = {}
        self._states = States()
        self._gradients = PendingGradients()
        self._restoration = restoration
        self._said_unreduced = False

    def track(self, objects: dict[str, Any]) -> None:
        """Take in objects, and put their states back; see :meth:`ftrun.Session.track`.

        Raises:
            StateMismatch: an object doesn't fit the checkpoint.
            UsageError: an object has no state.
        """
        unwrapped = {name: tracked.unwrapped(value) for name, value in objects.items() if value is not None}
        for name, value in unwrapped.items():
            tracked.require_stateful(name, value)
        for name in objects.keys() - unwrapped.keys():
            self._restoration.give_up(name)
        self._restoration.give_all(unwrapped, {**self._tracked, **unwrapped})
        for name, value in unwrapped.items():
            self.given[name], self._tracked[name] = objects[name], value
            if isinstance(value, torch.optim.Optimizer):
                self._gradients.watch(name, value)
            else:
                self.waits.watch(value)
        self._restoration.give_rest(self._gradients, set(self._tracked))

    def name_for(self, name: str | None) -> str:
        """The name of the next loader.

        Raises:
            UsageError: it is taken.
        """
        count = len(self.loaders) + 1
        name = name or ("data" if count == 1 else f"data{count}")
        if name in self.loaders:
            raise UsageError(f"ft.loader(name={name!r}): that name is taken; give each loader its own.")
        return name

    def take_in(
        self, name: str, loader: DataLoader[Any], follower: Follower | None, dropped: Callable[[], None]
    ) -> None:
        """Take in a loader whose position is restored; see :meth:`ftrun.session.loaders.Loaders.add`."""
        self.loaders.add(name, loader, follower, dropped)
        self.waits.watch(loader)

    def has_position(self, batches: object) -> bool:
        """Whether something that yields batches is a loader of the Session's, or tracked."""
        return self.loaders.holds(batches) or any(batches is each for each in self._tracked.values())

    def rewind(self) -> None:
        """Put back what building things has changed since the objects were tracked."""
        self._restoration.settle_optimizers(self._tracked)
        self._restoration.give_rest(self._gradients, set(self._tracked))

    def states(self) -> dict[str, Any]:
        """The states of the tracked objects."""
        return {"tracked": self._states.of(self._tracked)}

    def collect(self, loaders: dict[str, Any]) -> dict[str, Any]:
        """Everything that a checkpoint stores of this rank.

        Args:
            loaders: their states, taken earlier at this step boundary.

        Raises:
            UsageError: a callback gives something that is no dict.
        """
        # The look takes a millisecond where there are thousands of parameters.
        if not self._said_unreduced and self._gradients.may_be_new and has_unreduced(self._tracked.values()):
            self._said_unreduced = True
            _log.warning(SAID)
        return {
            **self.states(),
            "gradients": self._gradients.capture(),
            "loaders": loaders,
            "random": random_state.capture(),
            "extra": _extra(),
        }


def _extra() -> dict[str, Any]:
    """What callbacks add."""
    extra: dict[str, Any] = {}
    for function in REGISTRY.at("save"):
        given = function()
        if given is not None and not isinstance(given, dict):
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(f'@ftrun.on("save") {name}() returned {type(given).__name__}; return a dict, or None.')
        extra.update(given or {})
    return extra
