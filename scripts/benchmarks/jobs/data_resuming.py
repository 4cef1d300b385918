"""Time from a stored position to the first batch, at several samples of an epoch."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import data_loaders as loaders
import torch
from data_notes import Notes
from torch.utils.data import Dataset, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

_N = 12_000_000
_BATCH = 100
_SHARDS = 64


class Numbers(Dataset[int]):
    """A map-style dataset of which nothing is stored."""

    def __len__(self) -> int:
        return _N

    def __getitem__(self, index: int) -> int:
        return index


class Stretch:
    """One shard of them, which can be read from anywhere."""

    def __init__(self, numbers: range) -> None:
        self._numbers, self._at = numbers, 0

    def __len__(self) -> int:
        return len(self._numbers)

    def seek(self, at: int) -> None:
        self._at = at

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers[self._at :])


class Stretches(IterableDataset[int]):
    """The same numbers, to be read in order."""

    def shard(self, number: int, of: int) -> Stretch:
        return Stretch(range(number, _N, of))

    def __iter__(self) -> Iterator[int]:
        return iter(range(_N))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--points", type=int, nargs="+", required=True, help="samples of the epoch")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--cycles", type=int, required=True)
    options = parser.parse_args()
    loaders.quieten()
    notes = Notes(options.out)
    # The first round imports and warms up, where there is more than one.
    for cycle in range(-1 if options.cycles > 1 else 0, options.cycles):
        for method in options.methods:
            for point, name in _points(method, options):
                seconds = _METHODS[method.partition(",")[0]](point, "iterable" in method, int(method[-1]))
                if cycle >= 0:
                    notes.put(name, cycle, seconds)


def _points(method: str, options: argparse.Namespace) -> list[tuple[int, str]]:
    """All of them, and the first one again as the control."""
    asked = [(point, f"{method} at {point}") for point in options.points]
    return [*asked, (options.points[0], f"{method} again")] if options.cycles > 1 else asked


def _ftrun(point: int, iterable: bool, workers: int) -> float:
    loader = _ours(iterable, workers)
    state = loader.state_dict() | {"samples": point}
    return _timed(lambda: _resumed(_ours(iterable, workers), state))


def _ours(iterable: bool, workers: int) -> Any:
    from ftrun.data.loader import DataLoader

    if iterable:
        return DataLoader(Stretches(), global_batch=_BATCH, num_workers=workers, virtual_shards=_SHARDS)
    return DataLoader(Numbers(), global_batch=_BATCH, shuffle=True, seed=loaders.SEED, num_workers=workers)


def _stateful(point: int, iterable: bool, workers: int) -> float:
    loader = _theirs(iterable, workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    return _timed(lambda: _resumed(_theirs(iterable, workers), _moved(state, point)))


def _moved(state: Any, samples: int) -> Any:
    """A state as it is after so many samples, which takes a run up to there otherwise."""
    if not isinstance(state, dict):
        return state
    known = {"samples_yielded": samples, "yielded": samples}
    known |= dict.fromkeys(("_num_yielded", "_sampler_iter_yielded"), samples // _BATCH)
    return {key: known[key] if key in known else _moved(value, samples) for key, value in state.items()}


def _theirs(iterable: bool, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if iterable:
        return StatefulDataLoader(Stretches(), batch_size=_BATCH, num_workers=workers)
    made = torch.Generator().manual_seed(loaders.SEED)
    return StatefulDataLoader(Numbers(), batch_size=_BATCH, shuffle=True, num_workers=workers, generator=made)


def _resumed(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    iterator = iter(loader)
    next(iterator)
    return iterator


def _timed(action: Any) -> float:
    began = time.perf_counter()
    kept = action()
    seconds = time.perf_counter() - began
    del kept
    return seconds


_METHODS = {"ftrun": _ftrun, "StatefulDataLoader": _stateful}


if __name__ == "__main__":
    main()
