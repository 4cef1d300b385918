"""The same training as people write it for torchrun: rank 0 writes ``torch.save``, everybody loads it at the start."""

from __future__ import annotations

import argparse

import stamps

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    written = stamps.Stamps(options.out)
    written.write("start")

from pathlib import Path

import model as training
import torch.distributed as dist
import torch_saves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = training.build()
    path = Path(options.out) / "checkpoint.pt"
    step = torch_saves.load(path, model, optimizer)
    parallel = nn.parallel.DistributedDataParallel(model)
    numbers = training.Numbers()
    sampler = DistributedSampler(numbers, shuffle=True, seed=17)
    loader = DataLoader(numbers, batch_size=training.BATCH, sampler=sampler)
    while True:
        sampler.set_epoch(step // len(loader))
        for rows in loader:
            written.write("begin", step)
            training.train_step(parallel, optimizer, rows, options.pace)
            step += 1
            written.write("step", step)
            if step % options.every == 0 and dist.get_rank() == 0:
                torch_saves.save(path, model, optimizer, step)


if __name__ == "__main__":
    main()
