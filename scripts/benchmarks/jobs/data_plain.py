"""Two epochs of a remote's files with torch's DataLoader and two workers, as two ranks share them: nothing is kept."""

from __future__ import annotations

import argparse
from pathlib import Path

import data_pictures as pictures
from data_notes import Notes
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--remote", required=True)
    options = parser.parse_args()
    paths = sorted(str(each) for each in Path(options.remote).iterdir())
    dataset = pictures.Plain(paths, pictures.Decoded(0.0))
    samples = 0
    for rank in range(2):
        sampler: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
        samples += sum(len(batch) for _ in range(2) for batch in loader)
    Notes(options.out).put("samples", 0, samples)


if __name__ == "__main__":
    main()
