"""Where this worker stands among the others: read once from the environment that torchrun and ftrun set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Place:
    """Ranks and sizes of one worker, and where its group's store listens.

    Attributes:
        rank: global rank.
        world_size: number of workers in all.
        local_rank: rank on this node; also the index of the CUDA device.
        local_world_size: number of workers on this node.
        node: number of this node.
        nodes: number of nodes.
        store_host: host of the group's store, empty when there is one worker.
        store_port: its port.
        agent_store: the store is hosted by the agent, so it is there before any process group.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    store_host: str = ""
    store_port: int = 0
    agent_store: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place:
        """Read torchrun's variables; a process without any of them is alone.

        Raises:
            UsageError: one of RANK and WORLD_SIZE is set without the other, one is no number, there is no such rank,
                or several workers have no store in common.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls()
        try:
            world_size = int(environment["WORLD_SIZE"])
            place = cls(
                rank=int(environment["RANK"]),
                world_size=world_size,
                local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
                local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
                node=int(environment.get("GROUP_RANK", 0)),
                nodes=int(environment.get("GROUP_WORLD_SIZE", 1)),
                store_host=environment.get("MASTER_ADDR", ""),
                store_port=int(environment.get("MASTER_PORT", 0)),
                agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"RANK and WORLD_SIZE must both be set, to numbers, or neither ({error}). Start the script with "
                "ftrun or torchrun, or unset them to run one process."
            ) from error
        if not 0 <= place.rank < place.world_size:
            raise UsageError(
                f"RANK={place.rank} and WORLD_SIZE={place.world_size}: ranks go from 0 to the world size less 1. Start "
                "the script with ftrun or torchrun, or unset both to run one process."
            )
        if place.world_size > 1 and not (place.store_host and place.store_port):
            raise UsageError(
                f"{place.world_size} workers need MASTER_ADDR and MASTER_PORT to meet. Start the script with ftrun or "
                "torchrun, or unset RANK and WORLD_SIZE to run one process."
            )
        return place
