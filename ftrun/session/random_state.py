"""The four random states of a rank: Python, NumPy, torch CPU and torch CUDA.

Rule for a changed world size: a rank that existed when the checkpoint was taken gets its own states back. A rank
that did not is seeded from the checkpoint's name and its own rank, so that every run that resumes there with that
many ranks draws the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of this process, as values that the checkpoint can store. Called on the training thread."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": _cuda_state(),
    }


def _cuda_state() -> bytes | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.get_rng_state().numpy().tobytes()


def restore(state: dict[str, Any]) -> None:
    """Put captured states back, the CUDA state where this process has a device."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def derive(checkpoint: str, rank: int) -> None:
    """Seed all states for a rank that the checkpoint doesn't know."""
    digest = hashlib.blake2b(f"{checkpoint}/{rank}".encode(), digest_size=16).digest()
    seed = int.from_bytes(digest[:8], "little")
    random.seed(seed)
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch.manual_seed(seed & (2**63 - 1))
