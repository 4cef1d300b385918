"""The default process group: made for a script that hasn't made one, and taken down again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.session.place import Place


def device_for(place: Place) -> torch.device:
    """The device of this rank, made current: its own GPU where there are GPUs, else the CPU.

    Raises:
        UsageError: more ranks on this node than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise UsageError(
            f"local rank {place.local_rank} has no GPU: this node shows {count}. Start at most {count} workers per "
            "node (--nproc gpu does), or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def default_group(place: Place, device: torch.device) -> Iterator[None]:
    """Have a default process group inside the block: gloo for the CPU, and NCCL beside it on GPUs.

    A group that the script has made is left alone. A process that is alone gets a group of one, so that a script with
    DistributedDataParallel runs on any number of ranks.
    """
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = place.world_size == 1
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    try:
        yield
    except BaseException as error:
        if "default process group twice" in str(error):  # torch's words
            error.add_note(
                "ftrun: the default process group was made for this script, on one process too: leave "
                "init_process_group() out, or say @ftrun.entrypoint(process_group=False) and make it yourself"
            )
        # Peers may be gone: taking the group down in order could wait for them. The process ends anyway.
        if alone:
            _take_down()
        raise
    else:
        _take_down()


def _take_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
