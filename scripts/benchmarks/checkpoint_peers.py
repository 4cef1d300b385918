"""What the peers make of the same states: stall, time until the checkpoint is whole, and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkpoint_jobs import LAYOUTS, run_peers, subjects
from checkpoint_results import over
from figures import median, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from checkpoint_jobs import Subject
    from checkpoint_results import Results
    from common import Settings

_DCP = ("torch.save", "dcp.save", "dcp.async_save thread", "dcp.async_save process")
_NVRX = "nvrx on CPU"


@dataclass(frozen=True)
class Peer:
    """One way of saving, with one kind of state. A ratio is None where it could not be measured.

    Attributes:
        name: such as ``dcp.save (DDP)``.
        stall: time the training is held over a memcpy of the bytes that the rank owns.
        persist: time until the checkpoint is whole over a raw write and fsync of them.
        load: over a plain read of the bytes that the rank needs.
        notes: for people.
        why: what went wrong.
    """

    name: str
    stall: float | None = None
    persist: float | None = None
    load: float | None = None
    notes: tuple[str, ...] = ()
    why: str = ""

    def word(self, value: float | None) -> float | str | None:
        """A value for a figure's reference, or why there is none."""
        return self.why if value is None and self.why else value


def measure(settings: Settings) -> list[Peer]:
    """All of them; a few of them in a quick look."""
    cycles = settings.count(10, 3)
    found = []
    for subject, methods in _chosen(settings):
        results = run_peers(settings, subject, methods, cycles)
        found += [peer(results, each, subject) for each in methods]
    return found


def _chosen(settings: Settings) -> list[tuple[Subject, tuple[str, ...]]]:
    """Jobs, each with the methods that take turns in it. Those that may well fall have one for themselves."""
    replicated, sharded = subjects(settings, "large")
    # NVRx as its documentation has it: its worker needs CUDA, and its trainer waits for ever when the worker has died.
    quick: list[tuple[Subject, tuple[str, ...]]] = [(replicated, (*_DCP, "torchsnapshot")), (replicated, ("nvrx",))]
    if settings.quick:
        return quick
    others = [(replicated, (_NVRX,)), (sharded, _DCP), (sharded, ("torchsnapshot",)), (sharded, (_NVRX,))]
    return [*quick, *others, (subjects(settings, "small")[0], _DCP[1:])]


def peer(results: Results, method: str, subject: Subject) -> Peer:
    """Make ratios of what a job wrote about one method."""
    where = LAYOUTS[subject.layout] + ("" if subject.tensors == "large" else ", 3,000 tensors")
    name = f"{method} ({where})"
    held = results.worst(f"{method}.held")
    if not held:
        return Peer(name, why=results.problem or "wrote down nothing")
    torn = any(results.worst(f"{method}.torn"))
    return Peer(
        f"{name}, unstaged" if torn else name,
        stall=over(results, f"{method}.held", "memcpy"),
        persist=ratio(median(results.worst(f"{method}.done")), median(results.worst("raw"))),
        load=over(results, f"{method}.load", f"{method}.read"),
        notes=_notes(results, method, held, torn=torn),
        why=results.problem,
    )


def _notes(results: Results, method: str, held: Sequence[float], *, torn: bool) -> tuple[str, ...]:
    first = ", ".join(f"{each:.3f} s" for each in results.worst(f"{method}.first"))
    notes = [f"held {spread(held)}, first {first}, whole after {spread(results.worst(f'{method}.done'))}"]
    if torn:
        notes.append("a change made right after the save got into its checkpoint: it takes no snapshot of CPU tensors")
    return tuple(notes)


def reference(
    peers: Sequence[Peer], value: Callable[[Peer], float | None], *, only: Sequence[str] = ()
) -> Mapping[str, float | str | None]:
    """The peers' values by their names; with ``only``, of the methods that are named."""
    chosen = [each for each in peers if not only or each.name.startswith(tuple(only))]
    return {each.name: each.word(value(each)) for each in chosen if each.word(value(each)) is not None}
