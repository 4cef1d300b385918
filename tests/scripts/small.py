"""A small training job for tests: a linear model on random data, with knobs for how it goes wrong."""

from __future__ import annotations

import argparse
import time

import torch

import ftrun


class Noise(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8) + index


@ftrun.entrypoint(every=5)
def main(ft: ftrun.Session, options: argparse.Namespace) -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(options.width, 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model) if ft.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ft.loader(Noise(options.samples), global_batch=4, shuffle=True, num_workers=options.workers)
    ft.track(model=model, optimizer=optimizer)
    for batch in ft.steps(loader, total=options.total):
        if options.raise_at and ft.step + 1 == options.raise_at and ft.rank == options.bad_rank:
            raise RuntimeError(f"planted at step {options.raise_at}")
        if options.stop_at and ft.step + 1 == options.stop_at and ft.rank == options.bad_rank:
            ft.request_stop("planted")
        optimizer.zero_grad()
        loss = parallel(batch[:, : options.width]).square().mean()
        loss.backward()
        optimizer.step()
        ft.log(loss=loss)
        if options.pace:
            time.sleep(options.pace)
    if ft.rank == 0:
        print(f"weights {model.weight.sum().item():.9f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", type=int, default=20)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--raise-at", type=int, default=0)
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--bad-rank", type=int, default=0)
    main(parser.parse_args())
