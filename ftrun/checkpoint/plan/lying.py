"""How the tensors of a state lie in memory, looked at in one go: touching thousands costs more than the look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint.dtensors import parts_alike, specs_of, versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    _Check = Callable[..., bool]


@dataclass(frozen=True)
class Look:
    """What was seen of some tensors.

    Attributes:
        parts: what lies on this rank of each.
        starts: addresses.
        kinds: dtypes, shapes and strides, conjugation, whether one is negated, and how they are spread over ranks;
            equal for the same.
        negated: one of them has its negation pending.
        versions: how often each was written to, see :func:`ftrun.checkpoint.dtensors.versions_of`; None where one
            doesn't count that.
        memory: in which they lie; None where that wasn't asked for.
    """

    parts: Sequence[torch.Tensor]
    starts: Any
    kinds: tuple[Any, ...]
    negated: bool
    versions: list[int] | None
    memory: list[torch.UntypedStorage] | None = None


def look(given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Look:
    """Look at tensors.

    Args:
        given: the tensors.
        parts: what lies on this rank of each; plain tensors.

    Raises:
        RuntimeError: one of them has no address, or no strides.
    """
    try:
        return _look(given, parts, count=True)
    except RuntimeError:  # of one that was made in inference mode, and doesn't count
        return _look(given, parts, count=False)


class Guard:
    """Sees whether tensors are of the same kinds as once, wherever they lie now, with a call for many of them.

    torch has that for compiled code: class, dtype, device, layout, shape and strides, and what is pending, without an
    object for any of them. It is not public; where it is gone there is no guard, and where it says no, :func:`look` has
    to look at each. It keeps no tensor alive.
    """

    def __init__(
        self, checks: list[_Check], types: list[type], kinds: tuple[Any, ...], again: Mapping[int, int]
    ) -> None:
        self._checks, self._types, self._kinds, self._again = checks, types, kinds, again

    @classmethod
    def of(cls, given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], kinds: tuple[Any, ...]) -> Guard | None:
        """A guard of tensors as they are; None where torch has none.

        Args:
            given: the tensors.
            parts: what lies on this rank of each; plain tensors.
            kinds: of what kinds they are, see :class:`Look`.
        """
        first: dict[int, int] = {}
        for number, each in enumerate(parts):
            first.setdefault(id(each), number)
        # It takes no object twice: tied weights are.
        again = {number: first[id(each)] for number, each in enumerate(parts) if first[id(each)] != number}
        checks: list[_Check] = []
        for start in range(0, len(parts), _TOGETHER):
            check = _check_of(_once(parts[start : start + _TOGETHER], start, again))
            if check is None:
                return None
            checks.append(check)
        return cls(checks, [*map(type, given)], kinds, again)

    def look(self, given: Sequence[torch.Tensor]) -> Look | None:
        """What :func:`look` says of as many tensors as then, where they are of the same kinds; None where they aren't.

        Raises:
            RuntimeError: one of them doesn't count how often it was written to.
        """
        parts: list[torch.Tensor] = []
        starts: list[int] = []
        versions: list[int] = []
        memory: list[torch.UntypedStorage] = []
        specs = self._kinds[-1]
        # All of a tensor while the processor has it at hand: to fetch thousands again takes longer than the look.
        for number, check in enumerate(self._checks):
            start = number * _TOGETHER
            whole = given[start : start + _TOGETHER]
            some = parts_alike(whole, self._types[start : start + _TOGETHER])
            if some is None or (specs is not None and not _are_spread_as(whole, specs[start : start + _TOGETHER])):
                return None
            if not check(*_once(some, start, self._again)):
                return None
            parts += some
            starts += [each.data_ptr() for each in some]
            versions += versions_of(whole, some)
            memory += [each.untyped_storage() for each in some]
        if any(parts[number] is not parts[other] for number, other in self._again.items()):
            return None
        kept = given if specs is None else parts
        return Look(kept, np.array(starts, dtype=np.uint64), self._kinds, False, versions, memory)


def _are_spread_as(tensors: Sequence[Any], specs: Sequence[Any]) -> bool:
    """Whether DTensors among some tensors are spread so; None says of the others that they are none."""
    # Lists are compared by identity first, which is enough for almost all.
    return [None if spec is None else each._spec for each, spec in zip(tensors, specs, strict=True)] == specs


_TOGETHER = 256


def _once(parts: Sequence[torch.Tensor], start: int, again: Mapping[int, int]) -> Sequence[torch.Tensor]:
    return [each for number, each in enumerate(parts, start) if number not in again] if again else parts


def _check_of(tensors: Sequence[torch.Tensor]) -> _Check | None:
    if any(each.is_neg() for each in tensors):
        return None  # such a state is taken apart anew each time
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: _Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _look(given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, count: bool) -> Look:
    starts: list[int] = []
    dtypes: list[torch.dtype] = []
    shapes: list[torch.Size] = []
    contiguous: list[bool] = []
    negated = False
    for each in parts:
        starts.append(each.data_ptr())
        dtypes.append(each.dtype)
        shapes.append(each.shape)
        contiguous.append(each.is_contiguous())
        negated = negated or each.is_neg()
    # Of a contiguous tensor the shape says how its bytes lie.
    strides = None
    if False in contiguous:
        strides = [None if flat else each.stride() for flat, each in zip(contiguous, parts, strict=True)]
    conj = [each.is_conj() for each in parts] if not _REAL.issuperset(dtypes) else None
    kinds = (dtypes, shapes, strides, conj, negated, specs_of(given))
    versions = versions_of(given, parts) if count else None
    return Look(parts, np.array(starts, dtype=np.uint64), kinds, negated, versions)


@dataclass(frozen=True)
class Layout:
    """How the tensors of a state lie.

    Attributes:
        kinds: see :class:`Look`.
        starts: addresses.
        ends: addresses behind them.
        on_host: whether each is in the memory of the host.
        empty: which of those without elements are one object; nothing else tells them apart.
    """

    kinds: tuple[Any, ...]
    starts: Any
    ends: Any
    on_host: list[bool]
    empty: list[int]

    @classmethod
    def of(cls, given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], seen: Look) -> Layout:
        """The layout of tensors that were looked at."""
        ends = seen.starts + np.array([_extent(each) for each in parts], dtype=np.uint64)
        return cls(seen.kinds, seen.starts, ends, [each.is_cpu for each in parts], same_empty(given, seen.starts, ends))


def same_empty(given: Sequence[torch.Tensor], starts: Any, ends: Any) -> list[int]:
    """For each tensor without elements the number of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(given[each]), each) for each in np.flatnonzero(starts == ends).tolist()]


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.dtype.itemsize


_REAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
