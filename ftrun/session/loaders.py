"""The loaders of a Session: where they are, what of that is stored, and how long they were waited for.

None is kept alive here. A script that makes a loader and lets go of it gets its memory and workers back, and nothing is
fetched ahead for it any more; its position stays in checkpoints, as the next attempt will make that loader, too.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.loader import DataLoader
    from ftrun.data.position import Position


class Follower(Protocol):
    """Who hears of positions."""

    def at(self, position: Position) -> None:
        """The committed position is this now."""
        ...


class Loaders:
    """All loaders that one Session has made, by name. Training thread."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def __len__(self) -> int:
        """How many have been made."""
        return len(self._made)

    def __contains__(self, name: object) -> bool:
        """Whether a name is taken."""
        return name in self._made

    def add(self, name: str, loader: DataLoader[Any], follower: Follower | None, dropped: Callable[[], None]) -> None:
        """Take a loader in, with its position restored.

        Args:
            name: under which its position is stored.
            loader: the loader.
            follower: whoever wants to hear of each committed position.
            dropped: called when the loader is gone, by any thread and at any moment.
        """
        self._made[name] = made = _Made(loader, follower)
        loader.follow(made)
        weakref.finalize(loader, dropped).atexit = False  # the end of the process is no news

    def holds(self, batches: object) -> bool:
        """Whether something is one of them."""
        return any(each.loader() is batches for each in self._made.values())

    def commit(self) -> None:
        """A step is complete: what they yielded for it counts."""
        for each in self._made.values():
            loader = each.loader()
            if loader is not None:
                loader.commit()

    def states(self) -> dict[str, dict[str, Any]]:
        """Their states at the committed position, by name; see :meth:`ftrun.DataLoader.state_dict`."""
        return {name: each.state() for name, each in self._made.items()}


class _Made:
    """One loader, and what must outlive it. It is told of each committed position."""

    def __init__(self, loader: DataLoader[Any], follower: Follower | None) -> None:
        self.loader = weakref.ref(loader)
        self._follower = follower
        self._position = loader.position
        self._state = loader.state_dict()

    def at(self, position: Position) -> None:
        before, self._position = self._position, position
        loader = self.loader()
        # With the first batch of an epoch the list of a user's sampler is a new one.
        if loader is not None and (before.samples == 0 or before.epoch != position.epoch):
            self._state = loader.state_dict()
        if self._follower is not None:
            self._follower.at(position)

    def state(self) -> dict[str, Any]:
        loader = self.loader()
        if loader is not None:
            self._state = loader.state_dict()
            return self._state
        # Ranks lose a loader at moments of their own, and must store the same position of it.
        return {**self._state, **self._position._asdict()}


class Waits:
    """How long loaders were waited for, by the Session's loop and by loops of the script's own. Training thread."""

    def __init__(self) -> None:
        self._counted: list[_Counted] = []

    def watch(self, loader: object) -> None:
        """Count the waits of an :class:`ftrun.DataLoader`; others don't say how long theirs are."""
        module = sys.modules.get("ftrun.data.loader")  # without it there is none
        if module is not None and isinstance(loader, module.DataLoader):
            self._counted.append(_Counted(loader))

    def counts(self, loader: object) -> bool:
        """Whether its waits are counted."""
        return any(each.loader() is loader for each in self._counted)

    def since(self) -> float:
        """Seconds since this was asked last."""
        return sum(each.since() for each in self._counted)


class _Counted:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = weakref.ref(loader)
        self._before = loader.waited

    def since(self) -> float:
        loader = self.loader()
        if loader is None:
            return 0.0
        before, self._before = self._before, loader.waited
        return self._before - before
