"""``detect.hang``: ten jobs that hang and ten that are only slow, each judged by ftrun's own events."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import JOBS, say, started
from figures import Figure, Target
from kills import read_events
from peers import ftrun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common import Settings, Stamp

RANKS = 2
DEADLINE = 75.0
SECONDS = 5.0
_CALLED = ("hang", "left early")
"""What ftrun calls a run that makes no step; the second where a rank had ended in good order before."""


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        name: as ``jobs/hang.py`` knows it.
        what: for people.
        hangs: whether it should be ended.
        sets: limits that the job's file would give, for phases whose limit is half an hour by default.
        falls: failures that are no hang and belong to the case.
    """

    name: str
    what: str
    hangs: bool
    sets: tuple[str, ...] = ()
    falls: int = 0


CASES = (
    Case("sleep", "a rank sleeps for ever in a step", True),
    Case("lock", "a rank waits for a lock that is never released", True),
    Case("stopped", "a rank is stopped (SIGSTOP)", True),
    Case("spin", "a rank computes for ever in Python", True),
    Case("collective", "a rank waits in a collective that the other doesn't make", True),
    Case("loader", "a data loader's worker is stuck", True),
    Case("save", "a save waits for a file that never opens", True, ("watch.save=4s",)),
    Case("left", "a rank has left with code 0 and its peer waits for it", True),
    Case("plain", "a script without Session, a rank sleeps for ever", True),
    Case("end", "a rank never leaves after the last step", True, ("watch.end=4s",)),
    Case("slow_import", "imports take 8 s", False),
    Case("slow_first_step", "the first step takes 8 s", False),
    Case("slow_save", "a save takes 8 s", False),
    Case("slow_eval", "an evaluation takes 8 s", False),
    Case("slow_restore", "restoring takes 8 s", False, falls=1),
    Case("slow_end", "8 s of work after the last step", False),
    Case("slow_data", "a batch comes 3 s late, once", False),
    Case("slow_down", "steps become nine times as long, little by little", False),
    Case("slow_step", "one step takes five times as long", False),
    Case("slow_callback", "a callback takes 2 s at every twentieth step", False),
)


@dataclass(frozen=True)
class Verdict:
    """How ftrun did on one case."""

    right: bool
    seconds: float | None
    words: str


def hang(settings: Settings) -> Iterator[Figure]:
    """The share of the twenty that is judged right and in time."""
    cases = CASES if not settings.quick else CASES[::4]
    verdicts = {}
    for case in cases:
        verdicts[case.name] = _run(settings, case)
        say(f"{case.name}: {_line(case, verdicts[case.name])}")
    wrong = [case for case in cases if not verdicts[case.name].right]
    times = [each.seconds for each in verdicts.values() if each.seconds is not None]
    yield Figure(
        "detect.hang",
        (len(cases) - len(wrong)) / len(cases),
        Target("=", 1.0),
        n=len(cases),
        reference={"slowest verdict (s)": max(times, default=None), "torchrun": "none"},
        notes=[
            f"a hang is judged right if the verdict comes within 3 usual steps + {SECONDS:g} s and the run ends well,",
            "a slow phase when the run ends well and nothing was called a hang",
            "limits of save and end are half an hour by default: those two cases set them to 4 s in the job",
            *(f"{case.what}: {_line(case, verdicts[case.name])}" for case in cases),
        ],
    )


def _line(case: Case, verdict: Verdict) -> str:
    return f"{'right' if verdict.right else 'WRONG'}, {verdict.words}"


def _run(settings: Settings, case: Case) -> Verdict:
    folder = settings.folder(case.name)
    sets = [word for each in case.sets for word in ("--set", each)]
    launcher = ftrun("--name", "bench", *sets, "--nproc-per-node", str(RANKS))
    if case.name == "plain":
        script = [str(JOBS / "hang_plain.py"), str(folder)]
    else:
        script = [str(JOBS / "hang.py"), "--out", str(folder), "--case", case.name]
    with started([*launcher.command, *script], folder, ranks=RANKS) as job:
        code = job.wait(DEADLINE)
        return judge(case, list(read_events(folder)), job.stamps.all(), code)


def judge(case: Case, events: Sequence[dict[str, Any]], stamps: Sequence[Stamp], code: int | None) -> Verdict:
    """Judge one case by what ftrun recorded and what the ranks stamped."""
    falls = [each for each in events if each["kind"] == "failed"]
    hangs = [each for each in falls if each["cause"] in _CALLED]
    ending = "the run ended well" if code == 0 else "no end in time" if code is None else f"exit code {code}"
    if not case.hangs:
        right = not hangs and len(falls) == case.falls and code == 0
        told = "; ".join(f"{each['cause']}: {each['message']}" for each in falls[case.falls :] or hangs)
        return Verdict(right, None, f"{ending}{'; ' + told if told else ''}")
    if not hangs:
        told = "; ".join(f"{each['cause']}: {each['message']}" for each in falls)
        return Verdict(False, None, f"no verdict of a hang{' but ' + told if told else ''}; {ending}")
    since, usual = hang_began(stamps, hangs[0]["t"]), usual_step(stamps)
    seconds = hangs[0]["t"] - since
    right = 0 <= seconds <= 3 * usual + SECONDS and len(falls) == 1 and code == 0
    told = f"{hangs[0]['cause']!r} after {seconds:.2f} s, names rank {hangs[0]['failed_rank']}"
    return Verdict(right, seconds, f"{told}; {ending}")


def hang_began(stamps: Sequence[Stamp], before: float) -> float:
    """When nothing went on any more: the last step or the fault, whichever came later."""
    return max((each.time for each in stamps if each.word in ("step", "fault") and each.time < before), default=before)


def usual_step(stamps: Sequence[Stamp]) -> float:
    """The usual step of the first attempt's rank 0, in seconds."""
    first = next((each.pid for each in stamps if each.rank == 0), None)
    times = [each.time for each in stamps if each.pid == first and each.word == "step"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0
