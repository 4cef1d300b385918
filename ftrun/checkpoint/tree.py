"""Walks over the JSON that :mod:`ftrun.checkpoint.state` makes of values. Pure, and without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.words import TAG
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Path = tuple[str | int, ...]

_OF = ("OrderedDict", "defaultdict", "Counter")


def is_tensor(node: Any) -> bool:
    """Whether a node is one tensor, or a view of one."""
    return isinstance(node, dict) and node.get(TAG) in ("tensor", "view")


def is_whole(node: Any) -> bool:
    """Whether a node is a tensor that is stored as it is: not a view."""
    return isinstance(node, dict) and node.get(TAG) == "tensor"


def stored_name(node: Any) -> str:
    """The stored tensor that a tensor's node means, or is a view of."""
    return str(node["name"] if is_whole(node) else node["of"])


def items(node: Any) -> list[tuple[Any, Any]] | None:
    """Keys and nodes of what a node holds where it is any kind of dict; None where it is none.

    Keys that are no texts and no whole numbers come as the JSON that stands for them.
    """
    if not isinstance(node, dict):
        return None
    if TAG not in node:
        return list(node.items())
    if node[TAG] == "dict":
        return [(key, item) for key, item in node["items"]]
    return items(node["of"]) if node[TAG] in _OF else None


def leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What a nested dict consists of, as ``torch.distributed.checkpoint`` takes it apart.

    Dicts are taken apart, and so are lists in which there is a tensor or a dict somewhere. All keys become texts.
    """
    pairs = items(node)
    if pairs is not None:
        for key, item in pairs:
            yield from leaves(item, (*path, str(key)))
    elif isinstance(node, list) and not _is_plain(node):
        for index, item in enumerate(node):
            yield from leaves(item, (*path, index))
    else:
        yield path, node


def _is_plain(values: list[Any]) -> bool:
    for value in values:
        if is_tensor(value) or items(value) is not None or (isinstance(value, list) and not _is_plain(value)):
            return False
    return True


def dotted(path: Path) -> str:
    """``model.weight`` for ``("model", "weight")``."""
    return ".".join(map(str, path))


def by_key(found: Iterator[tuple[Path, Any]]) -> dict[str, tuple[Path, Any]]:
    """Path and node of each leaf by its key with dots.

    Raises:
        UsageError: two leaves have the same key.
    """
    keys: dict[str, tuple[Path, Any]] = {}
    for path, node in found:
        key = dotted(path)
        if key in keys:
            raise UsageError(f"two values have the key {key!r}: the names of their parents contain dots")
        keys[key] = (path, node)
    return keys


def nest(parts: Mapping[Path, Any]) -> Any:
    """The nested tree of nodes by their paths: whole numbers in a path are places in a list, texts are keys."""
    if set(parts) == {()}:
        return parts[()]
    groups: dict[str | int, dict[Path, Any]] = {}
    for path, node in parts.items():
        groups.setdefault(path[0] if path else "", {})[path[1:]] = node
    nested = {key: nest(group) for key, group in groups.items()}
    if all(type(key) is int for key in nested):
        return [nested.get(index) for index in range(max(map(int, nested)) + 1)] if nested else {}
    if TAG in nested or not all(type(key) is str for key in nested):
        return {TAG: "dict", "items": [[key, item] for key, item in nested.items()]}
    return nested


def select(node: Any, what: str) -> Any:
    """The part of a tree under a path of keys: ``tracked/model``. A key may itself contain slashes.

    Raises:
        UsageError: there is no such part; the message lists what is there.
    """
    rest: Sequence[str] = [part for part in what.split("/") if part]
    taken: list[str] = []
    while rest:
        pairs = {str(key): item for key, item in items(node) or []}
        for count in range(len(rest), 0, -1):
            if "/".join(rest[:count]) in pairs:
                taken.append("/".join(rest[:count]))
                node, rest = pairs[taken[-1]], rest[count:]
                break
        else:
            where = f"in {'/'.join(taken)}" if taken else "there"
            names = ", ".join(map(repr, list(pairs)[:20])) or "nothing with a name"
            raise UsageError(f"the checkpoint has no {what!r}: {where} is {names}")
    return node
