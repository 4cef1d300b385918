"""State to JSON and tensors, and back, exactly. No pickle: what has no word here is refused by its path.

JSON says null, booleans, numbers up to 64 bits, texts, lists and objects with text keys as they are. All
else is an object with the key ``"$"``, whose value says what it is: ``{"$": "tuple", "items": [1, 2]}``. A
dict that has the key ``"$"`` itself is written as such an object too, so the two can't be confused.

Tensors stay outside: ``{"$": "tensor", "name": "model/blocks.0.weight"}``. Tensors that are the same view of
the same memory (tied weights) are stored once and come back as one object. A tensor that lies inside another one is
said to be a view of it, ``{"$": "view", "of": "flat", "shape": [2, 3], "stride": [3, 1], "offset": 6}``, and comes
back as one. A DTensor is a tensor like any other here; without a template it comes back whole, as a plain tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint import refusals
from ftrun.checkpoint.decoding import decode
from ftrun.checkpoint.refusals import Refused
from ftrun.checkpoint.ties import store_once
from ftrun.checkpoint.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["Encoded", "decode", "encode"]


@dataclass(frozen=True)
class Encoded:
    """State taken apart.

    Attributes:
        tree: JSON-able; the order of keys in its objects carries meaning.
        tensors: the tensors themselves by name, not copies: plain ones without gradient, and DTensors.
        alike: see :class:`Alike`; None where that isn't known.
        settled: parts of the tree by their paths, which are never changed: the same object says the same at every save.
    """

    tree: Any
    tensors: Mapping[str, torch.Tensor]
    alike: Alike | None = None
    settled: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Alike:
    """By which it is known that a state's tensors are laid out as those of the save before, wherever they lie now.

    Attributes:
        token: the same object as long as names, order, dtypes, shapes, strides and devices are the same, and how
            DTensors are spread.
        given: the objects in the state, with gradient and all, in the order of the tensors.
        parts: what lies on this rank of each: of a DTensor its local part.
        addresses: of the memory of those.
        versions: how often torch has seen each part written to; None where one doesn't count.
        memory: in which those parts lie; None where that is still to be asked for.
    """

    token: object
    given: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    addresses: Any
    versions: Sequence[int] | None
    memory: Sequence[torch.UntypedStorage] | None = None


def encode(value: object) -> Encoded:
    """Take a value apart. Cheap: no tensor is copied, so take it apart and stage it before anything changes.

    Raises:
        NotStorable: something in it can't be stored without pickle; the message names the path to it.
    """
    return taken_apart(value, Walk())


def taken_apart(value: object, walk: Walk) -> Encoded:
    """:func:`encode` by a walk that the caller keeps."""
    try:
        tree = walk.encode(value, "")
        bad = refusals.not_storable(walk.given)
        if bad is not None:
            Walk(refuse=bad).encode(value, "")
    except Refused as refused:
        raise refused.as_error() from None
    tensors, walk.bases = store_once(walk.given, walk.names, walk.nodes)
    return Encoded(tree, tensors)
