"""``data.throughput``: samples a second over those of torch's DataLoader, in the training process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_jobs import every, pairs, run_ours, run_peers
from figures import Figure, Target, median, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from checkpoint_results import Results
    from common import Settings

_BATCH = 32
_FEWER = 4096
_CASES = {
    "data.throughput": (32_768, 0.0, 0.90),
    "data.throughput.1ms": (320, 0.001, 0.97),
}
"""Samples in an epoch, seconds that each takes, and the target."""
_WORDS = (
    "free samples: rows of a table in memory, of a class of the user's of which no loader knows anything; ftrun with "
    "its default: each sample has random numbers of its own. Drawing: from torch, and from random, NumPy and torch; "
    "over torch's loader with the same samples"
)
_OURS = ("torch", "ftrun", "torch again")
_UNSEEDED = "ftrun, no sample seeds"
_DRAWING = ("drawing from one", "drawing from three")
_PEERS = ("StatefulDataLoader", "streaming", "litdata")


def throughput(settings: Settings) -> Iterator[Figure]:
    """Free samples, and samples of a millisecond."""
    for name in _CASES:
        if settings.wants(name):
            yield _figure(settings, name)


def _figure(settings: Settings, name: str) -> Figure:
    samples, seconds, least = _CASES[name]
    what = ("--batch", str(_BATCH), "--seconds", str(seconds), "--methods")
    drawing = () if seconds else _DRAWING
    more = () if seconds else (_UNSEEDED, *(f"{who}, {how}" for how in drawing for who in ("torch", "ftrun")))
    size = ("--samples", str(samples), "--cycles", str(settings.count(15, 3)))
    ours = run_ours(settings, "data_epochs.py", *size, *what, *_OURS, *more)
    # Those two write the samples into files of their own first, which takes longer than a quick look should.
    size = ("--samples", str(min(samples, _FEWER)), "--cycles", str(settings.count(10, 3)))
    asked = _PEERS[:1] if settings.quick else _PEERS
    peers = run_peers(settings, "data_epochs.py", *size, *what, "torch", *asked)
    ratios = pairs(ours, "ftrun", "torch")
    return Figure(
        name,
        median(ratios),
        Target(">=", least),
        control=median(pairs(ours, "torch again", "torch")),
        n=len(ratios),
        reference={**_variants(ours, drawing), **_beside(peers, asked)},
        notes=[
            f"ftrun over torch {spread(ratios, '')}, 0 workers, batches of {_BATCH}",
            *(f"{each}: {spread(every(ours, each), 'samples/s')}" for each in (*_OURS, *more)),
            *([] if seconds else [_WORDS]),
            *filter(None, [ours.problem]),
        ],
    )


def _variants(ours: Results, drawing: Sequence[str]) -> dict[str, float | str | None]:
    found = {f"ftrun, {how}": median(pairs(ours, f"ftrun, {how}", f"torch, {how}")) for how in drawing}
    return {_UNSEEDED: median(pairs(ours, _UNSEEDED, "torch")), **found} if drawing else {}


def _beside(peers: Results, asked: Sequence[str]) -> Mapping[str, float | str | None]:
    fell = peers.problem or "fell; see --keep"
    return {each: median(pairs(peers, each, "torch")) or fell for each in asked}
