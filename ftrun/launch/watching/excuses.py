"""What the processes of a group that seems to hang may show in their favour. Pure.

A learnt limit knows only what it has seen. When it has passed, some things tell slow from stuck: a compiler at work,
loader workers that are busy, storage that doesn't answer, a person at a debugger. Each counts for a time only, but for
the debugger. A limit that the job gives is different: it means what it says, and only a debugger stands against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.launch.watching.culprit import short, waits_for_others, where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ftrun.launch.evidence.model import RankEvidence
    from ftrun.launch.watching.watch import Verdict
    from ftrun.launch.watching.work import Work

_DEBUGGERS = ("/pdb.py:", "/bdb.py:", "/debugpy/", "/pydevd", "/IPython/")
# Compiled functions run through other frames of these packages; these are there only while something is compiled.
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py:",
    "/torch/_inductor/select_algorithm.py:",
    "/torch/utils/cpp_extension.py:",
    "/triton/compiler/",
    "/triton/runtime/autotuner.py:",
)
_IMPORTS = ("<frozen importlib",)
_NETWORK = ("/socket.py:", "/ssl.py:", "/http/client.py:", "/urllib3/", "/asyncio/", "/subprocess.py:")

_STORAGE_SECONDS = 120.0
_CHILDREN_SECONDS = 60.0
_TIMES_THE_LIMIT = 10.0
_COMPILE_SECONDS = 1800.0
_NETWORK_SECONDS = 600.0


@dataclass(frozen=True)
class Excuse:
    """Why a group may be slow and not stuck.

    Attributes:
        why: as the end of a sentence.
        longest: seconds of standing still that it accounts for.
    """

    why: str
    longest: float


def excuse_of(verdict: Verdict, ranks: Sequence[RankEvidence], works: Mapping[int, Work]) -> Excuse | None:
    """What speaks against a hang, or None.

    Args:
        verdict: that says it is one.
        ranks: evidence of all ranks, with stacks.
        works: what their processes do, by rank.
    """
    living = [each for each in ranks if each.exit_code is None]
    looks: list[Callable[[], Excuse | None]] = [lambda: _debugging(living)]
    if not verdict.firm:
        looks += [lambda: _compiling(living), lambda: _storage(verdict, living, works)]
        looks.append(lambda: _children(verdict, works))
        if not verdict.session:
            looks.append(lambda: _plain(living, works))
    return next((found for look in looks if (found := look()) is not None), None)


def _debugging(ranks: Sequence[RankEvidence]) -> Excuse | None:
    for each in ranks:
        if each.state == "t" or any(_is_in(frame, _DEBUGGERS) for frame in each.stack):
            return Excuse(f"rank {each.rank} is in a debugger", math.inf)
    return None


def _compiling(ranks: Sequence[RankEvidence]) -> Excuse | None:
    for each in ranks:
        if any(_is_in(frame, _COMPILERS) for frame in each.stack):
            return Excuse(f"rank {each.rank} is compiling", _COMPILE_SECONDS)
        if any(_is_in(frame, _IMPORTS) for frame in each.stack):
            return Excuse(f"rank {each.rank} is importing", _COMPILE_SECONDS)
    return None


def _storage(verdict: Verdict, ranks: Sequence[RankEvidence], works: Mapping[int, Work]) -> Excuse | None:
    longest = max(_STORAGE_SECONDS, _TIMES_THE_LIMIT * verdict.limit)
    for each in ranks:
        if each.state == "D" or (each.rank in works and works[each.rank].in_kernel):
            return Excuse(f"rank {each.rank} waits for storage or a device", longest)
    return None


def _children(verdict: Verdict, works: Mapping[int, Work]) -> Excuse | None:
    longest = max(_CHILDREN_SECONDS, _TIMES_THE_LIMIT * verdict.limit) if verdict.session else math.inf
    for rank, work in works.items():
        if work.children:
            return Excuse(f"processes that rank {rank} has started are at work", longest)
    return None


def _plain(ranks: Sequence[RankEvidence], works: Mapping[int, Work]) -> Excuse | None:
    """A script without a Session may do anything between two steps; it hangs if it does nothing at all."""
    for each in ranks:
        if each.rank in works and works[each.rank].main:
            return Excuse(f"rank {each.rank} is at work, and a script without a Session may evaluate or save", math.inf)
        if not waits_for_others(each.stack) and _is_in(where(each.stack), _NETWORK):
            return Excuse(f"rank {each.rank} waits in {short(where(each.stack))}", _NETWORK_SECONDS)
    stopped = any(each.state == "T" for each in ranks)
    if len(ranks) > 1 and not stopped and not any(waits_for_others(each.stack) for each in ranks):
        return Excuse("no rank waits for another", math.inf)
    return None


def _is_in(frame: str, places: Sequence[str]) -> bool:
    return any(place in frame for place in places)
