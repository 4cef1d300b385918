"""Each byte of a state stored once, under a name that no other tensor has.

What shares memory with another tensor is said to in the tree, and has no bytes of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftrun.checkpoint import aliases, dtensors
from ftrun.checkpoint.dtensors import all_plain, is_dtensor
from ftrun.checkpoint.words import TAG

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a tensor's name in a file: this one is taken by the format, and no name is none.
_NO_NAMES = frozenset({"__metadata__", ""})


def store_once(
    given: Sequence[torch.Tensor], names: list[str], nodes: Sequence[dict[str, Any]]
) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
    """The tensors to store by name, without gradient, each byte of memory once. Once for each tree.

    Args:
        given: the tensors.
        names: theirs, which are changed where they are not apart.
        nodes: theirs in the tree, which say afterwards under which name the bytes are.

    Returns:
        The tensors, and by its number for each that lies within another one that one.
    """
    held = [each if type(each) is torch.Tensor and not each.requires_grad else _plain(each) for each in given]
    bases = aliases.bases(held) if all_plain(given) else _bases(held)
    _name_apart(names, nodes)
    tensors = dict(zip(names, held, strict=True))
    for number, base in bases.items():
        if _point(nodes[number], names[base], held[number], held[base]):
            del tensors[names[number]]
    return tensors, bases


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory is the same, and the class Parameter stays behind."""
    return tensor if is_dtensor(tensor) else tensor.detach()


def _bases(held: list[torch.Tensor]) -> dict[int, int]:
    """For each tensor whose bytes another one has, by their numbers, that other one."""
    sharded = [number for number, tensor in enumerate(held) if is_dtensor(tensor)]
    plain = sorted(set(range(len(held))).difference(sharded))
    found = {plain[number]: plain[base] for number, base in aliases.bases([held[each] for each in plain]).items()}
    ties = dtensors.ties([held[number] for number in sharded])
    return found | {sharded[number]: sharded[first] for number, first in ties.items()}


def _name_apart(names: list[str], nodes: Sequence[dict[str, Any]]) -> None:
    """Give every tensor a name of its own that UTF-8 can say, and arrays the name of theirs."""
    if not _are_apart(names):
        taken = set(_NO_NAMES)
        for number, name in enumerate(names):
            names[number] = free = _free(name, taken)
            nodes[number]["name"] = free
            taken.add(free)
    for name, node in zip(names, nodes, strict=True):
        name_array(name, node)


def name_array(name: str, node: dict[str, Any]) -> None:
    """Where a node is that of an array, say which tensor has its bytes."""
    if node[TAG] == "ndarray":
        node.pop("name", None)
        node["tensor"] = name


def _are_apart(names: list[str]) -> bool:
    """Whether all names differ, and can be said as they are."""
    different = set(names)
    return len(different) == len(names) and different.isdisjoint(_NO_NAMES) and "".join(names).isascii()


def _free(name: str, taken: set[str]) -> str:
    wanted = name.encode("utf-8", "replace").decode("utf-8") or "value"
    free, count = wanted, 0
    while free in taken:
        count += 1
        free = f"{wanted}~{count}"
    return free


def _point(node: dict[str, Any], name: str, tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Say in a node that its tensor's bytes are those of a base; False where there is no word for it."""
    same = (tensor.shape, tensor.stride()) == (base.shape, base.stride())
    if node[TAG] == "ndarray":
        node["tensor"] = name if same else node["tensor"]
        return same
    node.clear()
    if same:
        node |= {TAG: "tensor", "name": name}
    else:
        layout = {"shape": list(tensor.shape), "stride": list(tensor.stride())}
        node |= {TAG: "view", "of": name, **layout, "offset": aliases.offset_in(base, tensor)}
    return True
