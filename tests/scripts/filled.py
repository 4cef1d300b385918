"""Reads files of a remote through the cache: ``filled.py REMOTE CACHE FILES STEPS WORKERS``.

It makes no more steps than a file ``hold`` says, for as long as there is one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import ftrun


def number(path: Path) -> int:
    return int(path.read_bytes()[:8])


def held_at(hold: Path, never: int) -> int:
    try:
        return int(hold.read_text())
    except FileNotFoundError:
        return never


@ftrun.entrypoint
def main(ft: ftrun.Session) -> None:
    from ftrun.data.cache.dataset import CachedDataset
    from ftrun.data.cache.files import CachedFiles

    remote, cache, files, steps, workers = sys.argv[1:]
    urls = [f"kit://{remote}/f{index:04d}.bin" for index in range(int(files))]
    dataset = CachedDataset(urls, number, CachedFiles(cache, reserve_free=0))
    loader = ft.loader(dataset, global_batch=8, shuffle=True, seed=3, num_workers=int(workers))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ft.track(weight=torch.nn.ParameterList([weight]), optimizer=optimizer)
    note = Path(f"seen-{ft.rank}.txt").open("a", buffering=1)  # noqa: SIM115 - as long as the process
    for batch in ft.steps(loader, total=int(steps)):
        note.write(f"{os.getpid()} {ft.step} {time.time()} {' '.join(map(str, batch.tolist()))}\n")
        time.sleep(0.02)
        while ft.step >= held_at(Path("hold"), int(steps)):
            time.sleep(0.01)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ft.log(loss=weight.sum())


main()
