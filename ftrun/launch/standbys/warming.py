"""Which modules a standby imports. Decides and nothing else; standard library only."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ftrun.launch.standbys.script_scan import Scan

# Where nothing is known of an earlier attempt.
_TORCH = ("torch", "numpy", "torch.distributed")
_OPTIMIZER = ("torch.optim", "torch._dynamo")  # which torch imports when the first optimizer is made
_SESSION = ("ftrun.session.session", "ftrun.session.opening")

# Packages that import torch, or are used with it and nothing else.
_BRINGS_TORCH = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchtext", "torchdata", "torchao", "torchtitan", "torchmetrics"),
        *("ftrun", "lightning", "pytorch_lightning", "transformers", "accelerate", "peft", "trl", "diffusers"),
        *("deepspeed", "megatron", "fairscale", "composer", "ignite", "fastai", "timm", "monai", "torch_geometric"),
        *("sentence_transformers", "flash_attn", "xformers"),
    }
)

# What they read of the environment, if anything, has nothing to do with the rank: torch, and what it brings along.
_BLIND_TO_RANKS = frozenset(
    {
        *("torch", "torchgen", "functorch", "numpy", "ftrun", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
        *("typing_extensions", "filelock", "fsspec", "packaging", "yaml", "psutil", "pynvml", "tqdm", "dill"),
        *("safetensors", "crc32c", "optree", "opt_einsum", "triton", "setuptools"),
    }
)

# They do more on import than being imported: they join a group of processes, take a GPU or the terminal.
_NEVER = ("mpi4py", "horovod", "pycuda", "readline", "antigravity", "this")

# Torch imports them late, and they read variables that a script may have set by then.
_LATE_TORCH = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.optim")


def recorded(path: Path) -> tuple[str, ...] | None:
    """What an attempt had imported by its first step; None where nobody has written it down."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(document, list):
        return None
    return tuple(each for each in document if isinstance(each, str) and all(p.isidentifier() for p in each.split(".")))


def choose(known: Sequence[str] | None, scan: Scan | None, exclude: Iterable[str]) -> tuple[str, ...]:
    """Modules to import, in order.

    Args:
        known: what an attempt had imported, if that is known.
        scan: what the script's text says; None if it can't be read.
        exclude: packages that must not be imported.
    """
    names = known if known is not None else _guess(scan)
    barred = (*_NEVER, *exclude, *(_LATE_TORCH if scan is not None and _sets_torch(scan) else ()))
    return tuple(name for name in names if not within(name, barred) and _unaffected(name, scan))


def _guess(scan: Scan | None) -> tuple[str, ...]:
    if scan is None:
        return _TORCH
    if not scan.packages & _BRINGS_TORCH:
        return ()
    return (*_TORCH, *(_SESSION if "ftrun" in scan.packages else ()), *(_OPTIMIZER if scan.optimizes else ()))


def _sets_torch(scan: Scan) -> bool:
    return any(each == "?" or each.startswith(("TORCH", "PYTORCH")) for each in scan.variables)


def _unaffected(name: str, scan: Scan | None) -> bool:
    """Whether a variable that the script sets comes too late for a module, or can't concern it."""
    package = name.partition(".")[0]
    if scan is None or not scan.variables or package in sys.stdlib_module_names:
        return True
    return package in scan.before or (package == "ftrun" and "torch" in scan.before)


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these, or lies in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def plain(modules: Iterable[str]) -> bool:
    """Whether none of these looks at the rank when it is imported; of others that isn't known."""
    known = _BLIND_TO_RANKS | sys.stdlib_module_names
    packages = {name.partition(".")[0] for name in modules}
    return all(each in known or each.startswith("_sysconfigdata_") for each in packages)
