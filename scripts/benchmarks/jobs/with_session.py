"""The training with ftrun's Session: checkpoints, loader and resuming are its business."""

from __future__ import annotations

import argparse

import stamps

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], default="ddp")
    options = parser.parse_args()
    written = stamps.Stamps(options.out)
    written.write("start")

import model as training
from torch import nn

import ftrun


@ftrun.entrypoint(every=options.every)
def main(ft: ftrun.Session) -> None:
    sharded = options.layout == "fsdp2"
    model, optimizer = training.build(sharded=sharded)
    parallel = model if sharded else nn.parallel.DistributedDataParallel(model)
    batch = training.BATCH * ft.world_size
    loader = ft.loader(training.Numbers(), global_batch=batch, shuffle=True, seed=17)
    ft.track(model=model, optimizer=optimizer)
    for rows in ft.steps(loader, total=1_000_000):
        written.write("begin", ft.step)
        training.train_step(parallel, optimizer, rows, options.pace)
        written.write("step", ft.step + 1)


if __name__ == "__main__":
    main()
