"""A training loop that has never heard of ftrun, and in which rank 1 hangs once."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import stamps
import torch
import torch.distributed as dist

out = sys.argv[1]
written = stamps.Stamps(out)
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
mark = Path(out) / "fired"
for step in range(1, 61):
    if step == 30 and written.rank == 1 and not mark.exists():
        mark.touch()
        written.write("fault")
        threading.Event().wait()
    time.sleep(0.1)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    written.write("step", step)
dist.destroy_process_group()
