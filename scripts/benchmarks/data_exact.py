"""``data.exact``: samples that come twice, never, elsewhere or with other random numbers, after kills at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_jobs import every, run_ours, run_peers
from figures import Figure, Target, median

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common import Settings

_WRONG = ("duplicates", "misses", "moved", "augmentations")


def exact(settings: Settings) -> Iterator[Figure]:
    """Runs that are killed and go on with 1 to 4 ranks and 0 to 2 workers, against one that goes through."""
    kills = settings.count(20, 4)
    seed = str(settings.random("exact").random())
    ours = run_ours(settings, "data_lives.py", "--kills", str(kills), "--seed", seed)
    peers = run_peers(settings, "data_lives_peers.py")
    counts = {name: sum(every(ours, name)) for name in _WRONG}
    elastic, stateful = (median(every(peers, name)) for name in ("elastic sampler", "StatefulDataLoader"))
    done = {kind: sum(every(ours, f"kills {kind}")) for kind in ("map", "iterable")}
    yield Figure(
        "data.exact",
        None if ours.problem or not all(done.values()) else sum(counts.values()),
        Target("=", 0.0),
        control=sum(sum(every(ours, f"control {name}")) for name in _WRONG) if not ours.problem else None,
        n=int(sum(done.values())),
        reference={
            **counts,
            "torch's elastic sampler, share of samples twice or never": elastic
            if elastic is not None
            else peers.problem,
            "StatefulDataLoader, share of augmentations": stateful if stateful is not None else peers.problem,
        },
        notes=[_words(done, sum(every(ours, "samples")), seed), *filter(None, [ours.problem])],
    )


def _words(kills: Mapping[str, float], samples: float, seed: str) -> str:
    of = " and ".join(f"{count:.0f} kills over a dataset of the {kind} kind" for kind, count in kills.items())
    return f"{of}; {samples:.0f} samples compared; seed {seed}"
