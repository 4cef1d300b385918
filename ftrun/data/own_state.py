"""Whether a dataset's samples depend on how often it was read: then it may not be read more often than it is asked."""

from __future__ import annotations

import functools
import io
import itertools
import random
import types
from typing import Any

import numpy as np
import torch

# How far is looked: at so many objects, through so many others, and at the beginning of what holds many.
_MOST, _DEPTH, _SOME = 500, 10, 20
_GENERATORS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)
# Without a state, or with one that reading again doesn't change: where a file stands, for one.
_PASSED = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType),
    *(np.ndarray, torch.Tensor, random.SystemRandom, io.IOBase),
)


def has_own_state(dataset: Any) -> bool:
    """Whether a dataset holds a random generator of its own, or an iterator that moves on.

    Looked for in attributes, lists, dicts, and what functions hold; a module's global variables are not.

    Args:
        dataset: any; a transform's and a Subset's dataset are looked at, too.
    """
    everyones = _everyones()
    level, seen = [dataset], {id(dataset): dataset}  # kept, so that no other gets its id
    for _ in range(_DEPTH):
        following = []
        for value in level:
            if isinstance(value, _GENERATORS) or hasattr(type(value), "__next__"):
                return True
            for each in _held(value):
                if id(each) in seen or isinstance(each, _PASSED) or any(each is one for one in everyones):
                    continue
                if len(seen) >= _MOST:
                    return False
                seen[id(each)] = each
                following.append(each)
        level = following
    return False


def _everyones() -> tuple[Any, ...]:
    """The generators of the process, which are seeded."""
    of_numpy = np.random.mtrand._rand
    return getattr(random.random, "__self__", None), of_numpy, of_numpy._bit_generator, torch.default_generator


def _held(value: Any) -> list[Any]:
    if type(value) in (list, tuple):
        return list(value[:_SOME])
    if isinstance(value, dict):
        return list(itertools.islice(dict.values(value), _SOME))
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return [value.__self__, getattr(value, "__func__", None)]
    if isinstance(value, types.FunctionType):
        return [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_enclosed(value)]
    try:
        return list(vars(value).values())
    except Exception:  # it has none, or is of the kind that answers as it likes
        return []


def _enclosed(function: types.FunctionType) -> list[Any]:
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # it is empty yet
            continue
    return held
