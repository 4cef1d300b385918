"""Gradients that FSDP keeps to itself: of batches whose exchange ``set_requires_gradient_sync`` has put off.

They are of whole parameters, other ones on each rank, and lie where no optimizer sees them, so a checkpoint doesn't
hold them. A resumed run would go on without those batches, which must be said.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SAID = (
    "ftrun: this checkpoint lacks gradients that FSDP has not exchanged between the ranks yet "
    "(set_requires_gradient_sync(False)): a run that resumes from it goes on without those batches; call ft.save() and "
    "ft.step_end() after optimizer steps alone"
)


def has_unreduced(tracked: Iterable[object]) -> bool:
    """Whether a tracked module has gradients that were not exchanged. Nothing is imported for it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not isinstance(kind, type):
        return False
    modules = (part for each in tracked if isinstance(each, torch.nn.Module) for part in each.modules())
    return any(_keeps(parameter) for part in modules if isinstance(part, kind) for parameter in _parameters(part))


def _parameters(module: Any) -> Iterator[Any]:
    """What FSDP knows of the parameters of a module. Not public: there may be nothing of the name."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from getattr(group, "fsdp_params", ())


def _keeps(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return (
        getattr(parameter, "unsharded_accumulated_grad", None) is not None or getattr(whole, "grad", None) is not None
    )
