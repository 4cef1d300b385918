"""``data.wait`` and ``data.warm``: training on files of a slow remote, cold and warm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import data_remote
from checkpoint_results import Results
from data_jobs import every, pairs, run_ours, run_peers
from figures import Figure, Target, median, ratio, spread
from peers import Absent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common import Settings

_SECONDS = 0.02
_FILES = 256
_WORDS = "32 steps of 8 files and 40 ms; 20 ms to open a remote file; a sample in each file, also for the peers"
_OURS = ("ftrun", "ftrun again", "ftrun, 2 workers")
_TORCH = ("torch, 6 workers, prefetch 4", "torch, 2 workers", "torch, 0 workers")
_SHARDS = ("streaming", "litdata")
_WAIT = Target("<=", 0.08)
_WARM = Target(">=", 0.95)


def wait(settings: Settings) -> Iterator[Figure]:
    """``data.wait``: the share of a cold run of 32 steps that training waits for data."""
    source = settings.folder("remote")
    data_remote.files(source / "files", _FILES)
    with data_remote.mounted(source, _SECONDS) as mount:
        if isinstance(mount, Absent):
            yield Figure("data.wait", None, _WAIT, notes=[mount.why])
            return
        results = run_ours(settings, "data_wait.py", "--remote", mount.path, "--methods", *_often(settings))
        peers = _sharded(settings, source, mount.path)
    waits = every(results, "ftrun")
    yield Figure(
        "data.wait",
        median(waits),
        _WAIT,
        control=median(every(results, "ftrun again")),
        n=len(waits),
        reference={
            **{each: median(every(results, each)) for each in (*_OURS[2:], *_TORCH)},
            **{each: median(every(peers, each)) or peers.problem or "fell" for each in _SHARDS if not settings.quick},
        },
        notes=[
            _WORDS,
            *(f"{each}: {spread(every(results, each), '')}" for each in (*_OURS, *_TORCH)),
            *filter(None, [results.problem]),
        ],
    )


def _often(settings: Settings) -> list[str]:
    counts = dict.fromkeys(_OURS[:2], settings.count(10, 3)) | {_OURS[2]: settings.count(4, 1)}
    counts |= {_TORCH[0]: settings.count(6, 1), _TORCH[1]: settings.count(3, 1), _TORCH[2]: settings.count(2, 1)}
    return [f"{name}={count}" for name, count in counts.items()]


def _sharded(settings: Settings, source: Path, remote: Path) -> Results:
    if settings.quick:
        return Results()
    made = run_peers(settings, "data_shards.py", "--files", source / "files", "--into", source)
    if made.problem:
        return made
    return run_peers(settings, "data_wait.py", "--remote", remote, "--methods", *(f"{each}=5" for each in _SHARDS))


def warm(settings: Settings) -> Iterator[Figure]:
    """``data.warm``: samples a second of a second epoch, over those of local files."""
    source = settings.folder("remote")
    data_remote.files(source, settings.count(_FILES, 64))
    with data_remote.mounted(source, _SECONDS) as mount:
        if isinstance(mount, Absent):
            yield Figure("data.warm", None, _WARM, notes=[mount.why])
            return
        where = ("--remote", mount.path, "--local", source, "--cycles", str(settings.count(10, 3)))
        results = run_ours(settings, "data_warm.py", *where)
        opens = mount.counts().opens
    ratios = pairs(results, "cached", "local")
    first, second = (median(every(results, each)) for each in ("first", "cached"))
    yield Figure(
        "data.warm",
        median(ratios),
        _WARM,
        control=median(pairs(results, "local again", "local")),
        n=len(ratios),
        reference={
            "only read, not decoded": median(pairs(results, "cached, read only", "local, read only")),
            "its gain over the first epoch": ratio(second, first),
            "seeds' gains": "7.3, 17.7",
        },
        notes=[
            f"files of {data_remote.SIZE // 1000} kB and 1 ms to decode, 0 workers; {opens} opened on the remote",
            *(f"{each}: {spread(every(results, each), 'samples/s')}" for each in ("local", "cached")),
            *filter(None, [results.problem]),
        ],
    )
