"""``data.kill_storm``: what 250 kills leave of the cache and of the loaders' workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_jobs import every, run_ours
from figures import Figure, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from checkpoint_results import Results
    from common import Settings

_COUNTS = {
    "corrupt reads": ("corrupt", "torn after"),
    "hangs": ("hangs",),
    "bytes left after the next start": ("left", "held"),
}


def kill_storm(settings: Settings) -> Iterator[Figure]:
    """Corrupt reads, hangs, bytes left and orphans, all together."""
    kills = settings.count(250, 25)
    seed = str(settings.random("storm").random())
    storm = run_ours(settings, "data_kills.py", "--kills", str(kills), "--seed", seed)
    trainers = run_ours(settings, "data_orphans.py", "--trainers", str(settings.count(6, 2)))
    counts = {name: sum(map(storm.sum, keys)) for name, keys in _COUNTS.items()}
    orphans, theirs = (sum(every(trainers, name)) for name in ("orphans", "torch orphans"))
    counts["orphans after 5 s"] = orphans
    problem = storm.problem or trainers.problem
    yield Figure(
        "data.kill_storm",
        None if problem else sum(counts.values()),
        Target("=", 0.0),
        n=int(storm.sum("kills")),
        reference={
            **counts,
            "torch's orphans": f"{theirs:.0f} of {sum(every(trainers, 'torch workers')):.0f}",
            "simplecache's kills with torn files": f"{storm.sum('simplecache torn'):.0f} of {min(kills, 20)}",
        },
        notes=[_words(storm), *filter(None, [problem])],
    )


def _words(storm: Results) -> str:
    reads = f"{storm.sum('reads'):.0f} files read in {storm.sum('seconds'):.0f} s"
    return f"{reads}; {storm.sum('debris'):.0f} bytes of debris before the next start"
