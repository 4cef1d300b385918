"""One walk over a value, which becomes JSON on the way, and its tensors a list."""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint import dtensors, refusals, words
from ftrun.checkpoint.decoding import FACTORIES
from ftrun.checkpoint.refusals import Refused
from ftrun.checkpoint.ties import name_array
from ftrun.checkpoint.words import TAG, encode_word, is_numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_MAX_DEPTH = 100


@dataclass(frozen=True)
class Block:
    """A part of a state that holds tensors and nothing else: a dict of them, or a dict of dicts of them.

    Attributes:
        keys: of the dict, or of it and of those in it.
        node: that stands for it in the tree.
        names: of its tensors.
        nodes: of its tensors.
    """

    keys: tuple[Any, ...]
    node: dict[str, Any]
    names: list[str]
    nodes: list[dict[str, Any]]


class Walk:
    """One walk over a value. Runs at every save, over thousands of tensors: what it does for each of them counts.

    Args:
        refuse: a tensor that can't be stored, so that the walk finds the path to it.
        before: blocks of an earlier walk by name, complete ones, to take over where the keys are the same.

    Attributes:
        given: the tensors, as they came.
        names: of those tensors.
        nodes: of those tensors in the tree.
        bases: what shares memory with another one, by numbers; known at the end.
        blocks: by name, for a later walk.
        loose: numbers of the tensors that were in no block of ``before``.
    """

    def __init__(self, refuse: torch.Tensor | None = None, before: Mapping[str, Block] | None = None) -> None:
        self.given: list[torch.Tensor] = []
        self.names: list[str] = []
        self.nodes: list[dict[str, Any]] = []
        self.bases: dict[int, int] = {}
        self.blocks: dict[str, Block] = {}
        self.loose: list[int] = []
        self._before = before or {}
        self._refuse = refuse
        self._kinds = dtensors.storable_classes()
        self._open: list[object] = []

    def encode(self, value: Any, name: str) -> Any:
        """The node of a value.

        Args:
            value: anything.
            name: of its place, which tensors in it get.

        Raises:
            Refused: something in it can't be stored; it knows the way there.
        """
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
        """The nodes of what is in a list, a tuple or a set."""
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
        """The node of a dict, or of something like one without what makes it special."""
        kinds = set(map(type, value.values()))
        block = kinds and self._refuse is None and (kinds <= self._kinds or kinds == _DICT)
        known = self._known(value, name, of_dicts=kinds == _DICT) if block else None
        if known is not None:
            return known
        if not _are_plain_keys(value):
            return self._pairs(value, name)
        prefix = f"{name}/" if name else ""
        if block and kinds != _DICT:
            return self._tensors(value, name, prefix)
        first = len(self.given)
        nodes: dict[str, Any] = {}
        key: Any = None
        try:
            for key, item in value.items():
                nodes[key] = self.encode(item, prefix + key)
        except Refused as refused:
            refused.keys.append(key)
            raise
        if block and self._are_tensors(value.values(), first):
            self.blocks[name] = Block(_keys_within(value), nodes, self.names[first:], self.nodes[first:])
        return nodes

    def _are_tensors(self, values: Collection[dict[Any, Any]], first: int) -> bool:
        """Whether some dicts have plain keys, and hold the tensors from a number on and nothing else."""
        every = [*itertools.chain.from_iterable(map(dict.values, values))]
        alone = len(every) == len(self.given) - first and self._kinds.issuperset(map(type, every))
        return alone and all(map(_are_plain_keys, values))

    def _known(self, value: dict[Any, Any], name: str, *, of_dicts: bool) -> dict[str, Any] | None:
        """The node of a block whose keys are those of the walk before; None where that has none like it."""
        block = self._before.get(name)
        if block is None:
            return None
        given: list[Any] = []
        if of_dicts:
            if block.keys != _keys_within(value):
                return None
            given = [*itertools.chain.from_iterable(map(dict.values, value.values()))]
            if not self._kinds.issuperset(map(type, given)):
                return None
        elif block.keys == (tuple(value),):
            given = [*value.values()]
        else:
            return None
        self.given += given
        self.names += block.names
        self.nodes += block.nodes
        self.blocks[name] = block
        return block.node

    def _tensors(self, value: dict[str, torch.Tensor], name: str, prefix: str) -> dict[str, Any]:
        """A dict of tensors and nothing else, which most of a state consists of."""
        names = [prefix + key for key in value]
        nodes: list[dict[str, Any]] = [{TAG: "tensor", "name": name} for name in names]
        first = len(self.given)
        self.given += value.values()
        self.names += names
        self.nodes += nodes
        self.loose += range(first, len(self.given))
        node = dict(zip(value, nodes, strict=True))
        if len(nodes) >= _MANY:
            self.blocks[name] = Block((tuple(value),), node, names, nodes)
        return node

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
        """The node of something that hangs on a container."""
        try:
            return self.encode(value, f"{name}/{key}")
        except Refused as refused:
            refused.keys.append(key)
            raise

    def _tensor(self, tensor: torch.Tensor, name: str, node: dict[str, Any]) -> dict[str, Any]:
        if tensor is self._refuse:
            raise Refused(*refusals.problem_of(tensor))
        self.loose.append(len(self.given))
        self.given.append(tensor)
        self.names.append(name)
        self.nodes.append(node)
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

    def finished(self, bases: Collection[int]) -> bool:
        """Complete the tree where all is as in the walk before but what is loose; False where that can't be.

        Args:
            bases: numbers of those that shared memory with another one.
        """
        for number in self.loose:
            if number in bases:
                return False
            name_array(self.names[number], self.nodes[number])
        return True


def _keys_within(value: dict[Any, dict[Any, Any]]) -> tuple[Any, ...]:
    """The keys of a dict of dicts, and of those in it."""
    within = value.values()
    return tuple(value), [*map(len, within)], [*itertools.chain.from_iterable(within)]


def _are_plain_keys(value: dict[Any, Any]) -> bool:
    """Whether JSON brings these keys back as they are, and none of them is taken for the tag."""
    if TAG in value or not _TEXTS.issuperset(map(type, value)):
        return False
    together = "".join(value)
    return together.isascii() or words.is_plain_text(together)


_TEXTS = frozenset({str})
_DICT = frozenset({dict})
_MANY = 8  # tensors that make it worth to remember a dict of them


def _sorted_items(encoder: Walk, value: Any, name: str) -> list[Any]:
    # Sets have no order that ranks share; replicated state must be the same text on all of them.
    return sorted(encoder.items(value, name), key=json.dumps)


def _ordered(encoder: Walk, value: OrderedDict[Any, Any], name: str) -> dict[str, Any]:
    node = {TAG: "OrderedDict", "of": encoder.mapping(value, name)}
    extra = dict(vars(value))
    if "_metadata" in extra:  # what nn.Module.state_dict() hangs on its result
        node["metadata"] = encoder.attribute(extra.pop("_metadata"), "_metadata", name)
    if extra:
        raise Refused(f"an OrderedDict with the attribute {next(iter(extra))!r}", "store it under a key")
    return node


def _defaults(encoder: Walk, value: defaultdict[Any, Any], name: str) -> dict[str, Any]:
    factory = value.default_factory
    kind = None if factory is None else getattr(factory, "__name__", "")
    if kind is not None and FACTORIES.get(kind) is not factory:
        raise Refused("a defaultdict of a function", "use one of a builtin type, or a plain dict")
    return {TAG: "defaultdict", "factory": kind, "of": encoder.mapping(value, name)}


_CONTAINERS: dict[type, Callable[[Walk, Any, str], Any]] = {
    list: Walk.items,
    tuple: lambda encoder, value, name: {TAG: "tuple", "items": encoder.items(value, name)},
    set: lambda encoder, value, name: {TAG: "set", "items": _sorted_items(encoder, value, name)},
    frozenset: lambda encoder, value, name: {TAG: "frozenset", "items": _sorted_items(encoder, value, name)},
    deque: lambda encoder, value, name: {
        TAG: "deque",
        "maxlen": value.maxlen,
        "items": encoder.items(value, name),
    },
    dict: Walk.mapping,
    Counter: lambda encoder, value, name: {TAG: "Counter", "of": encoder.mapping(value, name)},
    OrderedDict: _ordered,
    defaultdict: _defaults,
}
