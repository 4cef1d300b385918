"""``torch-v1``: the order that ``torch.utils.data.DistributedSampler`` makes, for runs that began with it."""

from __future__ import annotations

import torch

from ftrun.data.listed_order import ListedOrder


def torch_order(n: int, seed: int, epoch: int) -> ListedOrder:
    """``torch.randperm`` of a generator seeded with ``seed + epoch``.

    Step k of W ranks takes ``global_batch`` places from the k-th on, and rank r every W-th of them: each rank gets
    what its ``DistributedSampler(shuffle=True)`` lists, but for the repeats that one adds at the end.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    return ListedOrder(torch.randperm(n, generator=generator).numpy())
