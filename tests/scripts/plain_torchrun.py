"""A script that has never heard of ftrun."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor(float(rank))
dist.all_reduce(total)
names = ("LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
# One write for the whole line: unbuffered, print() writes its pieces apart, and those of two ranks would mix in a pipe.
sys.stdout.write(f"rank {rank} of {world}: {total.item()} {sys.argv[1:]} {[os.environ[name] for name in names]}\n")
dist.destroy_process_group()
