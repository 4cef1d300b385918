"""The same training on many nodes as people write it for torchrun, with ``torch.save`` into one directory."""

from __future__ import annotations

import argparse

import nodes_diary

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--pace", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    diary = nodes_diary.Diary(options.out)
    diary.write("start")

from pathlib import Path

import model as training
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 32


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = training.build()
    path = Path(options.out) / "checkpoint.pt"
    step = 0
    if path.exists():
        saved = torch.load(path, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
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
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()
