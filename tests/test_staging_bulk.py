"""What is remembered of tensors that are moved by address, and how they are cut into what is moved when."""

from __future__ import annotations

import numpy as np
import torch

from ftrun.checkpoint.staging.bulk import _Owners
from ftrun.checkpoint.staging.cut import Cut
from ftrun.checkpoint.staging.moves import LARGE, PROBES
from ftrun.checkpoint.staging.trust import Owned

SIZES = [3 * LARGE + 5, 10, LARGE, 100_000, 7 * LARGE + 1, LARGE - 1]


def covered(*cuts: Cut) -> list[np.ndarray]:
    """How often each byte of each tensor is in one of some cuts."""
    counts = [np.zeros(size, dtype=np.int64) for size in SIZES]
    for cut in cuts:
        for of, start, size in zip(cut.of.tolist(), cut.starts.tolist(), cut.sizes.tolist(), strict=True):
            assert start + size <= SIZES[of]
            counts[of][start : start + size] += 1
    return counts


def test_every_byte_is_moved_once_and_probed_once_in_so_many_saves() -> None:
    late = np.array([True, False, True, True, True, True])
    probed = [np.zeros(size, dtype=np.int64) for size in SIZES]
    for turn in range(PROBES):
        parts = Cut.of_all(SIZES).at(late, turn)
        assert all((each == 1).all() for each in covered(parts.now, parts.probes, parts.later))
        assert set(parts.now.of.tolist()) == {1}
        assert set(parts.small.of.tolist()) <= {3, 5}
        for total, each in zip(probed, covered(parts.probes), strict=True):
            total += each
        assert {0, 2, 4} <= set(parts.probes.of.tolist()), "a part of every large one"
    assert all((each == (1 if late[number] else 0)).all() for number, each in enumerate(probed))


def test_owners_are_looked_for_again_when_either_side_changes() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer, owners = torch.optim.SGD([first, second], lr=0.1), _Owners()

    def among(*given: torch.Tensor) -> list[bool]:
        answer: list[bool] = owners.among(given, Owned([optimizer])).tolist()
        return answer

    assert among(first, third, second) == [True, False, True]
    assert owners.are_all
    assert among(first, second, third) == [True, True, False]
    optimizer.param_groups[0]["params"].pop()
    assert among(first, second, third) == [True, False, False]
    optimizer.param_groups[0]["params"].append(third)
    assert among(first, second) == [True, False]
    assert not owners.are_all
