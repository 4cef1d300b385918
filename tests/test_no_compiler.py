"""Test jobs import torch without its compiler, and get it all the same when they want it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Runner

JOB = """
import sys
import torch

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.AdamW([weight]).step()
torch.rand(2, generator=torch.Generator().manual_seed(1))
print("without", *sorted({"torch._decomp", "torch._dynamo.eval_frame"} & set(sys.modules)))

import torch.distributed.tensor
print("operators", "torch._decomp" in sys.modules, hasattr(torch.ops.prims, "device_put"))

import torch._dynamo.eval_frame as frame
print("same", frame is torch._dynamo.eval_frame, frame is sys.modules["torch._dynamo.eval_frame"])
print(frame.__spec__.origin == frame.__file__, torch.export.Dim.__module__)
print("compiled", torch.compile(lambda x: x + 1, backend="eager")(weight.detach() * 0).tolist())
"""


@pytest.mark.slow
def test_the_compiler_is_left_out_until_it_is_wanted(runner: Runner) -> None:
    result = runner.python("-c", JOB)
    assert result.code == 0, result
    assert result.out.splitlines() == [
        "without",
        "operators True True",
        "same True True",
        "True torch.export.dynamic_shapes",
        "compiled [1.0, 1.0]",
    ]
