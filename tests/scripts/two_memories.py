"""Trains a replica on several nodes, and pauses where it is told to: a step waits for the file of its name."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ftrun

WAITS = {int(step) for step in os.environ["WAITS"].split(",")}
NUMBERS = 1_500_000  # of four bytes


@ftrun.entrypoint
def main(ft: ftrun.Session) -> None:
    weight = torch.nn.Parameter(torch.zeros(NUMBERS))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    ft.track(weight=weight_of(weight), optimizer=optimizer)
    for step in ft.steps(total=int(os.environ["TOTAL"])):
        here = step + 1
        while here in WAITS and not Path(f"go-{here}").exists():
            time.sleep(0.01)
        weight.grad = torch.full_like(weight, 1.0 + step % 7)
        dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        if int(os.environ["RANK"]) == 0:
            with Path("steps.jsonl").open("a") as lines:
                value = [float(weight.detach()[place]) for place in (0, -1)]
                lines.write(json.dumps({"step": here, "value": value, "world": dist.get_world_size()}) + "\n")


def weight_of(weight: torch.nn.Parameter) -> torch.nn.Module:
    """A module around it: that is what knows how to give its state out and take it back."""
    module = torch.nn.Module()
    module.register_parameter("weight", weight)
    return module


main()
