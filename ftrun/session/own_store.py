"""Stores at an address of the script's own: ``init_method="tcp://..."``, or a ``MASTER_PORT`` that the script sets.

Started by an elastic agent, torch takes it that the agent hosts the store at any address it is given: all ranks become
clients of a store that nobody has started, and wait until the timeout. Here only the agent's own address is the
agent's; at others rank 0 hosts the store, as in a run without an agent.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ftrun.session.when_imported import when_imported

if TYPE_CHECKING:
    import types
    from collections.abc import Mapping

MODULE = "torch.distributed.rendezvous"
CREATES = "_create_c10d_store"


def watch(environment: Mapping[str, str]) -> None:
    """Have rank 0 host the stores that the agent doesn't, once torch is imported.

    Args:
        environment: as the agent made it.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("MASTER_PORT"):
        when_imported(MODULE, functools.partial(_install, int(environment["MASTER_PORT"])))


def _install(agents_port: int, module: types.ModuleType) -> None:
    create = getattr(module, CREATES, None)
    if create is None:
        return

    @functools.wraps(create)
    def create_or_host(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *more: Any) -> Any:
        if port == agents_port or not 0 < port < 2**16:
            return create(hostname, port, rank, world_size, timeout, *more)
        return module.TCPStore(
            host_name=hostname,
            port=port,
            world_size=world_size,
            is_master=rank == 0,
            timeout=timeout,
            multi_tenant=True,
        )

    setattr(module, CREATES, create_or_host)
