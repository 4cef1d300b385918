"""The same training on many nodes as people write it for torchrun, with ``torch.save`` into one directory."""

from __future__ import annotations

import nodes_diary

if __name__ == "__main__":
    options, diary = nodes_diary.begun()

from pathlib import Path

import model as training
import torch.distributed as dist
import torch_saves
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 32


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = training.build()
    path = Path(options.out) / "checkpoint.pt"
    step = torch_saves.load(path, model, optimizer)
    parallel = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(training.Numbers(), shuffle=True, seed=17)
    loader = DataLoader(training.Numbers(), batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    while True:
        sampler.set_epoch(step // len(loader))
        for rows in loader:
            training.train_step(parallel, optimizer, rows, options.pace)
            step += 1
            diary.write("step", step=step)
            if step % options.every == 0 and dist.get_rank() == 0:
                torch_saves.save(path, model, optimizer, step)


if __name__ == "__main__":
    main()
