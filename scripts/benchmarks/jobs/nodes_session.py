"""A training on many nodes with ftrun's Session. The batch is the same however many ranks there are."""

from __future__ import annotations

import nodes_diary

if __name__ == "__main__":
    options, diary = nodes_diary.begun()

import model as training
from torch import nn

import ftrun

BATCH = 32


@ftrun.entrypoint(every=options.every)
def main(ft: ftrun.Session) -> None:
    model, optimizer = training.build()
    parallel = nn.parallel.DistributedDataParallel(model)
    loader = ft.loader(training.Numbers(), global_batch=BATCH, shuffle=True, seed=17)
    ft.track(model=model, optimizer=optimizer)
    for rows in ft.steps(loader, total=1_000_000):
        training.train_step(parallel, optimizer, rows, options.pace)
        diary.write("step", step=ft.step + 1)


if __name__ == "__main__":
    main()
