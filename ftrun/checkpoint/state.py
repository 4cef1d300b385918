"""State to JSON and tensors, and back, exactly. No pickle: what has no word here is refused by its path.

JSON says null, booleans, numbers up to 64 bits, texts, lists and objects with text keys as they are. All
else is an object with the key ``"$"``, whose value says what it is: ``{"$": "tuple", "items": [1, 2]}``. A
dict that has the key ``"$"`` itself is written as such an object too, so the two can't be confused.

Tensors stay outside: ``{"$": "tensor", "name": "model/blocks.0.weight"}``. Tensors that are the same view of
the same memory (tied weights) are stored once and come back as one object.
"""

from __future__ import annotations

import enum
import json
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint import words
from ftrun.checkpoint.words import TAG, decode_word, dtype_name, encode_word, is_numpy_dtype
from ftrun.errors import NotStorable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MAX_DEPTH = 100
# Packed or opaque types: torch has no copy for them.
_NO_COPY = re.compile(r"u?int[1-7]|bits\w+|q\w+")


@dataclass(frozen=True)
class Encoded:
    """State taken apart.

    Attributes:
        tree: JSON-able; the order of keys in its objects carries meaning.
        tensors: the tensors themselves by name, not copies.
    """

    tree: Any
    tensors: dict[str, torch.Tensor]


def encode(value: object) -> Encoded:
    """Take a value apart. Cheap: no tensor is copied, so take it apart and stage it before anything changes.

    Raises:
        NotStorable: something in it can't be stored without pickle; the message names the path to it.
    """
    encoder = _Encoder()
    return Encoded(encoder.encode(value, ()), encoder.tensors)


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a value together again. Tensors are those of the mapping, as plain tensors without gradient.

    Raises:
        ValueError: the tree was not made by :func:`encode`, or a tensor is missing.
    """
    try:
        return _decode(tree, tensors)
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError, struct.error) as error:
        raise ValueError(f"malformed state: {error!r}") from error


class _Encoder:
    """One walk over a value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[Any, ...], str] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        container = _CONTAINERS.get(type(value))
        if container is not None:
            with self._inside(value, path):
                return container(self, value, path)
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "name": self._tensor(value, path)}
        if type(value) is np.ndarray:
            return self._array(value, path)
        word = encode_word(value)
        if word is words.UNKNOWN:
            raise _refusal(path, *_reason(value))
        return word

    @contextmanager
    def _inside(self, value: object, path: tuple[Any, ...]) -> Iterator[None]:
        if id(value) in self._open:
            raise _refusal(path, "a container that holds itself", "break the cycle")
        if len(path) > _MAX_DEPTH:
            raise _refusal(path[:8], f"nesting of more than {_MAX_DEPTH} levels", "flatten it")
        self._open.add(id(value))
        try:
            yield
        finally:
            self._open.remove(id(value))

    def items(self, values: Any, path: tuple[Any, ...]) -> list[Any]:
        return [self.encode(value, (*path, index)) for index, value in enumerate(values)]

    def mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
        if all(type(key) is str and key != TAG and words.is_plain_text(key) for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = [[self.encode(key, (*path, "key")), self.encode(item, (*path, key))] for key, item in value.items()]
        return {TAG: "dict", "items": pairs}

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        problem = _tensor_problem(tensor)
        if problem is not None:
            raise _refusal(path, *problem)
        key = _identity(tensor)
        if key not in self._seen:
            # A plain view: requires_grad and the class Parameter stay behind, the memory is the same.
            self._seen[key] = self._name(path)
            self.tensors[self._seen[key]] = tensor.detach()
        return self._seen[key]

    def _array(self, array: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        if not is_numpy_dtype(array.dtype):
            raise _refusal(path, f"a NumPy array of {array.dtype}", "use numbers, booleans, texts or times")
        node = {TAG: "ndarray", "dtype": array.dtype.str, "shape": list(array.shape), "tensor": None}
        if array.nbytes:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            # torch warns about memory that it must not write to.
            node["tensor"] = self._tensor(torch.from_numpy(flat if flat.flags.writeable else flat.copy()), path)
        return node

    def _name(self, path: tuple[Any, ...]) -> str:
        parts = (str(part) for part in path)
        wanted = "/".join(parts).encode("utf-8", "replace").decode("utf-8") or "value"
        name, count = wanted, 0
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{wanted}~{count}"
        return name


def _sorted_items(encoder: _Encoder, value: Any, path: tuple[Any, ...]) -> list[Any]:
    # Sets have no order that ranks share; replicated state must be the same text on all of them.
    return sorted(encoder.items(value, path), key=json.dumps)


def _ordered(encoder: _Encoder, value: OrderedDict[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    node = {TAG: "OrderedDict", "of": encoder.mapping(value, path)}
    extra = dict(vars(value))
    if "_metadata" in extra:  # what nn.Module.state_dict() hangs on its result
        node["metadata"] = encoder.encode(extra.pop("_metadata"), (*path, "_metadata"))
    if extra:
        raise _refusal(path, f"an OrderedDict with the attribute {next(iter(extra))!r}", "store it under a key")
    return node


def _defaults(encoder: _Encoder, value: defaultdict[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise _refusal(path, "a defaultdict of a function", "use one of a builtin type, or a plain dict")
    return {TAG: "defaultdict", "factory": name, "of": encoder.mapping(value, path)}


_BUILTINS = (list, dict, set, tuple, int, float, bool, str, bytes)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in _BUILTINS}

_CONTAINERS: dict[type, Callable[[_Encoder, Any, tuple[Any, ...]], Any]] = {
    list: lambda encoder, value, path: encoder.items(value, path),
    tuple: lambda encoder, value, path: {TAG: "tuple", "items": encoder.items(value, path)},
    set: lambda encoder, value, path: {TAG: "set", "items": _sorted_items(encoder, value, path)},
    frozenset: lambda encoder, value, path: {TAG: "frozenset", "items": _sorted_items(encoder, value, path)},
    deque: lambda encoder, value, path: {
        TAG: "deque",
        "maxlen": value.maxlen,
        "items": encoder.items(value, path),
    },
    dict: lambda encoder, value, path: encoder.mapping(value, path),
    Counter: lambda encoder, value, path: {TAG: "Counter", "of": encoder.mapping(value, path)},
    OrderedDict: _ordered,
    defaultdict: _defaults,
}


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same view of the same memory."""
    if tensor.numel() == 0:  # no memory, no address
        return (id(tensor),)
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _tensor_problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What keeps a tensor from being stored, and what to do about it."""
    kind = type(tensor)
    if kind.__name__ == "DTensor":
        return "a DTensor", "sharded state can't be saved in this version; track a full state dict"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}", "track x.to_dense() or its parts"
    if tensor.is_quantized or _NO_COPY.fullmatch(dtype_name(tensor.dtype)):
        return f"a tensor of {tensor.dtype}", "track x.dequantize(), or its parts"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values", "materialise it before it is tracked"
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of class {kind.__qualname__}", "track x.as_subclass(torch.Tensor)"
    return None


def _reason(value: object) -> tuple[str, str]:
    """What a value is called, and what to do about it."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"the enum member {value}", "store its name or value"
    if kind.__name__ in ("function", "method", "builtin_function_or_method"):
        return "a function", "return plain values from state_dict(), or leave it out"
    if isinstance(value, np.generic | np.ndarray):
        return f"a {kind.__qualname__} of {value.dtype}", "store a plain array or number"
    if isinstance(value, str | int | float | list | tuple | dict | set):
        return f"a {kind.__qualname__}", "convert it to the builtin type that it extends"
    what = f"a {kind.__module__}.{kind.__qualname__}"
    return what, "return plain values and tensors from state_dict(), or leave it out"


def _refusal(path: tuple[Any, ...], what: str, advice: str) -> NotStorable:
    head = f"tracked {path[0]!r}" if path else "tracked value"
    rest = "".join(f"[{part!r}]" for part in path[1:])
    return NotStorable(f"{head}{' → ' if rest else ''}{rest}: {what} can't be stored without pickle; {advice}")


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
    factory = None if node["factory"] is None else _FACTORIES[node["factory"]]
    return defaultdict(factory, _decode(node["of"], tensors))


def _decode_array(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    dtype = words.numpy_dtype(node["dtype"])
    if node["tensor"] is None:
        return np.zeros(node["shape"], dtype)
    return tensors[node["tensor"]].contiguous().numpy().view(dtype).reshape(node["shape"])


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda node, tensors: tensors[node["name"]],
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
