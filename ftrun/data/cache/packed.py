"""A million strings in two arrays: no object for each, so nothing that a forked child's reference counts would copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PackedStrings(Sequence[str]):
    """Strings that are made when they are asked for. Holds their UTF-8 bytes, and eight bytes for each.

    Reading one costs under a microsecond. Memory is shared with forked children, and stays shared.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Pack strings.

        Raises:
            TypeError: one of them is no string.
        """
        data, lengths = bytearray(), bytearray()
        for number, text in enumerate(strings):
            if not isinstance(text, str):
                raise TypeError(f"item {number} is {type(text).__name__}, not a string: {text!r}")
            encoded = text.encode("utf-8", "surrogateescape")
            data += encoded
            lengths += len(encoded).to_bytes(4, "little")
        self._take(np.frombuffer(data, np.uint8), np.cumsum(np.frombuffer(lengths, "<u4"), dtype=np.int64))

    def _take(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self._data, self._ends = data, ends
        # NumPy makes objects of its own for a number or a slice: half of what reading a string would cost.
        self._text, self._stops = data.data, ends.data

    def __getstate__(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return self._data, self._ends

    def __setstate__(self, state: tuple[NDArray[np.uint8], NDArray[np.int64]]) -> None:
        self._take(*state)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index.__index__()
        if number < 0:
            number += len(self._stops)
        if not 0 <= number < len(self._stops):
            raise IndexError(f"index {index} of {len(self._ends)} strings")
        stops = self._stops
        return str(self._text[stops[number - 1] if number else 0 : stops[number]], "utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedStrings):
            return np.array_equal(self._ends, other._ends) and np.array_equal(self._data, other._data)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # as a list

    def digest(self) -> str:
        """SHA-256 of the strings and their order, in hex."""
        found = hashlib.sha256(self._ends.tobytes())
        found.update(self._data.data)
        return found.hexdigest()
