"""What a state may not hold, what it is called, and what to do about it."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftrun.checkpoint.dtensors import all_plain, is_dtensor
from ftrun.checkpoint.words import dtype_name
from ftrun.errors import NotStorable

if TYPE_CHECKING:
    from collections.abc import Sequence

# Packed or opaque types: torch has no copy for them.
_NO_COPY = re.compile(r"u?int[1-7]|bits\w+|q\w+|float4\w+")


class Refused(Exception):
    """A value that can't be stored, on its way up through the containers, each of which adds its key.

    Args:
        what: what the value is.
        advice: what to do about it.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.what, self.advice = what, advice
        self.keys: list[Any] = []

    def as_error(self) -> NotStorable:
        """The error that the user sees, once all keys are known."""
        path = self.keys[::-1]
        head = f"tracked {path[0]!r}" if path else "tracked value"
        rest = "".join(f"[{part!r}]" for part in path[1:8])
        where = f"{head}{' → ' if rest else ''}{rest}"
        return NotStorable(f"{where}: {self.what} can't be stored without pickle; {self.advice}")


def not_storable(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first tensor that can't be stored. Fast where all are usual ones: this runs at every save."""
    if all_plain(tensors):
        usual = _are_usual(tensors)
    else:
        spread: list[Any] = [each for each in tensors if is_dtensor(each)]
        parts = [*(each._local_tensor for each in spread), *(each for each in tensors if not is_dtensor(each))]
        placements = {placement for placed in {each.placements for each in spread} for placement in placed}
        usual = not any(map(_placement_problem, placements)) and all_plain(parts) and _are_usual(parts)
    return None if usual else next((each for each in tensors if tensor_problem(each) is not None), None)


def _are_usual(tensors: Sequence[torch.Tensor]) -> bool:
    return (
        {tensor.dtype for tensor in tensors} <= _USUAL
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and True not in {tensor.is_meta for tensor in tensors}
        and True not in {tensor.is_nested for tensor in tensors}
    )


_USUAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)


def problem_of(tensor: torch.Tensor) -> tuple[str, str]:
    """What keeps a tensor from being stored that :func:`not_storable` has found."""
    return tensor_problem(tensor) or ("a tensor", "track its parts")


def tensor_problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What keeps a tensor from being stored, and what to do about it."""
    kind = type(tensor)
    if is_dtensor(tensor):
        return _dtensor_problem(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}", "track x.to_dense() or its parts"
    if tensor.is_quantized or _NO_COPY.fullmatch(dtype_name(tensor.dtype)):
        return f"a tensor of {tensor.dtype}", "track x.dequantize(), or its parts"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values", "materialise it before it is tracked"
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of class {kind.__qualname__}", "track x.as_subclass(torch.Tensor)"
    return None


def _dtensor_problem(tensor: Any) -> tuple[str, str] | None:
    problem = next(filter(None, map(_placement_problem, tensor.placements)), None)
    part = tensor._local_tensor
    return problem or (tensor_problem(part) if type(part) in (torch.Tensor, torch.nn.Parameter) else None)


def _placement_problem(placement: Any) -> tuple[str, str] | None:
    if placement.is_partial():
        return f"a DTensor that is {placement}", "its sum is not made yet: track x.full_tensor()"
    if not placement.is_replicate() and not hasattr(placement, "dim"):
        return f"a DTensor that is {placement}", "track x.full_tensor()"
    return None


def value_problem(value: object) -> tuple[str, str]:
    """What a value without a word is called, and what to do about it."""
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
