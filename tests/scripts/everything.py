"""Everything that can make a resumed run differ from one that was never interrupted, in one small training job.

Several epochs of shuffled data; dropout; augmentation from Python's, NumPy's and torch's random numbers, in the loader
and in the loop; batch norm whose statistics differ by rank; averaged weights; two optimizers, one with a scheduler;
gradients accumulated over four steps, so that most checkpoints fall between a backward and its optimizer step.

Each rank appends every step's number and exact loss to ``losses-<rank>.txt``; the weights' digest goes to
``digest-<rank>.txt``.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ftrun

ACCUMULATE = 4
LAST = 20


class Augmented(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> torch.Tensor:
        scale, shift, noise = random.random(), np.random.standard_normal(), torch.randn(12)
        return torch.arange(12) * scale + shift + noise + index / 100


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def digest(*objects: nn.Module) -> str:
    made = hashlib.sha256()
    for each in objects:
        for name, tensor in sorted(each.state_dict().items()):
            made.update(name.encode() + tensor.numpy().tobytes())
    return made.hexdigest()


@ftrun.entrypoint(every=7)
def main(ft: ftrun.Session, options: argparse.Namespace) -> None:
    torch.manual_seed(5)
    model = Model()
    random.seed(100 + ft.rank)
    np.random.seed(200 + ft.rank)
    torch.manual_seed(300 + ft.rank)
    parallel = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False) if ft.world_size > 1 else model
    body = torch.optim.AdamW(model.body.parameters(), lr=0.01)
    head = torch.optim.SGD(model.head.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(body, max_lr=0.02, total_steps=options.total)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    loader = ft.loader(Augmented(), global_batch=12, shuffle=True, seed=11, num_workers=options.workers)
    ft.track(model=model, body=body, head=head, scheduler=scheduler, average=average)

    with Path(f"{options.out}/losses-{ft.rank}.txt").open("a") as losses:
        for batch in ft.steps(loader, total=options.total):
            if options.go and ft.step >= options.total - LAST:
                with ft.phase("eval"):  # to the watch it is no step that hangs
                    while not options.go.exists():
                        time.sleep(0.01)
            noisy = batch + random.random() + torch.from_numpy(np.random.standard_normal(batch.shape)) * 0.1
            loss = (parallel(noisy.float() + torch.randn(12)) - noisy.float().sum(1, keepdim=True)).square().mean()
            loss.backward()
            head.step()
            head.zero_grad()
            if (ft.step + 1) % ACCUMULATE == 0:
                body.step()
                body.zero_grad(set_to_none=ft.step % 2 == 0)
                average.update_parameters(model)
            scheduler.step()
            losses.write(f"{ft.step + 1} {loss.item().hex()}\n")
            losses.flush()
            time.sleep(options.pace)
    Path(f"{options.out}/digest-{ft.rank}.txt").write_text(digest(model, average))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", type=int, default=210)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--go", type=Path, help=f"the last {LAST} steps begin once this file is there")
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
