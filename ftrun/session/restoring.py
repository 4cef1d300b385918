"""What a Session gets back: the commit that it resumes from, given out piece by piece to what the script builds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from ftrun import events
from ftrun.errors import StateMismatch
from ftrun.session import random_state, saving, tracked
from ftrun.session.callbacks import REGISTRY
from ftrun.session.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.checkpoint.restore import RankState
    from ftrun.contract import WorkerContract
    from ftrun.data.loader import DataLoader
    from ftrun.session.gradients import PendingGradients
    from ftrun.session.place import Place
    from ftrun.session.tracked import Stateful


class Restoration:
    """One rank's state in a commit, until the first step. For a fresh start every method does nothing.

    Attributes:
        checkpoint: the commit, or None for a fresh start.
        step: steps that are complete in it.
        seconds: how long reading it took.

    Raises:
        CorruptCheckpoint: bytes differ from what was committed.
        CheckpointError: they can't be read.
    """

    def __init__(self, contract: WorkerContract, place: Place) -> None:
        started = time.monotonic()
        self._place = place
        self._start_over = contract.to_start_over
        self._stored: RankState | None = saving.load(contract, place)
        self.seconds = time.monotonic() - started
        self.step = 0
        self.checkpoint: Checkpoint | None = None
        self._unclaimed: dict[str, set[str]] = {"tracked": set(), "loaders": set()}
        self._told = False
        if self._stored is not None and contract.resume is not None:
            self._take(self._stored, contract.resume, contract.root)

    def _take(self, stored: RankState, name: str, root: str) -> None:
        self.step = stored.step
        self._unclaimed = {kind: set(stored.value[kind]) for kind in self._unclaimed}
        self.checkpoint = Checkpoint(
            step=stored.step,
            name=name,
            root=root,
            total=stored.total,
            reason=stored.manifest.reason,
            extra=stored.value["extra"],
        )

    def event(self) -> events.Restored | None:
        """What to record of it."""
        if self.checkpoint is None:
            return None
        return events.Restored(self.step, self.checkpoint.name, self.seconds)

    def give(self, name: str, value: Stateful) -> None:
        """Put its state back into a tracked object.

        Raises:
            StateMismatch: the checkpoint has no such name, or shapes don't fit.
        """
        state = self._claim("tracked", name, "Track it under its old name, leave it out")
        if state is not None and self.checkpoint is not None:
            tracked.restore(name, value, state, self.checkpoint.name, self._start_over)

    def settle_optimizers(self, objects: Mapping[str, Any]) -> None:
        """Restore optimizers again whose parameters were moved or cast after they were tracked."""
        if self._stored is None or self.checkpoint is None:
            return
        for name, value in objects.items():
            if isinstance(value, torch.optim.Optimizer) and tracked.is_misplaced(value):
                state = self._stored.value["tracked"][name]
                tracked.restore(name, value, state, self.checkpoint.name, self._start_over)

    def give_up(self, name: str) -> None:
        """Say that the state under a name isn't wanted any more."""
        self._unclaimed["tracked"].discard(name)

    def give_loader(self, name: str, loader: DataLoader[Any]) -> None:
        """Put its position back into a loader.

        Raises:
            StateMismatch: the checkpoint has no loader of that name, or its position belongs to other data.
        """
        state = self._claim("loaders", name, "Make the loaders as before")
        if state is not None:
            loader.load_state_dict(state)

    def _claim(self, kind: str, name: str, way_out: str) -> Any:
        if self._stored is None or self.checkpoint is None:
            return None
        states = self._stored.value[kind]
        if name not in states:
            what = "position of a loader " if kind == "loaders" else ""
            raise StateMismatch(
                f"checkpoint {self.checkpoint.name} holds no {what}{name!r}; it holds "
                f"{', '.join(states) or 'none'}. {way_out}, or {self._start_over}."
            )
        self._unclaimed[kind].discard(name)
        return states[name]

    def give_rest(self, gradients: PendingGradients, names: set[str]) -> None:
        """Put pending gradients and the random states back; again before the first step, as building draws numbers.

        Args:
            gradients: of the optimizers that are tracked.
            names: that are tracked by now.

        Raises:
            StateMismatch: gradients were pending on another number of ranks.
        """
        stored, checkpoint = self._stored, self.checkpoint
        if stored is None or checkpoint is None:
            return
        pending = {name: each for name, each in stored.value["gradients"].items() if name in names}
        if pending and stored.manifest.world_size != self._place.world_size:
            raise StateMismatch(
                f"checkpoint {checkpoint.name} was taken while gradients were being accumulated, on "
                f"{stored.manifest.world_size} ranks; it resumes only on as many, not on {self._place.world_size}."
            )
        gradients.restore(pending)
        if stored.own:
            random_state.restore(stored.value["random"])
        else:
            random_state.derive(checkpoint.name, self._place.rank)

    @property
    def all_claimed(self) -> bool:
        """Whether everything that was tracked is back."""
        return not any(self._unclaimed.values())

    def require_all_claimed(self) -> None:
        """Refuse to drop state without a word.

        Raises:
            StateMismatch: the checkpoint holds what the script neither tracks nor gives up.
        """
        if self.checkpoint is None or self.all_claimed:
            return
        lost, loaders = sorted(self._unclaimed["tracked"]), sorted(self._unclaimed["loaders"])
        if lost:
            raise StateMismatch(
                f"checkpoint {self.checkpoint.name} holds {', '.join(lost)}, which this script doesn't track. "
                f"Track it, or give it up with ft.track({lost[0]}=None)."
            )
        raise StateMismatch(
            f"checkpoint {self.checkpoint.name} holds the position of a loader {loaders[0]!r}, which this script "
            f"doesn't make. Make it with ft.loader(), or {self._start_over}."
        )

    def tell(self) -> None:
        """Call the ``restore`` callbacks, once."""
        if self.checkpoint is None or self._told:
            return
        self._told = True
        for function in REGISTRY.at("restore"):
            function(self.checkpoint)

    def forget(self) -> None:
        """Let go of the state: its tensors are not needed any more."""
        self._stored = None
