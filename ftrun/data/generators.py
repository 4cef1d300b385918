"""The three global random generators of a process: to seed them, and to see at little cost whether one has moved.

A state taken before and one taken after are equal if, and only if, nothing was drawn in between and nobody set the
generator: all three are Mersenne Twisters, whose states come again after 2**19937 - 1 draws, and the number that the
Box-Muller method keeps in reserve is part of the state. A draw that is taken back (``setstate``) can't be seen.

NumPy's public way to a state takes 23 µs and Python's 7, most of it to make objects of 624 words. Here the words are
copied from where they lie, in a tenth of a microsecond. Where that is, is tried out on generators of known state; if
one of them is found nowhere, as in another Python, the public way is taken.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORDS = 624
_PYTHON = struct.Struct(f"{_WORDS + 1}I")  # how many words are used up, and the words
_TWISTER = 4 * (_WORDS + 1)  # bytes; NumPy's: the words, and how many are used up
_RESERVE = struct.Struct("i4xd")  # NumPy's: whether there is a number in reserve, and the number


class Generator(Protocol):
    """One global generator. Its methods are called by the thread that loads samples."""

    def seed(self, bits: int) -> None:
        """Settle everything that it will give, by 64 bits."""
        ...

    def unsettle(self, bits: int) -> None:
        """Make its state unlike any just after a seed, and different for other bits."""
        ...

    def state(self) -> Any:
        """Its state, to be compared with another one or put back."""
        ...

    def put_back(self, state: Any) -> None:
        """Make its state what it was."""
        ...


class PythonGenerator:
    """What the functions of the module ``random`` draw from."""

    def __init__(self) -> None:
        self._random: random.Random = getattr(random.random, "__self__")  # noqa: B009  unknown to the type checker
        found = _offset([(each, _PYTHON.pack(*_python_words(each))) for each in map(random.Random, (1, 2))])
        self._words = None if found is None else _at(id(self._random) + found, _PYTHON.size)
        self._kept: tuple[bytes, tuple[int, ...]] = b"", ()

    def seed(self, bits: int) -> None:
        """See :meth:`Generator.seed`."""
        self._random.seed(bits)

    def unsettle(self, bits: int) -> None:
        """See :meth:`Generator.unsettle`."""
        self._random.seed(bits)
        self._random.gauss(0.0, 1.0)

    def state(self) -> tuple[bytes, float | None]:
        """See :meth:`Generator.state`."""
        words = _PYTHON.pack(*_python_words(self._random)) if self._words is None else self._words.raw
        return words, getattr(self._random, "gauss_next", None)

    def put_back(self, state: tuple[bytes, float | None]) -> None:
        """See :meth:`Generator.put_back`."""
        words, reserve = state
        if self._kept[0] != words:  # in a training process that draws nothing it is the same each time
            used, *key = _PYTHON.unpack(words)
            self._kept = words, (*key, used)
        self._random.setstate((3, self._kept[1], reserve))


class NumpyGenerator:
    """What the functions of ``numpy.random`` draw from: the legacy generator."""

    def __init__(self) -> None:
        self._random = np.random.mtrand._rand
        self._twister: Any = None  # whose words these are
        self._words: Any = None
        self._reserve: Any = None

    def seed(self, bits: int) -> None:
        """See :meth:`Generator.seed`; by the upper 32 bits."""
        # A single word is five times as fast as two. The upper one, because torch takes the lower one for the
        # same kind of generator: the two streams would be one.
        np.random.seed(bits >> 32)

    def unsettle(self, bits: int) -> None:
        """See :meth:`Generator.unsettle`."""
        self.seed(bits)
        np.random.standard_normal()

    def state(self) -> tuple[bytes, bytes]:
        """See :meth:`Generator.state`.

        Raises:
            UsageError: somebody has replaced the Mersenne Twister, the only one that can be seeded.
        """
        twister = self._random._bit_generator
        if twister is not self._twister:
            self._look_at(twister)
        return _numpy_state(self._random) if self._words is None else (self._words.raw, self._reserve.raw)

    def put_back(self, state: tuple[bytes, bytes]) -> None:
        """See :meth:`Generator.put_back`."""
        words, (has, reserve) = state[0], _RESERVE.unpack(state[1])
        if self._words is None or has:
            key = np.frombuffer(words, np.uint32, _WORDS)
            np.random.set_state(("MT19937", key, int.from_bytes(words[-4:], sys.byteorder), has, reserve))
            return
        if self._reserve.raw != state[1]:
            np.random.seed(0)  # lets go of the number in reserve
        with self._twister.lock:
            self._words.raw = words

    def _look_at(self, twister: Any) -> None:
        if type(twister) is not np.random.MT19937:
            raise UsageError(
                f"NumPy's global generator is a {type(twister).__name__} now, and only its MT19937 can be seeded for "
                "each sample: leave numpy.random.set_bit_generator out, or give the loader sample_seeds=False"
            )
        self._twister, self._words = twister, None
        words, reserve = _at(twister.ctypes.state_address, _TWISTER), _reserve_offset()
        if reserve is not None and words.raw == _numpy_state(self._random)[0]:
            self._words, self._reserve = words, _at(id(self._random) + reserve, _RESERVE.size)


class TorchGenerator:
    """Torch's default CPU generator."""

    def __init__(self) -> None:
        self._size = torch.default_generator.get_state().nbytes

    def seed(self, bits: int) -> None:
        """See :meth:`Generator.seed`; what it draws depends on the lower 32 bits."""
        # torch.manual_seed also visits every accelerator and takes a hundred times as long.
        torch.default_generator.manual_seed(bits)

    def unsettle(self, bits: int) -> None:
        """See :meth:`Generator.unsettle`."""
        self.seed(bits)
        torch.empty((), device="cpu").normal_(generator=torch.default_generator)  # whatever the default device

    def state(self) -> bytes:
        """See :meth:`Generator.state`."""
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), self._size)

    def put_back(self, state: bytes) -> None:
        """See :meth:`Generator.put_back`."""
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@cache
def generators() -> tuple[Generator, ...]:
    """All three of this process."""
    return PythonGenerator(), NumpyGenerator(), TorchGenerator()


def states() -> list[Any]:
    """The states of all three."""
    return [each.state() for each in generators()]


def put_back(before: Sequence[Any]) -> None:
    """Make the states of all three what they were."""
    for each, state in zip(generators(), before, strict=True):
        if each.state() != state:
            each.put_back(state)


def _python_words(generator: random.Random) -> tuple[int, ...]:
    _, words, _ = generator.getstate()
    return words[-1], *words[:-1]


def _numpy_state(generator: np.random.RandomState) -> tuple[bytes, bytes]:
    state: Any = generator.get_state()
    _, key, used, has, reserve = state
    return key.tobytes() + used.to_bytes(4, sys.byteorder), _RESERVE.pack(has, reserve)


@cache
def _reserve_offset() -> int | None:
    """Where in NumPy's object its number in reserve is."""
    known = []
    for seed, draws in ((1, 1), (2, 3), (3, 5), (4, 2)):
        generator = np.random.RandomState(seed)
        generator.standard_normal(draws)
        known.append((generator, _numpy_state(generator)[1]))
    return _offset(known)


def _offset(known: Sequence[tuple[object, bytes]]) -> int | None:
    """Where in the memory of objects of one type the bytes lie that each is known to hold; None where nowhere."""
    first, sought = known[0]
    found = _memory(first).find(sought)
    everywhere = found >= 0 and all(_memory(each)[found : found + len(it)] == it for each, it in known)
    return found if everywhere else None


def _memory(value: object) -> bytes:
    return ctypes.string_at(id(value), type(value).__basicsize__)


def _at(address: int, size: int) -> Any:
    """What lies there, as bytes, in its attribute ``raw``."""
    return (ctypes.c_char * size).from_address(address)
