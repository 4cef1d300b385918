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

import json
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint import aliases, dtensors, refusals, words
from ftrun.checkpoint.decoding import FACTORIES, decode
from ftrun.checkpoint.dtensors import all_plain, is_dtensor
from ftrun.checkpoint.refusals import Refused
from ftrun.checkpoint.words import TAG, encode_word, is_numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Encoded", "decode", "encode"]

_MAX_DEPTH = 100


@dataclass(frozen=True)
class Encoded:
    """State taken apart.

    Attributes:
        tree: JSON-able; the order of keys in its objects carries meaning.
        tensors: the tensors themselves by name, not copies: plain ones without gradient, and DTensors.
    """

    tree: Any
    tensors: dict[str, torch.Tensor]


def encode(value: object) -> Encoded:
    """Take a value apart. Cheap: no tensor is copied, so take it apart and stage it before anything changes.

    Raises:
        NotStorable: something in it can't be stored without pickle; the message names the path to it.
    """
    encoder = _Encoder()
    try:
        tree = encoder.encode(value, "")
        bad = refusals.not_storable(encoder.given)
        if bad is not None:
            _Encoder(refuse=bad).encode(value, "")
    except Refused as refused:
        raise refused.as_error() from None
    return Encoded(tree, encoder.tied())


class _Encoder:
    """One walk over a value. Runs at every save, over thousands of tensors: what it does for each of them counts.

    Args:
        refuse: a tensor that can't be stored, so that the walk finds the path to it.
    """

    def __init__(self, refuse: torch.Tensor | None = None) -> None:
        self.given: list[torch.Tensor] = []
        self._names: list[str] = []  # as long as the tensors that were given, and so are their nodes in the tree
        self._nodes: list[dict[str, Any]] = []
        self._refuse = refuse
        self._kinds = dtensors.storable_classes()
        self._open: list[object] = []

    def encode(self, value: Any, name: str) -> Any:
        kind = type(value)
        container = _CONTAINERS.get(kind)
        if container is not None:
            if len(self._open) > _MAX_DEPTH:
                raise self._too_deep(value)
            self._open.append(value)
            node = container(self, value, name)
            self._open.pop()
            return node
        word = encode_word(value)
        if word is not words.UNKNOWN:
            return word
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, {TAG: "tensor", "name": name})
        if kind is np.ndarray:
            return self._array(value, name)
        raise Refused(*refusals.value_problem(value))

    def _too_deep(self, value: object) -> Refused:
        if any(each is value for each in self._open):
            return Refused("a container that holds itself", "break the cycle")
        return Refused(f"nesting of more than {_MAX_DEPTH} levels", "flatten it")

    def items(self, values: Any, name: str) -> list[Any]:
        if words.is_plain_list(values):  # thousands of names or numbers of parameters
            return list(values)
        nodes: list[Any] = []
        try:
            for index, value in enumerate(values):
                nodes.append(self.encode(value, f"{name}/{index}"))
        except Refused as refused:
            refused.keys.append(len(nodes))
            raise
        return nodes

    def mapping(self, value: dict[Any, Any], name: str) -> dict[str, Any]:
        if not _are_plain_keys(value):
            return self._pairs(value, name)
        prefix = f"{name}/" if name else ""
        if self._refuse is None and self._kinds.issuperset(map(type, value.values())):
            return self._tensors(value, prefix)
        nodes = {}
        key: Any = None
        try:
            for key, item in value.items():
                nodes[key] = self.encode(item, prefix + key)
        except Refused as refused:
            refused.keys.append(key)
            raise
        return nodes

    def _tensors(self, value: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
        """A dict of tensors and nothing else, which most of a state consists of."""
        names = [prefix + key for key in value]
        nodes: list[dict[str, Any]] = [{TAG: "tensor", "name": name} for name in names]
        self.given += value.values()
        self._names += names
        self._nodes += nodes
        return dict(zip(value, nodes, strict=True))

    def _pairs(self, value: dict[Any, Any], name: str) -> dict[str, Any]:
        pairs = []
        prefix = f"{name}/" if name else ""
        key: Any = None
        try:
            for key, item in value.items():
                pairs.append([self.encode(key, f"{prefix}key"), self.encode(item, f"{prefix}{key}")])
        except Refused as refused:
            refused.keys.append(key)
            raise
        return {TAG: "dict", "items": pairs}

    def attribute(self, value: Any, key: str, name: str) -> Any:
        try:
            return self.encode(value, f"{name}/{key}")
        except Refused as refused:
            refused.keys.append(key)
            raise

    def _tensor(self, tensor: torch.Tensor, name: str, node: dict[str, Any]) -> dict[str, Any]:
        if tensor is self._refuse:
            raise Refused(*refusals.problem_of(tensor))
        self.given.append(tensor)
        self._names.append(name)
        self._nodes.append(node)
        return node

    def _array(self, array: Any, name: str) -> dict[str, Any]:
        if not is_numpy_dtype(array.dtype):
            raise Refused(f"a NumPy array of {array.dtype}", "use numbers, booleans, texts or times")
        node = {TAG: "ndarray", "dtype": array.dtype.str, "shape": list(array.shape), "tensor": None}
        if not array.nbytes:
            return node
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # torch warns about memory that it must not write to.
        return self._tensor(torch.from_numpy(flat if flat.flags.writeable else flat.copy()), name, node)

    def tied(self) -> dict[str, torch.Tensor]:
        """The tensors by name, each byte of memory once; what shares memory with another is said to in the tree.

        To be called once, when the tree is complete.
        """
        # A plain view: requires_grad and the class Parameter stay behind, the memory is the same.
        held = [each if type(each) is torch.Tensor and not each.requires_grad else _plain(each) for each in self.given]
        bases = aliases.bases(held) if all_plain(self.given) else _bases(held)
        self._name_apart()
        tensors = dict(zip(self._names, held, strict=True))
        for number, base in bases.items():
            if self._point(number, base, held[number], held[base]):
                del tensors[self._names[number]]
        return tensors

    def _name_apart(self) -> None:
        """Give every tensor a name of its own that UTF-8 can say, and arrays the name of theirs."""
        if not _are_apart(self._names):
            taken = set(_NO_NAMES)
            for number, name in enumerate(self._names):
                self._names[number] = free = _free(name, taken)
                self._nodes[number]["name"] = free
                taken.add(free)
        for name, node in zip(self._names, self._nodes, strict=True):
            if node[TAG] == "ndarray":
                node.pop("name", None)
                node["tensor"] = name

    def _point(self, number: int, base: int, tensor: torch.Tensor, of: torch.Tensor) -> bool:
        """Say in the tree that a tensor's bytes are those of another one; False where there is no word for it."""
        node, name = self._nodes[number], self._names[base]
        same = (tensor.shape, tensor.stride()) == (of.shape, of.stride())
        if node[TAG] == "ndarray":
            node["tensor"] = name if same else node["tensor"]
            return same
        node.clear()
        if same:
            node |= {TAG: "tensor", "name": name}
        else:
            layout = {"shape": list(tensor.shape), "stride": list(tensor.stride())}
            node |= {TAG: "view", "of": name, **layout, "offset": aliases.offset_in(of, tensor)}
        return True


def _are_apart(names: list[str]) -> bool:
    different = set(names)
    return len(different) == len(names) and different.isdisjoint(_NO_NAMES) and "".join(names).isascii()


def _free(name: str, taken: set[str]) -> str:
    wanted = name.encode("utf-8", "replace").decode("utf-8") or "value"
    free, count = wanted, 0
    while free in taken:
        count += 1
        free = f"{wanted}~{count}"
    return free


def _are_plain_keys(value: dict[Any, Any]) -> bool:
    """Whether JSON brings these keys back as they are, and none of them is taken for the tag."""
    if TAG in value or not _TEXTS.issuperset(map(type, value)):
        return False
    together = "".join(value)
    return together.isascii() or words.is_plain_text(together)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_dtensor(tensor) else tensor.detach()


def _bases(held: list[torch.Tensor]) -> dict[int, int]:
    """For each tensor whose bytes another one has, by their numbers, that other one."""
    sharded = [number for number, tensor in enumerate(held) if is_dtensor(tensor)]
    plain = sorted(set(range(len(held))).difference(sharded))
    found = {plain[number]: plain[base] for number, base in aliases.bases([held[each] for each in plain]).items()}
    ties = dtensors.ties([held[number] for number in sharded])
    return found | {sharded[number]: sharded[first] for number, first in ties.items()}


# Of a tensor's name in a file: this one is taken by the format, and no name is none.
_NO_NAMES = frozenset({"__metadata__", ""})
_TEXTS = frozenset({str})


def _sorted_items(encoder: _Encoder, value: Any, name: str) -> list[Any]:
    # Sets have no order that ranks share; replicated state must be the same text on all of them.
    return sorted(encoder.items(value, name), key=json.dumps)


def _ordered(encoder: _Encoder, value: OrderedDict[Any, Any], name: str) -> dict[str, Any]:
    node = {TAG: "OrderedDict", "of": encoder.mapping(value, name)}
    extra = dict(vars(value))
    if "_metadata" in extra:  # what nn.Module.state_dict() hangs on its result
        node["metadata"] = encoder.attribute(extra.pop("_metadata"), "_metadata", name)
    if extra:
        raise Refused(f"an OrderedDict with the attribute {next(iter(extra))!r}", "store it under a key")
    return node


def _defaults(encoder: _Encoder, value: defaultdict[Any, Any], name: str) -> dict[str, Any]:
    factory = value.default_factory
    kind = None if factory is None else getattr(factory, "__name__", "")
    if kind is not None and FACTORIES.get(kind) is not factory:
        raise Refused("a defaultdict of a function", "use one of a builtin type, or a plain dict")
    return {TAG: "defaultdict", "factory": kind, "of": encoder.mapping(value, name)}


_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: _Encoder.items,
    tuple: lambda encoder, value, name: {TAG: "tuple", "items": encoder.items(value, name)},
    set: lambda encoder, value, name: {TAG: "set", "items": _sorted_items(encoder, value, name)},
    frozenset: lambda encoder, value, name: {TAG: "frozenset", "items": _sorted_items(encoder, value, name)},
    deque: lambda encoder, value, name: {
        TAG: "deque",
        "maxlen": value.maxlen,
        "items": encoder.items(value, name),
    },
    dict: _Encoder.mapping,
    Counter: lambda encoder, value, name: {TAG: "Counter", "of": encoder.mapping(value, name)},
    OrderedDict: _ordered,
    defaultdict: _defaults,
}
