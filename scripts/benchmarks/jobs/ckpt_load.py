"""Opens a Session, gets its state back, and leaves: how long that takes, and a plain read of the same bytes."""

from __future__ import annotations

import argparse
import mmap
import time
from functools import partial
from pathlib import Path

import ckpt_clock as clock
import ckpt_state as state
import torch.distributed as dist

import ftrun

READS = 3
"""Plain reads, of which the second counts and the third is the control: the first one touches the buffer."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--tensors", choices=state.COUNTS, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--files", required=True, help="root of the checkpoints, empty for a fresh start")
    parser.add_argument("--cycle", type=int, required=True)
    parser.add_argument("--stepped", action="store_true", help="the optimizers have made a step: their state is there")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    trainee = state.build(options.layout, options.tensors, options.size, momentum=options.stepped)
    written = clock.Clock(options.out)
    dist.barrier()
    began = time.perf_counter()
    with ftrun.Session.open(process_group=False) as ft:
        ft.track(**trainee.tracked)
        seconds = time.perf_counter() - began
        written.put("loaded" if ft.resume else "fresh", options.cycle, seconds)
        if ft.resume is not None:
            read(written, options, ft.resume.name)
    dist.destroy_process_group()


def read(written: clock.Clock, options: argparse.Namespace, name: str) -> None:
    rank = f"r{dist.get_rank():05d}" if options.layout == "fsdp2" else "r"
    files = sorted((Path(options.files) / "ckpt" / name).glob(f"{rank}*.safetensors"))
    into = mmap.mmap(-1, sum(each.stat().st_size for each in files) + 1)
    for number in range(READS):
        name = ("warm", "read", "read again")[number]
        written.time(name, options.cycle, lambda: clock.read_all(files, into))
    written.put("bytes", options.cycle, len(into) - 1)
    for name in () if options.stepped else ("fresh read", "fresh read again"):
        with half_fresh(len(into)) as target:
            written.time(name, options.cycle, partial(clock.read_all, files, target))


def half_fresh(size: int) -> mmap.mmap:
    """Memory of which the process owns the first half only.

    So it is where a state is loaded: the weights are there, and what the optimizer adds to them is not.
    """
    made = mmap.mmap(-1, size)
    for page in range(0, size // 2, mmap.PAGESIZE):
        made[page] = 1
    return made


if __name__ == "__main__":
    main()
