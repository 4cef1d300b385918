"""Figures of single saves: how long training is held, what is staged, and when it is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoint_jobs import RANKS
from checkpoint_peers import reference
from checkpoint_results import Case, figure, over
from figures import Target, median, ratio, spread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from checkpoint_jobs import Trained
    from checkpoint_peers import Peer
    from figures import Figure


def stall(jobs: Sequence[Trained], half: Sequence[Trained], peers: Sequence[Peer]) -> Figure:
    """``checkpoint.stall``: the optimizer steps right after the save, so nothing overlaps.

    Args:
        jobs: of 1 GiB; these decide.
        half: of half as much, beside them.
        peers: what others take for half as much.
    """
    cases = [_held(each, "blocking") for each in jobs]
    notes = [f"{each.name}: {note}" for each in peers for note in each.notes]
    beside = _of_half(half, "blocking") | reference(peers, lambda each: each.stall)
    return figure("checkpoint.stall", cases, Target("<=", 1.1), beside, notes)


def overlap(jobs: Sequence[Trained], half: Sequence[Trained]) -> Figure:
    """``checkpoint.stall.overlap``: forward and backward on a device take four times the copy, and the CPU sleeps."""
    cases = [_held(each, "overlap") for each in jobs]
    busy = {f"{each.subject.name}, CPU busy": over(each.results, "busy.held", "memcpy") for each in jobs}
    notes = [
        "CPU busy: as many ranks as cores compute without a pause, so that the copy finds no time of its own",
        "what a step takes to begin where nothing was saved is taken off what it waits at the fence",
    ]
    beside = _of_half(half, "overlap") | busy
    return figure("checkpoint.stall.overlap", cases, Target("<=", 0.1), beside, notes)


def _of_half(half: Sequence[Trained], how: str) -> dict[str, float | None]:
    return {f"{each.subject.name}, 512 MiB": _held(each, how).value for each in half}


def _held(job: Trained, how: str) -> Case:
    results = job.results
    if results.problem:
        return Case(job.subject.name, None, notes=(results.problem,))
    names = (f"{how}.held", f"{how}.fence", f"{how}.computed", "memcpy")
    held, fence, computed, copy = map(results.worst, names)
    first = ", ".join(f"{each:.3f} s" for each in results.worst("first.held"))
    notes = (
        f"held {spread(held)}, of it in the fence {spread(fence)}, memcpy {spread(copy)}",
        f"processor time of the training thread in save() {spread([1e3 * each for each in computed], 'ms')}",
        f"first saves, not counted: {first}",
    )
    ours, control = over(results, f"{how}.held", "memcpy"), over(results, "memcpy again", "memcpy")
    return Case(job.subject.name, ours, control, len(held), notes)


def persist(jobs: Sequence[Trained], peers: Sequence[Peer]) -> Figure:
    """``checkpoint.persist``: from the moment training goes on until the commit, over a raw write and fsync."""
    synchronous = reference(peers, lambda each: each.persist, only=("torch.save", "dcp.save"))
    notes = ["raw: each rank writes its bytes with one thread, all ranks at once"]
    return figure("checkpoint.persist", [_persisted(each) for each in jobs], Target("<=", 1.15), synchronous, notes)


def _persisted(job: Trained) -> Case:
    results = job.results
    seconds, raw = results.spans("blocking.released", "blocking.committed"), results.worst("raw")
    note = f"until the commit {spread(seconds)}, raw {spread(raw)}"
    value = None if results.problem else ratio(median(seconds), median(raw))
    control = ratio(median(raw[1::2]), median(raw[::2]))
    return Case(job.subject.name, value, control, len(seconds), (results.problem or note,))


def staged(jobs: Sequence[Trained]) -> Figure:
    """``checkpoint.bytes_staged``: of the rank that stages most, over the bytes of the state, each counted once."""
    target = Target("<=", round(1.01 / RANKS, 4))
    return figure("checkpoint.bytes_staged", [_staged(each) for each in jobs], target, {"DCP": "the whole replica"})


def _staged(job: Trained) -> Case:
    """Rank 0's bytes are in its events; those of the others are at least what they have stored."""
    saved = [float(each["size"]) for each in job.events("saved")]
    stored = stored_bytes(job.folder)
    total = next(iter(job.results.worst("total")), 0.0)
    values = [ratio(max([size, *stored]), total) for size in saved]
    found = [each for each in values if each is not None]
    note = f"rank 0 staged {max(saved, default=0.0):,.0f} bytes of {total:,.0f}; sizes of the ranks' files: {stored}"
    control = ratio(median(found[1::2]), median(found[::2]))
    value = None if job.results.problem else median(found)
    return Case(job.subject.name, value, control, len(found), (job.results.problem or note,))


def stored_bytes(folder: Path) -> list[int]:
    """Size of each rank's tensors in one of the checkpoints."""
    attempts = sorted((folder / "runs" / "bench" / "checkpoints" / "ckpt").glob("e*"))
    return [each.stat().st_size for each in sorted(attempts[-1].glob("r*.safetensors"))] if attempts else []
