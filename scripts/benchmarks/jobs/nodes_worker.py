"""A worker that is there and not much else: a step every 50 ms until a file named ``done`` appears.

Silent, it imports no torch, and no other worker hears of it; talking, each step is an all-reduce of all ranks. Under
ftrun each step beats the pulse, as an optimizer's step would.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nodes_diary

if TYPE_CHECKING:
    from collections.abc import Callable

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--talk", action="store_true")
    parser.add_argument("--pace", type=float, default=0.05)
    options = parser.parse_args()
    diary = nodes_diary.Diary(options.out)
    diary.write("start")


def asked_to_end() -> bool:
    return (Path(options.out) / "done").exists()


def pulse() -> Callable[[int], None]:
    """What takes the number of a step."""
    if not any(name.startswith("FTRUN_") for name in os.environ):
        return lambda _step: None
    from ftrun.contract import WorkerContract
    from ftrun.pulse import Pulse
    from ftrun.session import parked

    contract = WorkerContract.from_environment(os.environ)
    if contract is None:
        return lambda _step: None
    directory = Path(contract.worker_dir)
    page = Pulse(directory / "pulse")

    def beat(step: int) -> None:
        page.step(step)
        if step == 1:
            parked.note_imports(directory)

    return beat


def silent() -> None:
    step, beat = 0, pulse()
    while not asked_to_end():
        time.sleep(options.pace)
        step += 1
        beat(step)
        diary.write("step", step=step)


def talking() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, beat = 0, pulse()
    while True:
        done = torch.tensor(float(asked_to_end()))
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done:
            break
        time.sleep(options.pace)
        step += 1
        beat(step)
        diary.write("step", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    (talking if options.talk else silent)()
