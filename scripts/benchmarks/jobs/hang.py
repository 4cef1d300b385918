"""Trainings that hang, and trainings that are slow and don't, each in its own way, with a Session.

``--case`` names the way. What goes wrong goes wrong once: the attempt after it trains to the end. Ranks agree on each
step in an all-reduce, as data parallel training does, so a rank that stops stops all. Rank 1 is the one at fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import stamps

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--case", required=True)
    options = parser.parse_args()
    written = stamps.Stamps(options.out)
    written.write("start")
    if options.case == "slow_import":
        time.sleep(8.0)

import torch
import torch.distributed as dist

import ftrun

PACE = 0.1
FAULT_AT = 30
TOTAL = 60
LONG = 8.0
"""Seconds of a slow phase: more than a hang in the steps is given."""

CASE, RANK = options.case, written.rank
MARK = Path(options.out) / "fired"


def once() -> bool:
    """True for the first process that asks, in the whole run."""
    with contextlib.suppress(FileExistsError):
        MARK.touch(exist_ok=False)
        written.write("fault")
        return True
    return False


def forever() -> None:
    threading.Event().wait()


def lock() -> None:
    held = threading.Lock()
    taken = threading.Event()

    def hold() -> None:
        with held:
            taken.set()
            forever()

    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    with held:
        pass


def spin() -> None:
    while True:
        pass


def wait_for_file() -> None:
    """What NCCL does with a peer that has left in good order: wait for it."""
    while not (Path(options.out) / "never").exists():
        time.sleep(0.01)


IN_A_STEP = {
    "sleep": forever,
    "lock": lock,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": spin,
}


class Rows(torch.utils.data.Dataset):
    """Samples, one of which may never come."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        if CASE == "loader" and RANK == 1 and info is not None and self.reached(FAULT_AT) and once():
            forever()
        return torch.ones(8) * index

    def reached(self, step: int) -> bool:
        path = Path(options.out) / "stamps-1.txt"
        return path.read_text().count(" step ") >= step


class Slow:
    """Something in the checkpoint that takes its time, or never comes back."""

    def state_dict(self) -> dict[str, int]:
        if CASE == "slow_save" and STEP[0] == FAULT_AT:
            written.write("slow")
            time.sleep(LONG)
        if CASE == "save" and STEP[0] == FAULT_AT and RANK == 1 and once():
            fifo = Path(options.out) / "fifo"
            os.mkfifo(fifo)
            fifo.read_bytes()  # as a file on a mount that is away: open() never returns
        return {"step": STEP[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if CASE == "slow_restore":
            time.sleep(LONG)


STEP = [0]


def fault(ft: ftrun.Session, apart: dist.ProcessGroup) -> None:
    """What happens in step FAULT_AT."""
    if CASE in IN_A_STEP and RANK == 1 and once():
        IN_A_STEP[CASE]()
    if CASE == "collective" and RANK == 0 and once():
        dist.all_reduce(torch.zeros(1), group=apart)  # a collective that the other rank doesn't know of
    if CASE == "left" and not MARK.exists():
        dist.barrier()
        if RANK == 1 and once():
            os._exit(0)
        wait_for_file()
    if CASE == "slow_restore" and RANK == 1 and once():
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "slow_eval":
        phase = getattr(ft, "phase", None)
        with phase("eval") if phase is not None else contextlib.nullcontext():
            time.sleep(LONG)
    if CASE == "slow_data":
        time.sleep(3.0)
    if CASE == "slow_step":
        time.sleep(4 * PACE)


@ftrun.entrypoint(every=10)
def main(ft: ftrun.Session) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    apart = dist.new_group([0, 1])
    loader = ft.loader(Rows(), global_batch=8, num_workers=1 if CASE == "loader" else 0)
    ft.track(model=model, optimizer=optimizer, slow=Slow())
    if CASE == "slow_callback":
        ftrun.on("step")(lambda step, _metrics: time.sleep(2.0 if step % 20 == 0 else 0.0))
    for rows in ft.steps(loader, total=TOTAL):
        if CASE == "slow_first_step" and ft.step == 0:
            time.sleep(LONG)
        STEP[0] = ft.step + 1
        if ft.step + 1 == FAULT_AT:
            fault(ft, apart)
        time.sleep(PACE * (1 + max(0, ft.step - 20) / 5 if CASE == "slow_down" else 1))
        optimizer.zero_grad()
        model(rows).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        written.write("step", ft.step + 1)
    if CASE == "end" and RANK == 1 and once():
        forever()
    if CASE == "slow_end":
        time.sleep(LONG)


if __name__ == "__main__":
    main()
    sys.exit(0)
