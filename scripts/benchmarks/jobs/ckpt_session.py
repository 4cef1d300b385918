"""A training whose saves are timed, with ftrun's Session and nothing but its public API.

``--scenarios`` says what is timed, in turn. A save is followed by an optimizer step: what a fence waits there counts.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import ckpt_clock as clock
import ckpt_state as state
import stamps
import torch
import torch.distributed as dist

import ftrun

WARM = 3
"""Saves before those that are measured: memory is touched for the first time, and the engine may try things out."""

DEADLINE = 120.0
_STEPS = 24


class Job:
    """What the scenarios do."""

    def __init__(self, ft: ftrun.Session, options: argparse.Namespace) -> None:
        self.ft = ft
        self.cycles: int = options.cycles
        self.out = Path(options.out)
        self.trainee = state.build(options.layout, options.tensors, options.size)
        self.clock = clock.Clock(options.out)
        self.events = self.out / "runs" / "bench" / "events" / "n0000.jsonl"
        began = time.perf_counter()
        ft.track(**self.trainee.tracked)
        self.clock.put("track", 0, time.perf_counter() - began)
        self.clock.put("owned", 0, self.trainee.owned)
        self.clock.put("total", 0, self.trainee.total)
        self._saves = 0
        self._begun = 0.0

    def baseline(self) -> clock.Baseline:
        return clock.Baseline(self.trainee.owned, self.out / f"raw-{self.ft.rank}")

    def step(self) -> float:
        """A step of the weights; returns what the fence waited."""
        waited = self.trainee.heavy.timed_step()
        self.ft.step_end()
        return waited

    def note_beginning(self, pace: float) -> None:
        """Note what a step takes until it begins, as one does that comes after so long a time and not after a save."""
        time.sleep(pace)
        self._begun = self.step()

    def save(self, name: str, cycle: int, *, pace: float = 0.0, busy: int = 0) -> None:
        """Save, and step: at once, after a time in which the CPU sleeps, or after so much computing."""
        dist.barrier()
        began, computed = time.perf_counter(), time.thread_time()
        self.ft.save()
        saved, computed = time.perf_counter() - began, time.thread_time() - computed
        time.sleep(pace)
        compute(busy)
        waited = self.step()
        if pace:  # what a step takes to begin after such a pause is no save's doing
            waited = max(0.0, waited - self._begun)
        if self._saves < WARM:
            name, cycle = "first", self._saves
        self._saves += 1
        self.clock.put(f"{name}.held", cycle, saved + waited)
        self.clock.put(f"{name}.computed", cycle, computed)
        self.clock.put(f"{name}.fence", cycle, waited)
        self.clock.put(f"{name}.released", cycle, time.time())
        committed = self.wait_for_commit(self.ft.step - 1)
        self.clock.put(f"{name}.committed", cycle, committed)

    def save_without_waiting(self) -> None:
        """Save and step, whatever becomes of it."""
        began = time.perf_counter()
        self.ft.save()
        held = time.perf_counter() - began + self.step()
        if self._saves < WARM:
            self.clock.put("first.held", self._saves, held)
        self._saves += 1

    def warm_up(self) -> None:
        """The first saves, if they have not been made yet."""
        self.step()
        while self._saves < WARM:
            self.save("first", self._saves)

    def wait_for_commit(self, step: int) -> float:
        """Wait until a step's checkpoint is committed, on all ranks; when that was, on rank 0."""
        at = 0.0
        if self.ft.rank == 0:
            deadline = time.monotonic() + DEADLINE
            while not (at := self.committed(step)):
                if time.monotonic() > deadline:
                    raise SystemExit(f"the save of step {step} was not committed within {DEADLINE:g} s")
                time.sleep(0.005)
        dist.barrier()
        return at

    def committed(self, step: int) -> float:
        """When the checkpoint of a step was committed; 0.0 if it is not."""
        for event in self.told("committed", "save_failed"):
            if event["step"] == step and event["kind"] == "save_failed":
                raise SystemExit(f"the save of step {step} failed: {event['error']}")
            if event["step"] == step:
                return float(event["t"])
        return 0.0

    def told(self, *kinds: str) -> list[dict[str, Any]]:
        lines = self.events.read_bytes().splitlines() if self.events.exists() else []
        found = (json.loads(line) for line in lines if any(f'"{kind}"'.encode() in line for kind in kinds))
        return [each for each in found if each["kind"] in kinds]


def compute(times: int) -> None:
    """What keeps a core busy, and exchanges nothing."""
    rows, weight = torch.ones(512, 256), torch.ones(256, 1024)
    for _ in range(times):
        (rows @ weight) @ weight.T


def pace_of(job: Job, base: clock.Baseline) -> float:
    """Seconds of a forward and backward that are long enough for the copy."""
    return 4.0 * clock.agree(min(job.clock.time("warm", each, base.copy) for each in range(WARM))) + 0.05


def stall(job: Job, *, raw: bool = False) -> None:
    """Saves with nothing beside them, with a long forward and backward on a device, and with as long a busy CPU.

    With ``raw`` the bytes are also written as plainly as can be.
    """
    base = job.baseline()
    pace = pace_of(job, base)
    began = time.perf_counter()
    compute(10)
    busy = int(clock.agree(1 + 10 * pace / (time.perf_counter() - began)))
    job.warm_up()
    for cycle in range(job.cycles):
        job.note_beginning(pace)
        job.clock.time("memcpy", cycle, base.copy)
        job.save("blocking", cycle)
        job.clock.time("memcpy again", cycle, base.copy)
        job.save("overlap", cycle, pace=pace)
        job.save("busy", cycle, busy=busy)
        if raw:
            job.clock.time("raw", cycle, base.write)
            base.forget()


def interference(job: Job) -> None:
    """Steps of the body, in lock step on all ranks, while nothing happens and while a checkpoint is drained."""
    job.warm_up()
    for cycle in range(-1, job.cycles):
        for number in range(_STEPS):
            name = ("idle", "idle again")[number % 2]
            seconds, _ = body_step(job, 0)
            if cycle >= 0:
                job.clock.put(name, cycle, seconds)
        job.trainee.heavy.step()
        job.ft.step_end()
        step = job.ft.step
        job.ft.save()
        body_step(job, step)  # which is held by the fence: that is the stall, and not what is measured here
        while True:
            seconds, over = body_step(job, step)
            if over:
                break
            if cycle >= 0:
                job.clock.put("draining", cycle, seconds)


def body_step(job: Job, step: int) -> tuple[float, bool]:
    """A step's seconds, and whether the checkpoint of a step is committed by then."""
    began = time.perf_counter()
    job.trainee.train_body()
    job.ft.step_end()
    seconds = time.perf_counter() - began
    over = clock.agree(job.committed(step) if job.ft.rank == 0 else 0.0)
    return seconds, bool(over)


def memory(job: Job) -> None:
    """Pairs of saves right after each other, so that as many are on their way as the engine allows."""
    written = stamps.Stamps(str(job.out))
    for _ in range(4):
        job.trainee.train_body()
        job.trainee.heavy.step()
    dist.barrier()
    written.write("quiet")
    time.sleep(1.5)
    job.step()
    for cycle in range(max(2, job.cycles // 2)):
        dist.barrier()
        written.write("saves", cycle)
        for _ in range(2):
            job.save_without_waiting()
        if job.ft.rank == 0:
            wait_until_nothing_is_under_way(job)
        dist.barrier()
    written.write("over")


def wait_until_nothing_is_under_way(job: Job) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        counts = [len(job.told(*kinds)) for kinds in (("saved",), ("committed", "save_failed"))]
        if 0 < counts[0] <= counts[1]:
            return
        time.sleep(0.02)
    raise SystemExit(f"saves were not committed within {DEADLINE:g} s")


def slow(job: Job) -> None:
    """``torch.save`` to a remote at 200 MB/s, and ftrun's save to the same."""
    import fsspec

    pace = pace_of(job, job.baseline())
    remote, _ = fsspec.core.url_to_fs("slow://bench")
    remote.makedirs("bench/torch", exist_ok=True)
    shared = not hasattr(next(job.trainee.weights.parameters()), "to_local")
    content = {name: state.local(tensor) for name, tensor in job.trainee.states().items()}

    def torch_save() -> None:
        if job.ft.rank == 0 or not shared:
            with remote.open(f"bench/torch/{job.ft.rank}.pt", "wb") as file:
                torch.save(content, file)
        dist.barrier()  # all go on when it is stored, as in every training that saves this way

    job.warm_up()
    for cycle in range(job.cycles):
        job.clock.time("torch.save", cycle, torch_save)
        job.save("slow", cycle, pace=pace)


SCENARIOS = {
    "memory": memory,  # first of all: it compares with what was there before anything was saved
    "stall": stall,
    "persist": partial(stall, raw=True),
    "interference": interference,
    "slow": slow,
}


@ftrun.entrypoint(every=10**9)
def main(ft: ftrun.Session) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=[])
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--tensors", choices=state.COUNTS, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    options = parser.parse_args()
    job = Job(ft, options)
    for name, scenario in SCENARIOS.items():
        if name in options.scenarios:
            scenario(job)
    job.warm_up()  # whatever was asked for, there is a commit that can be loaded


if __name__ == "__main__":
    main()
