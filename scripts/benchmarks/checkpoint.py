"""``scripts/bench checkpoint``: what saving and loading costs, and what it takes to lose a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import checkpoint_interference
import checkpoint_load
import checkpoint_memory
import checkpoint_nodes
import checkpoint_peers
import checkpoint_power
import checkpoint_remote
import checkpoint_saves
from checkpoint_jobs import Plan, subjects, train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from checkpoint_jobs import Trained
    from checkpoint_peers import Peer
    from common import Settings
    from figures import Figure

_STALL = ("checkpoint.stall", "checkpoint.stall.overlap")
_SAVES = ("checkpoint.bytes_staged", "checkpoint.persist")
_SCENARIOS = {"memory": ("checkpoint.memory",), "persist": _SAVES, "interference": ("checkpoint.interference",)}
_WITH_PEERS = ("checkpoint.stall", "checkpoint.persist", "checkpoint.load")
_FROM_ONE_JOB = (*_SAVES, "checkpoint.load", "checkpoint.memory", "checkpoint.interference")
_APART = {
    "checkpoint.slow_remote": checkpoint_remote.slow_remote,
    "checkpoint.many_nodes": checkpoint_nodes.many_nodes,
    "checkpoint.power_loss": checkpoint_power.power_loss,
}


def measure(settings: Settings) -> Iterator[Figure]:
    """All figures that were asked for."""
    if settings.wants(*_STALL, *_FROM_ONE_JOB):
        peers = checkpoint_peers.measure(settings) if settings.wants(*_WITH_PEERS) else []
        yield from (each for each in _figures(settings, peers) if settings.wants(each.id))
    for name, part in _APART.items():
        if settings.wants(name):
            yield from part(settings)


def _train(settings: Settings) -> list[Trained]:
    """One job for each layout, which goes through all that is asked of it but the stall."""
    if not settings.wants(*_FROM_ONE_JOB):
        return []
    scenarios = tuple(name for name, ids in _SCENARIOS.items() if settings.wants(*ids))
    plan = Plan(scenarios, settings.count(10, 3))
    return [train(settings, plan, each) for each in subjects(settings, "large")]


def _stalls(settings: Settings, size: int) -> list[Trained]:
    """Jobs that tell how long saves of so many MiB hold training up."""
    plan = Plan(("stall",), settings.count(10, 3))
    chosen = [*subjects(settings, "large", size=size), *subjects(settings, "small", size=size)]
    return [train(settings, plan, each) for each in chosen[: settings.count(4, 3)]]


def _figures(settings: Settings, peers: Sequence[Peer]) -> Iterator[Figure]:
    if settings.wants(*_STALL):
        jobs, half = _stalls(settings, 1024), [] if settings.quick else _stalls(settings, 512)
        yield checkpoint_saves.stall(jobs, half, peers)
        yield checkpoint_saves.overlap(jobs, half)
    large = _train(settings)
    if settings.wants(*_SAVES):
        yield checkpoint_saves.staged(large)
        yield checkpoint_saves.persist(large, peers)
    if settings.wants("checkpoint.memory"):
        yield checkpoint_memory.memory(large)
    if settings.wants("checkpoint.interference"):
        yield checkpoint_interference.interference(large)
    if settings.wants("checkpoint.load"):
        plan = Plan((), 1)
        jobs = [train(settings, plan, each) for each in subjects(settings, "large", size=1024)]
        yield checkpoint_load.loads(settings, jobs, large, peers)
