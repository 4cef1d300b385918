"""When a script that doesn't know ftrun made its process group: marks on the pulse page.

``init_process_group`` itself is left as it is: a wrapper would stand in every traceback out of it. Two functions that
it calls are wrapped instead, one at its beginning and one when the group is there. Neither fails, and where a torch
doesn't have them the marks stay unknown.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ftrun.session.when_imported import when_imported

if TYPE_CHECKING:
    import types

    from ftrun.pulse import Pulse

MODULE = "torch.distributed.distributed_c10d"
BEGINS = "set_pytorch_distributed_envs_from_justknobs"
IS_THERE = "_update_default_pg"


def watch(page: Pulse) -> None:
    """Mark ``group`` and ``grouped`` when the script makes its default process group."""
    when_imported(MODULE, functools.partial(_install, page))


def _install(page: Pulse, module: types.ModuleType) -> None:
    begins, is_there = getattr(module, BEGINS, None), getattr(module, IS_THERE, None)
    if begins is None or is_there is None:
        return

    @functools.wraps(begins)
    def marked_beginning(*arguments: Any, **named: Any) -> Any:
        page.mark("group")
        return begins(*arguments, **named)

    @functools.wraps(is_there)
    def marked_end(*arguments: Any, **named: Any) -> Any:
        page.mark("grouped")
        return is_there(*arguments, **named)

    setattr(module, BEGINS, marked_beginning)
    setattr(module, IS_THERE, marked_end)
