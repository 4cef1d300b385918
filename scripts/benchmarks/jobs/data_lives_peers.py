"""The same question to the peers' loaders: an epoch that is left in its middle and gone on with."""

from __future__ import annotations

import argparse
from typing import Any

import data_loaders as loaders
import numpy as np
import torch
from data_notes import Notes
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.utils.data import DataLoader, Dataset

_N, _BATCH = 600, 12


class Augmented(Dataset[Any]):
    """Each sample with what was drawn for it."""

    def __len__(self) -> int:
        return _N

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(torch.rand(())), float(np.random.rand())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    loaders.quieten()
    notes = Notes(options.out)
    for cycle, consumed in enumerate(range(_BATCH, _N, 10 * _BATCH)):
        first, second = _elastic(0)[:consumed], _elastic(consumed)
        notes.put("elastic sampler", cycle, _wrong([each[0] for each in (*first, *second)]) / _N)
    notes.put("StatefulDataLoader", 0, _stateful(20))


def _elastic(start: int) -> list[Any]:
    sampler: Any = ElasticDistributedSampler(Augmented(), num_replicas=1, rank=0, start_index=start)
    loader = DataLoader(Augmented(), batch_size=_BATCH, sampler=sampler, collate_fn=list)
    return [sample for batch in loader for sample in batch]


def _wrong(indices: list[float]) -> int:
    """Duplicates and misses."""
    return len(indices) - len(set(indices)) + _N - len(set(indices))


def _stateful(after: int) -> float:
    """The share of the samples after a resume that are others, or have other random numbers."""
    torch.manual_seed(1)
    loader = _made()
    batches = iter(loader)
    for _ in range(after):
        next(batches)
    state = loader.state_dict()
    rest = [sample for batch in batches for sample in batch]
    resumed = _made()
    resumed.load_state_dict(state)
    again = [sample for batch in resumed for sample in batch]
    return sum(one != other for one, other in zip(rest, again, strict=True)) / len(rest)


def _made() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    made = torch.Generator().manual_seed(loaders.SEED)
    return StatefulDataLoader(
        Augmented(), batch_size=_BATCH, shuffle=True, num_workers=1, collate_fn=list, generator=made
    )


if __name__ == "__main__":
    main()
