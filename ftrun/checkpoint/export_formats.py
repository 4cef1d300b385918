"""How a checkpoint is written for ``dcp.load``, for safetensors, and for ``torch.load``. What is written is new."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint.safetensors_file import NAMES, Content
from ftrun.checkpoint.safetensors_stream import content, lay_out, slices
from ftrun.checkpoint.tree import is_tensor, is_whole, stored_name
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ftrun.checkpoint.opened import Opened

_ONE_FILE = 2 * 10**9  # bytes: DCP's writer keeps all of a file's tensors in memory until it is written


@dataclass(frozen=True)
class Written:
    """What came of it.

    Attributes:
        keys: names in the export.
        left_out: names of values that the format has no word for.
        changed: names of values that became something simpler.
    """

    keys: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


class Ahead:
    """Reads values in batches: small tensors share chunks of their file, and a chunk is only read as a whole.

    Args:
        opened: the checkpoint.
        nodes: the checkpoint's JSON by key.
        order: the order in which they will be taken, more or less.
        limit: bytes of a batch.
    """

    def __init__(
        self, opened: Opened, nodes: Mapping[str, Any], order: Sequence[str], limit: int = 256 * 2**20
    ) -> None:
        self._opened, self._nodes, self._limit = opened, nodes, limit
        self._left = dict.fromkeys(order)
        self._ready: dict[str, Any] = {}

    def take(self, key: str) -> Any:
        """One value. It is not kept."""
        if key not in self._ready:
            batch = self._batch(key)
            self._ready = dict(zip(batch, self._opened.value([self._nodes[each] for each in batch]), strict=True))
        return self._ready.pop(key)

    def _batch(self, key: str) -> list[str]:
        batch, size = [key], self._nbytes(key)
        self._left.pop(key, None)
        for each in list(self._left):
            size += self._nbytes(each)
            if size > self._limit:
                break
            batch.append(each)
            del self._left[each]
        return batch

    def _nbytes(self, key: str) -> int:
        node = self._nodes[key]
        return _item(self._opened, key, node, any_type=True).size if is_tensor(node) else 0


def write_safetensors(opened: Opened, path: Path, nodes: Mapping[str, Any], shard: int) -> Written:
    """Write tensors, one at a time, as one file or as several with an index.

    Args:
        opened: the checkpoint.
        path: the directory to make; the file where ``shard`` is 0.
        nodes: the checkpoint's JSON by key; what is no tensor is left out.
        shard: bytes above which there are several files.

    Raises:
        UsageError: there is no tensor, or one of a type that safetensors lack.
    """
    items = [_item(opened, key, node) for key, node in nodes.items() if is_tensor(node)]
    if not items:
        raise UsageError("there is no tensor to export; --to torch takes all values")
    groups = _groups(items, shard)
    if shard:
        path.mkdir()
    names = _file_names(len(groups))
    for name, group in zip(names, groups, strict=True):
        _write_one(opened, path / name if shard else path, group, nodes)
    if len(groups) > 1:
        places = {item.key: name for name, group in zip(names, groups, strict=True) for item in group}
        index = {"metadata": {"total_size": sum(item.size for item in items)}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    keys = tuple(item.key for item in items)
    return Written(keys, tuple(key for key in nodes if key not in set(keys)))


def write_torch(opened: Opened, path: Path, node: Any, keys: Sequence[str]) -> Written:
    """Write one file for ``torch.load(path, weights_only=True)``. The whole state is in memory meanwhile.

    What that mode refuses becomes something simpler: arrays become tensors, deques lists, frozen sets sets.
    """
    plainer = _Plainer()
    value = plainer.plain(opened.value(node), ())
    with path.open("xb") as file:  # torch's own way of opening it says neither which file nor what was wrong
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise _at_first(error) from error
    return Written(tuple(keys), changed=tuple(plainer.changed))


def write_dcp(opened: Opened, path: Path, found: Mapping[str, tuple[tuple[str | int, ...], Any]]) -> Written:
    """Write a directory for ``dcp.load`` with DCP's own ``FileSystemReader``; above 2 GB one tensor at a time.

    Values that are no tensors are pickled, as that reader wants them.
    """
    from torch.distributed import checkpoint as dcp

    class Lazy(dcp.DefaultSavePlanner):
        """Plans with descriptions of tensors, and reads each when it is written."""

        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            self.state_dict = {key: _described(opened, node) for key, (_, node) in found.items()}
            self.mappings = {key: path for key, (path, _) in found.items()}
            self.is_coordinator = is_coordinator

        def lookup_object(self, index: Any) -> Any:
            return ahead.take(index.fqn)

    nodes = {key: node for key, (_, node) in found.items()}
    ahead = Ahead(opened, nodes, list(nodes))
    size = sum(_item(opened, key, node, any_type=True).size for key, node in nodes.items() if is_tensor(node))
    writer = dcp.FileSystemWriter(path, single_file_per_rank=size <= _ONE_FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only is what is wanted
        try:
            dcp.save({}, storage_writer=writer, planner=Lazy(), no_dist=True)
        except dcp.CheckpointException as error:
            raise _at_first(error.failures[0][0]) from error  # without DCP's wrapping for many ranks
    return Written(tuple(found))


def _at_first(error: BaseException) -> BaseException:
    """What the disk said. Torch's writer, closed in the middle of it, ends with a complaint of its own."""
    earlier: BaseException | None = error
    while earlier is not None:
        if isinstance(earlier, OSError):
            return earlier
        earlier = earlier.__context__
    return error


def _described(opened: Opened, node: Any) -> Any:
    """A tensor without its memory; nothing for anything else, which is looked up when it is written."""
    if not is_tensor(node):
        return None
    return torch.empty(_shape(opened, node), dtype=opened.dtype(stored_name(node)), device="meta")


def _shape(opened: Opened, node: Any) -> tuple[int, ...]:
    return opened.entry(node["name"]).shape if is_whole(node) else tuple(node["shape"])


def _item(opened: Opened, key: str, node: Any, *, any_type: bool = False) -> Content:
    item = content(key, opened.dtype(stored_name(node)), _shape(opened, node))
    if item.dtype not in NAMES and not any_type:
        raise UsageError(f"{key!r} is {item.dtype}, which safetensors have no word for: use --to torch")
    return item


def _groups(items: list[Content], shard: int) -> list[list[Content]]:
    """Items in their order, each group within the limit unless one item alone is more."""
    groups: list[list[Content]] = [[]]
    filled = 0
    for item in items:
        if shard and groups[-1] and filled + item.size > shard:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size
    return groups


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_one(opened: Opened, path: Path, items: list[Content], nodes: Mapping[str, Any]) -> None:
    layout = lay_out(items)
    ahead = Ahead(opened, nodes, [item.key for item in layout.contents])
    with path.open("xb") as file:
        file.write(layout.header)
        for item in layout.contents:
            for view in slices(ahead.take(item.key)):
                file.write(view)


class _Plainer:
    """Makes values such that ``torch.load(weights_only=True)`` takes them, and notes which it changed."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def plain(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._dict(value, path)
        if kind in (list, tuple, deque):
            items = [self.plain(item, (*path, str(index))) for index, item in enumerate(value)]
            return tuple(items) if kind is tuple else self._note(items, path, kind is deque)
        if kind in (set, frozenset):
            return self._note({self.plain(item, path) for item in value}, path, kind is frozenset)
        if isinstance(value, np.ndarray | np.generic):
            return self._note(_from_numpy(value), path, True)
        return value

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        items = {self.plain(key, path): self.plain(item, (*path, str(key))) for key, item in value.items()}
        if type(value) is defaultdict or type(value) is dict:
            return self._note(items, path, type(value) is defaultdict)
        made = type(value)(items)
        if "_metadata" in vars(value):  # what nn.Module.state_dict() hangs on its result
            vars(made)["_metadata"] = self.plain(vars(value)["_metadata"], path)
        return made

    def _note(self, value: Any, path: tuple[str, ...], changed: bool) -> Any:
        if changed:
            self.changed.append(".".join(path))
        return value


def _from_numpy(value: Any) -> Any:
    """An array as a tensor, a number as Python's; what torch has no type for as texts."""
    if isinstance(value, np.generic):
        plain = value.item()
        return plain if isinstance(plain, bool | int | float | complex | str | bytes) else str(value)
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):
        return value.astype(str).tolist()
