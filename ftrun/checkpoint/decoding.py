"""JSON and tensors to state: the way back of :mod:`ftrun.checkpoint.state`."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ftrun.checkpoint import aliases, words
from ftrun.checkpoint.words import TAG, decode_word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_BUILTINS = (list, dict, set, tuple, int, float, bool, str, bytes)
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in _BUILTINS}
"""What a stored ``defaultdict`` may make new values of."""


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a value together again. Tensors are those of the mapping, as plain tensors without gradient.

    Raises:
        ValueError: the tree was not made by :func:`encode`, or a tensor is missing.
    """
    try:
        return _decode(tree, tensors)
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError, struct.error) as error:
        raise ValueError(f"malformed state: {error!r}") from error


def _decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if TAG not in node:
        return {key: _decode(item, tensors) for key, item in node.items()}
    container = _DECODERS.get(node[TAG])
    return decode_word(node) if container is None else container(node, tensors)


def _decode_pairs(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(item, tensors) for key, item in node["items"]}


def _decode_ordered(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> OrderedDict[Any, Any]:
    value = OrderedDict(_decode(node["of"], tensors))
    if "metadata" in node:
        value._metadata = _decode(node["metadata"], tensors)  # type: ignore[attr-defined]
    return value


def _decode_defaults(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> defaultdict[Any, Any]:
    factory = None if node["factory"] is None else FACTORIES[node["factory"]]
    return defaultdict(factory, _decode(node["of"], tensors))


def _decode_array(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    dtype = words.numpy_dtype(node["dtype"])
    if node["tensor"] is None:
        return np.zeros(node["shape"], dtype)
    return tensors[node["tensor"]].contiguous().numpy().view(dtype).reshape(node["shape"])


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda node, tensors: tensors[node["name"]],
    "view": lambda node, tensors: aliases.view(tensors[node["of"]], node["shape"], node["stride"], node["offset"]),
    "ndarray": _decode_array,
    "tuple": lambda node, tensors: tuple(_decode(node["items"], tensors)),
    "set": lambda node, tensors: set(_decode(node["items"], tensors)),
    "frozenset": lambda node, tensors: frozenset(_decode(node["items"], tensors)),
    "deque": lambda node, tensors: deque(_decode(node["items"], tensors), node["maxlen"]),
    "dict": _decode_pairs,
    "Counter": lambda node, tensors: Counter(_decode(node["of"], tensors)),
    "OrderedDict": _decode_ordered,
    "defaultdict": _decode_defaults,
}
