"""Trains on whole numbers: at each step the same loss, to the last bit, however many ranks share the batch.

Each step goes into the nodes' common diary with its loss and its rows. A file named ``done`` ends it well; the step
named by ``WAIT`` waits for one named ``go``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import nodes_diary
import torch
import torch.distributed as dist

import ftrun

ROWS = 10_007
BATCH = 12
TOTAL = int(os.environ.get("TOTAL", "100000"))
PACE = float(os.environ.get("PACE", "0.03"))
WAIT = int(os.environ.get("WAIT", "0"))


class Numbers(torch.utils.data.Dataset):
    """Each row is its own number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Weight:
    """All that is learnt: one number that depends on every batch before, and on their order."""

    def __init__(self) -> None:
        self.value = torch.zeros((), dtype=torch.int64)

    def learn(self, total: torch.Tensor) -> None:
        self.value = (self.value * 31 + total) % 1_000_003

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@ftrun.entrypoint
def main(ft: ftrun.Session) -> None:
    diary = nodes_diary.Diary(os.environ["OUT"])
    diary.write("start")
    weight = Weight()
    ft.track(weight=weight)
    loader = ft.loader(Numbers(), global_batch=BATCH, shuffle=True, seed=17)
    for rows in ft.steps(loader, total=TOTAL):
        time.sleep(PACE)
        while ft.step + 1 == WAIT and not (Path(os.environ["OUT"]) / "go").exists():
            time.sleep(0.01)
        told = torch.tensor([int(rows.sum()), int(not (Path(os.environ["OUT"]) / "done").exists())])
        dist.all_reduce(told)
        weight.learn(told[0])
        diary.write("step", step=ft.step + 1, loss=int(weight.value), rows=rows.tolist())
        if not told[1]:
            break


if __name__ == "__main__":
    main()
