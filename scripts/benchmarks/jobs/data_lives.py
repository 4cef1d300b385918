"""Runs over the same data: one that goes through, and others that are killed and go on in other worlds.

Each life of a run is a process that loads for all its ranks in turn, and is killed with -9 at a random moment. Now and
then it writes what it has trained on, and the loaders' states, as one file: the checkpoint from which the next life
goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import data_loaders as loaders
import numpy as np
import torch
from data_notes import Notes
from torch.utils.data import Dataset, IterableDataset

from ftrun.data.loader import DataLoader

_BATCH = 12  # of all worlds together
_N = 600
_STEPS = 125  # two epochs and a half
_EVERY = 5
_DEADLINE = 60.0


def _drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))]


class Augmented(Dataset[Any]):
    """Each sample with what was drawn for it."""

    def __len__(self) -> int:
        return _N

    def __getitem__(self, index: int) -> list[float]:
        time.sleep(0.0002)
        return [float(index), *_drawn()]


class Part:
    """One shard of the same."""

    def __init__(self, indices: range) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Any:
        for index in self._indices:
            time.sleep(0.0002)
            yield [float(index), *_drawn()]


class Parts(IterableDataset[Any]):
    """The same, to be read in order."""

    def shard(self, number: int, of: int) -> Part:
        return Part(range(number, _N, of))

    def __iter__(self) -> Any:
        return iter(Part(range(_N)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, required=True, help="of each kind of dataset")
    parser.add_argument("--seed", required=True)
    options = parser.parse_args()
    loaders.quieten()
    dice = random.Random(options.seed)
    notes = Notes(options.out)
    for kind in ("map", "iterable"):
        whole, again = (_life(options.out / f"{kind}-{name}", kind, (1, 0, 2)) for name in ("whole", "again"))
        for name, count in _compared(whole, again).items():
            notes.put(f"control {name}", 0, count)
        kills = run = 0
        while kills < options.kills:
            killed, trained = _storm(options.out / f"{kind}-{run}", kind, dice, options.kills - kills)
            for name, count in _compared(whole, trained).items():
                notes.put(name, run, count)
            kills, run = kills + killed, run + 1
        notes.put(f"kills {kind}", 0, kills)


def _storm(file: Path, kind: str, dice: random.Random, most: int) -> tuple[int, list[Any]]:
    """A run of many lives; returns how often it was killed, and what it trained on."""
    kills = 0
    while True:
        how = (dice.choice([1, 2, 3, 4]), dice.choice([0, 1, 2]), dice.choice([2, 4]))
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            try:
                _life(file, kind, how)
                os._exit(0)
            except BaseException as error:  # said, and then seen as a life that makes no progress
                print(f"{how}: {error!r}", flush=True)
                os._exit(1)
        if kills < most:
            _wait_for(file, _size(file), child, dice.uniform(0.0, 0.4))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise SystemExit("a life fell")
            return kills, _read(file)["trained"]
        kills += 1


def _wait_for(file: Path, size: int, child: int, more: float) -> None:
    """Until there is a new checkpoint, and a little longer."""
    deadline = time.monotonic() + _DEADLINE
    while _size(file) == size and time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.005)
    time.sleep(more)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {"trained": [], "states": []}


def _life(file: Path, kind: str, how: tuple[int, int, int]) -> list[Any]:
    """Train from the checkpoint on, to the end."""
    world, workers, prefetch = how
    saved = _read(file)
    made = [_loader(kind, rank, world, workers, prefetch) for rank in range(world)]
    if saved["states"]:
        _restore(made, saved["states"])
    iterators = [iter(each) for each in made]
    trained = saved["trained"]
    while len(trained) < _STEPS:
        try:
            batches = [next(each) for each in iterators]
        except StopIteration:
            iterators = [iter(each) for each in made]
            continue
        trained.append(_in_order(kind, batches))
        for each in made:
            each.commit()
        if len(trained) % _EVERY == 0 or len(trained) == _STEPS:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps({"trained": trained, "states": [each.state_dict() for each in made]}))
            temporary.rename(file)
    return trained


def _loader(kind: str, rank: int, world: int, workers: int, prefetch: int) -> DataLoader[Any]:
    dataset: Any = Augmented() if kind == "map" else Parts()
    more: dict[str, Any] = {"shuffle": True} if kind == "map" else {"virtual_shards": 16}
    more |= {"prefetch_factor": prefetch} if workers else {}
    share = {"rank": rank, "world_size": world, "global_batch": _BATCH, "seed": loaders.SEED}
    return DataLoader(dataset, **share, num_workers=workers, collate_fn=list, **more)


def _restore(made: list[DataLoader[Any]], states: list[dict[str, Any]]) -> None:
    from ftrun.data.iterable.marks import merged

    shards = [each["shards"] for each in states if each.get("shards") is not None]
    state = states[0] | ({"shards": merged(shards)} if shards else {})
    for each in made:
        each.load_state_dict(state)


def _in_order(kind: str, batches: list[list[Any]]) -> list[Any]:
    """The global batch, as its order has it: a map's ranks take turns, an iterable's ranks follow one another."""
    if kind == "map":
        return [batch[place] for place in range(len(batches[0])) for batch in batches]
    return [sample for batch in batches for sample in batch]


def _compared(expected: list[Any], found: list[Any]) -> dict[str, float]:
    """How often samples came twice or never, in another place, or with other random numbers."""
    one, other = (_counted(each) for each in (expected, found))
    twice = sum(max(0, count - one.get(sample, 0)) for sample, count in other.items())
    never = sum(max(0, count - other.get(sample, 0)) for sample, count in one.items())
    flat = [(a, b) for one_, other_ in zip(expected, found, strict=True) for a, b in zip(one_, other_, strict=True)]
    moved = sum(a[0] != b[0] for a, b in flat)
    drawn = sum(a[0] == b[0] and list(a) != list(b) for a, b in flat)
    return {"duplicates": twice, "misses": never, "moved": moved, "augmentations": drawn, "samples": len(flat)}


def _counted(steps: list[Any]) -> dict[tuple[int, float], int]:
    """How often each sample of each epoch came."""
    counts: dict[tuple[int, float], int] = {}
    flat = [sample[0] for step in steps for sample in step]
    for place, index in enumerate(flat):
        key = (place // (_N - _N % _BATCH), index)
        counts[key] = counts.get(key, 0) + 1
    return counts


if __name__ == "__main__":
    main()
