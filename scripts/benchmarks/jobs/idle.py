"""Ranks with almost nothing to do: a step of a tiny model every 100 ms, and a printed line every second."""

from __future__ import annotations

import sys
import time

import stamps
import torch

written = stamps.Stamps(sys.argv[1])
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 1_000_000):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    written.write("step", step)
    if step % 10 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
