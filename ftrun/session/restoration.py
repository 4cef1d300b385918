"""What a Session gets back: the checkpoint that it resumes from, given out piece by piece to what the script builds."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.layout import Root
from ftrun.checkpoint.loading import in_place
from ftrun.checkpoint.loading.stored import open_stored
from ftrun.checkpoint.memory.tier import Tier
from ftrun.data.iterable import others
from ftrun.errors import CorruptCheckpoint, StateMismatch
from ftrun.garbage import no_collections
from ftrun.session import random_state, tracked
from ftrun.session.callbacks import REGISTRY
from ftrun.session.checkpoint import Checkpoint
from ftrun.session.wanted import Wanted, wanted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ftrun.checkpoint.loading.stored import StoredState
    from ftrun.contract import WorkerContract
    from ftrun.data.loader import DataLoader
    from ftrun.session.gradients import PendingGradients
    from ftrun.session.place import Place
    from ftrun.session.tracked import Stateful


class Restoration:
    """One rank's state in a checkpoint, until the first step. For a fresh start every method does nothing.

    Tensors are read when they are given out, straight into the script's own where that is possible.

    Attributes:
        checkpoint: the checkpoint, or None for a fresh start.
        step: steps that are complete in it.
        seconds: how long reading it has taken so far.

    Raises:
        CorruptCheckpoint: bytes differ from what was committed; it is marked, and not chosen again.
        CheckpointError: they can't be read.
    """

    def __init__(self, contract: WorkerContract, place: Place) -> None:
        self._contract, self._place = contract, place
        self.seconds = 0.0
        self.step = 0
        self.checkpoint: Checkpoint | None = None
        self._stored: StoredState | None = None
        self._random: Any = None
        self._unclaimed: dict[str, set[str]] = {"tracked": set(), "loaders": set()}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._told = False
        if contract.resume is not None:
            with self._reading():
                self._stored = self._open(contract.resume)
                try:
                    self._take(self._stored)
                except BaseException:
                    self.forget()
                    raise

    def _open(self, name: str) -> StoredState:
        contract, place = self._contract, self._place
        stored = open_stored(
            Root.open(contract.root, dict(contract.storage_options)),
            name,
            place.rank,
            place.world_size,
            tier=Tier(Path(contract.tier)) if contract.tier else None,
            local=Path(contract.local) if contract.local else None,
            sealed=contract.resume_sealed,
        )
        stored.share_processors(place.local_world_size)
        return stored

    def _take(self, stored: StoredState) -> None:
        self.step = stored.step
        self._unclaimed = {kind: set(stored.names(kind)) for kind in self._unclaimed}
        self._random = stored.value("random") if stored.own else None
        self.checkpoint = Checkpoint(
            step=stored.step,
            name=stored.name,
            root=self._contract.root,
            total=stored.total,
            reason=stored.reason,
            extra=stored.value("extra"),
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Measure what reading takes, and mark a checkpoint that turns out to be damaged."""
        started = time.monotonic()
        try:
            with no_collections():
                yield
        except CorruptCheckpoint as error:
            # Without a launcher nobody else would, and the next start would choose it again.
            with contextlib.suppress(OSError):
                root = Root.open(self._contract.root, dict(self._contract.storage_options))
                reader.mark_bad(root, error.attempt, error.detail)
            raise
        finally:
            self.seconds += time.monotonic() - started

    @property
    def read(self) -> dict[str, int]:
        """Bytes that were read so far, by the tier that they came from."""
        return {} if self._stored is None else {str(tier): size for tier, size in self._stored.read_bytes.items()}

    def event(self) -> events.Restored | None:
        """What to record of it, when everything is given out."""
        if self.checkpoint is None:
            return None
        return events.Restored(self.step, self.checkpoint.name, self.seconds, self.read)

    def give_all(self, values: Mapping[str, Stateful], objects: Mapping[str, Any]) -> None:
        """Put the states of tracked objects back, read together: each byte of a file once for all of them.

        Nothing is changed where one of them doesn't fit.

        Args:
            values: the objects by the names under which they are tracked, without wrappers.
            objects: everything that is tracked by now, without wrappers: an optimizer's parameters are found by their
                names in the modules among them.

        Raises:
            StateMismatch: the checkpoint has no such name, or shapes don't fit.
            CorruptCheckpoint: bytes differ from what was committed.
            CheckpointError: they can't be read.
        """
        wants: dict[str, Wanted] = {}
        for name, value in values.items():
            if isinstance(value, torch.optim.Optimizer):
                self._optimizers[name] = value
            stored = self._claim("tracked", name, "Track it under its old name, leave it out")
            if stored is not None:
                with self._reading():
                    wants[name] = wanted(stored, name, value, objects, self._require_fit)
        if self._stored is not None and wants:
            with self._reading():
                self._fill(self._stored, wants, objects)

    def _fill(self, stored: StoredState, wants: dict[str, Wanted], objects: Mapping[str, Any]) -> None:
        """Read what objects want, and put it where it belongs. Nothing is kept of what is put: ``wants`` is emptied."""
        joined = {name: each for name, each in wants.items() if each.joins}
        outlines = {name: each.outline for name, each in joined.items()}
        states = stored.fill(outlines, {name: each.template for name, each in joined.items()})
        del outlines
        for name in list(wants):
            joined.pop(name, None)
            self._put(stored, name, wants.pop(name), states, objects)

    def _put(
        self, stored: StoredState, name: str, want: Wanted, states: dict[str, Any], objects: Mapping[str, Any]
    ) -> None:
        state = states.pop(name) if name in states else stored.fill(want.outline, want.template)
        if not want.is_there(state):
            if not isinstance(want.value, torch.nn.Module | torch.optim.Optimizer) and others.is_loader(want.value):
                ranks = (stored.world_size, self._place.world_size)
                others.check_loader(name, want.value, state, ranks, self._contract.to_start_over)
            tracked.restore(name, want.value, state, stored.name, self._contract.to_start_over, objects)

    def _require_fit(self, name: str, found: Sequence[str]) -> None:
        """Refuse a state whose names or shapes don't fit, before anything is read."""
        if found and self.checkpoint is not None:
            raise tracked.mismatch(name, found, self.checkpoint.name, self._contract.to_start_over)

    def settle_optimizers(self, objects: Mapping[str, Any]) -> None:
        """Restore optimizers again whose parameters were moved or cast after they were tracked."""
        if self._stored is None:
            return
        for name, value in objects.items():
            if isinstance(value, torch.optim.Optimizer) and tracked.is_misplaced(value):
                with self._reading():
                    again = wanted(self._stored, name, value, objects, self._require_fit)
                    self._fill(self._stored, {name: again}, objects)

    def give_up(self, name: str) -> None:
        """Say that the state under a name isn't wanted any more."""
        self._unclaimed["tracked"].discard(name)

    def give_loader(self, name: str, loader: DataLoader[Any]) -> None:
        """Put its position back into a loader.

        Raises:
            StateMismatch: the checkpoint has no loader of that name, or its position belongs to other data.
        """
        stored = self._claim("loaders", name, "Make the loaders as before")
        if stored is not None:
            with self._reading():
                state = stored.value("loaders", name)
                if state.get("shards") is not None and stored.world_size != self._place.world_size:
                    state = {**state, "shards": self._shards(stored, name, state["shards"])}
            loader.load_state_dict(state)

    def _shards(self, stored: StoredState, name: str, mine: Any) -> Any:
        """The places in all ranks' shards: in a world of another size a rank goes on with shards of others."""
        from ftrun.data.iterable import marks

        return marks.merged([mine, *(stored.fill(each).get("shards") for each in stored.others("loaders", name))])

    def _claim(self, kind: str, name: str, way_out: str) -> StoredState | None:
        if self._stored is None:
            return None
        names = self._stored.names(kind)
        if name not in names:
            what = "position of a loader " if kind == "loaders" else ""
            raise StateMismatch(
                f"checkpoint {self._stored.name} holds no {what}{name!r}; it holds "
                f"{', '.join(names) or 'none'}. {way_out}, or {self._contract.to_start_over}."
            )
        self._unclaimed[kind].discard(name)
        return self._stored

    def give_rest(self, gradients: PendingGradients, names: set[str]) -> None:
        """Put pending gradients and the random states back; again before the first step, as building draws numbers.

        Args:
            gradients: of the optimizers that are tracked.
            names: that are tracked by now.

        Raises:
            StateMismatch: gradients were pending on another number of ranks.
        """
        stored = self._stored
        if stored is None:
            return
        pending = [name for name in stored.names("gradients") if name in names]
        if pending and stored.world_size != self._place.world_size:
            raise StateMismatch(
                f"checkpoint {stored.name} was taken while gradients were being accumulated, on "
                f"{stored.world_size} ranks; it resumes only on as many, not on {self._place.world_size}."
            )
        with self._reading():
            gradients.restore({name: self._gradients(stored, name) for name in pending})
        if stored.own:
            random_state.restore(self._random)
        else:
            random_state.derive(stored.name, self._place.rank)

    def _gradients(self, stored: StoredState, name: str) -> dict[str, Any]:
        """An optimizer's pending gradients but for those that are already where they belong."""
        outline = stored.outline("gradients", name)
        parameters = [each for group in self._optimizers[name].param_groups for each in group["params"]]
        numbered = {str(index): each for index, each in enumerate(parameters) if str(index) in outline}
        # Laid out like the parameter, as autograd does it: fused optimizers count on that.
        template = {
            key: in_place.empty_like(each, each.dtype) if each.grad is None else each.grad
            for key, each in numbered.items()
        }
        read: dict[str, Any] = stored.fill(outline, template)
        for key, parameter in numbered.items():
            if read[key] is template[key]:
                parameter.grad = read.pop(key)
        return read

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
            f"doesn't make. Make it with ft.loader(), or {self._contract.to_start_over}."
        )

    def tell(self) -> None:
        """Call the ``restore`` callbacks, once."""
        if self.checkpoint is None or self._told:
            return
        self._told = True
        for function in REGISTRY.at("restore"):
            function(self.checkpoint)

    def forget(self) -> None:
        """Let go of the checkpoint: nothing of it is needed any more."""
        if self._stored is not None:
            self._stored.close()
        self._stored = self._random = None
        self._optimizers = {}
