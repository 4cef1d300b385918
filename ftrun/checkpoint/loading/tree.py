"""Looking into a stored tree without decoding all of it."""

from __future__ import annotations

from typing import Any

from ftrun.checkpoint.state import decode
from ftrun.checkpoint.words import TAG


def items_of(node: Any) -> dict[str, Any]:
    """The nodes of a stored dict with texts as keys.

    Raises:
        ValueError: it is no such dict.
    """
    if not isinstance(node, dict):
        raise ValueError("something that is no dict")
    if TAG not in node:
        return node
    if node[TAG] != "dict":
        raise ValueError(f"a {node[TAG]!r} where a dict is expected")
    return {decode(key, {}): item for key, item in node["items"]}


def names_in(node: Any) -> tuple[list[str], list[str]]:
    """Names of the tensors that a node refers to: tensors or what those are views of, and those of arrays."""
    tensors: dict[str, None] = {}
    arrays: dict[str, None] = {}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, dict):
            tag = each.get(TAG)
            if tag == "tensor":
                tensors[each["name"]] = None
            elif tag == "view":
                tensors[each["of"]] = None
            elif tag == "ndarray" and each["tensor"] is not None:
                arrays[each["tensor"]] = None
            waiting.extend(each.values())
    return list(tensors), list(arrays)
