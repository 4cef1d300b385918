"""The same state saved and loaded by ftrun's peers, timed as their users meet them. Needs no ftrun.

``--methods`` names those that take turns. Getting the state dictionary is not counted.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import time
from pathlib import Path

import ckpt_clock as clock
import ckpt_peer_methods as peers
import ckpt_state as state
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

WARM = 1
"""Saves of each before those that are measured."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--methods", required=True)
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--tensors", choices=state.COUNTS, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    out = Path(options.out)
    trainee = state.build(options.layout, options.tensors, options.size)
    written = clock.Clock(options.out)
    states, shared = trainee.states(), options.layout == "ddp"
    methods = {name: peers.METHODS[name](states, shared) for name in options.methods.split(",")}
    base = clock.Baseline(trainee.owned, out / f"raw-{dist.get_rank()}")
    for cycle in range(-WARM, options.cycles):
        if cycle >= 0:
            for name in ("memcpy", "memcpy again"):
                written.time(name, cycle, base.copy)
            written.time("raw", cycle, base.write)
            base.forget()
        for name, method in methods.items():
            save(written, name, cycle, method, out / f"{name}-{cycle}")
            if cycle + 1 < options.cycles:
                remove(out / f"{name}-{cycle}")
    for name, method in methods.items():
        if isinstance(method, peers.Loadable):
            time_loads(written, name, method, out / f"{name}-{options.cycles - 1}", options.cycles)
        if getattr(method, "asynchronous", False):
            put_whether_torn(written, name, method, states, out / f"{name}-torn")
    for method in methods.values():
        method.close()
    dist.barrier()
    dist.destroy_process_group()


def save(written: clock.Clock, name: str, cycle: int, method: peers.Method, path: Path) -> None:
    dist.barrier()
    began = time.perf_counter()
    method.save(path)
    held = time.perf_counter() - began
    method.finish()
    dist.barrier()
    done = time.perf_counter() - began
    kind = "first" if cycle < 0 else "held"
    written.put(f"{name}.{kind}", max(cycle, 0), held)
    if cycle >= 0:
        written.put(f"{name}.done", cycle, done)


def time_loads(written: clock.Clock, name: str, method: peers.Loadable, path: Path, cycles: int) -> None:
    """Loads and plain reads of the bytes that this rank needs, in turns; the page cache is warm."""
    files = method.files(path)
    into = mmap.mmap(-1, sum(each.stat().st_size for each in files) + 1)
    clock.read_all(files, into)
    for cycle in range(cycles):
        written.time(f"{name}.read", cycle, lambda: clock.read_all(files, into))
        written.time(f"{name}.load", cycle, lambda: method.load(path))


def put_whether_torn(
    written: clock.Clock, name: str, method: peers.Method, states: dict[str, torch.Tensor], path: Path
) -> None:
    """Whether a change that the training makes right after the save gets into the checkpoint."""
    key = max(states, key=lambda each: states[each].numel())
    changed = state.local(states[key])
    kept = changed.clone()
    dist.barrier()
    method.save(path)
    changed.fill_(-1.0)
    method.finish()
    dist.barrier()
    read = {key: torch.empty_like(states[key])}
    dcp.load(read, checkpoint_id=path)
    written.put(f"{name}.torn", 0, float(not torch.equal(state.local(read[key]), kept)))
    changed.copy_(kept)


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


if __name__ == "__main__":
    main()
