"""Killing ranks of a running job, and what the launcher makes of it."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import say, started
from figures import Figure, Target, median, ratio, spread
from peers import MANY, Absent, Launcher, ftrun, others, torchrun

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from common import Job, Settings, Stamps

RANKS = 2
DEADLINE = 90.0
WARM = (5.0, 7.0)
"""Seconds of training before a kill, at random between these, so that what a launcher prepares for it is ready."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL and what came after it.

    Attributes:
        time: of the kill, seconds since 1970.
        seconds: until all ranks had completed a new step; None if they did not.
        starts: how many times the script was started until then: 1 where the first restart succeeded.
        staged: step of the last snapshot that all ranks had taken.
        resumed: step that training went on from.
    """

    time: float
    seconds: float | None
    starts: int
    staged: int
    resumed: int

    @property
    def lost(self) -> int:
        """Steps lost beyond the last snapshot."""
        return max(0, self.staged - self.resumed)


def kill_one(job: Job, victim: int, delay: float, every: int) -> Kill | None:
    """Kill a rank some time after the attempt's first step, and wait for the next attempt's.

    Returns:
        None if the job was not training.
    """
    stamps = job.stamps
    seen = sorted(job.seen)
    began = job.wait_for(lambda: stamps.whole_step(other_than=seen), DEADLINE)
    if began is None:
        return None
    time.sleep(max(0.0, began + delay - time.time()))
    old = stamps.pids()
    pid = old[victim]
    if pid is None or job.process.poll() is not None:
        return None
    at = time.time()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    job.seen.update(each for each in old if each is not None)
    new = job.wait_for(lambda: stamps.whole_step(after=at, other_than=old), DEADLINE)
    starts = len({each.pid for each in stamps.of(0) if each.word == "start" and each.time > at})
    seconds = None if new is None else new - at
    return Kill(at, seconds, starts, _staged(stamps, old, at, every), _resumed(stamps, old, at))


def _staged(stamps: Stamps, pids: Sequence[int | None], before: float, every: int) -> int:
    """Step of the last snapshot of all ranks: it is complete when the step that follows it is."""
    return min(_last_boundary(stamps, rank, pids[rank], before, every) for rank in range(stamps.ranks))


def _last_boundary(stamps: Stamps, rank: int, pid: int | None, before: float, every: int) -> int:
    mine = (each for each in stamps.of(rank) if each.pid == pid and each.word == "step" and each.time < before)
    return max((each.step - 1 for each in mine if (each.step - 1) % every == 0), default=0)


def _resumed(stamps: Stamps, old: Sequence[int | None], after: float) -> int:
    new = [stamps.first_step(rank, after=after, other_than=old) for rank in range(stamps.ranks)]
    return min((each.step - 1 for each in new if each is not None), default=0)


@dataclass(frozen=True)
class Series:
    """Kills of one launcher: after some training, and at once after an attempt's first step."""

    name: str
    late: list[Kill]
    soon: list[Kill]
    shares: list[dict[str, float]]
    why: str = ""

    @property
    def seconds(self) -> list[float]:
        """From each of the late kills to the next step."""
        return [each.seconds for each in self.late if each.seconds is not None]


def first_step(settings: Settings) -> Iterator[Figure]:
    """``recovery.first_step``: the launchers take turns, each with a job that is killed several times."""
    runners = [("ftrun", ftrun(*MANY)), ("torchrun", torchrun(*MANY)), ("torchrun again", torchrun(*MANY))]
    absent = []
    for each in others(*MANY):
        if isinstance(each, Absent):
            absent.append(f"{each.name}: not measured, {each.why}")
        else:
            runners.append((each.name, each))
    series = {name: Series(name, [], [], []) for name, _ in runners}
    late, soon = settings.count(3, 2), 1
    for turn in range(settings.count(4, 1)):
        for name, launcher in runners:
            rng = settings.random(f"first_step/{name}/{turn}")
            problem = _one_job(settings, launcher, series[name], rng, late, soon)
            say(f"{name}: {spread(series[name].seconds)} {problem}")
            absent += [f"{name}: {problem}"] if problem else []
    yield _first_step_figure(series, dict(runners), absent)


def _one_job(settings: Settings, launcher: Launcher, series: Series, rng: random.Random, late: int, soon: int) -> str:
    folder = settings.folder(launcher.name)
    # A run that is named leaves its events in a place that is known.
    name = ("--name", "bench") if launcher.session else ()
    launcher = Launcher(launcher.name, (*launcher.command, *name), launcher.session, launcher.environment)
    command = launcher.run(RANKS, launcher.training, "--out", str(folder))
    with started(command, folder, ranks=RANKS, environment=launcher.environment) as job:
        for number in range(late + soon):
            delay = rng.uniform(*WARM) if number < late else 0.0
            kill = kill_one(job, rng.randrange(RANKS), delay, every=20)
            if kill is None or kill.seconds is None:
                return how_it_stands(job)
            (series.late if number < late else series.soon).append(kill)
        events = list(read_events(folder))
    series.shares.extend(shares(kill, events) for kill in series.late[-late:])
    return ""


def how_it_stands(job: Job) -> str:
    """Why a job makes no step any more, as far as its launcher says."""
    code = job.process.poll()
    state = f"no step within {DEADLINE:g} s" if code is None else f"it ended with code {code}"
    return f"{state}; its last word: {(job.output.strip().splitlines() or ['none'])[-1]}"


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """What ftrun recorded of the run named ``bench``, in order."""
    path = folder / "runs" / "bench" / "events" / "n0000.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def shares(kill: Kill, events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Where the seconds after a kill went, as ftrun's own ``recovered`` event says; empty where there is none."""
    recovered = (each for each in events if each.get("kind") == "recovered" and each["t"] >= kill.time)
    return dict(next(recovered, {}).get("seconds", {}))


def _first_step_figure(series: dict[str, Series], runners: dict[str, Launcher], absent: list[str]) -> Figure:
    medians = {name: median(each.seconds) for name, each in series.items()}
    notes = [_series_line(each, runners[each.name].version) for each in series.values()]
    if parts := [each for each in series["ftrun"].shares if each]:
        split = {name: median([part.get(name, 0.0) for part in parts]) or 0.0 for name in parts[-1]}
        told = ", ".join(f"{name} {value:.3f}" for name, value in split.items())
        notes.append(f"ftrun's own account, medians in seconds: {told}")
    return Figure(
        "recovery.first_step",
        ratio(medians["ftrun"], medians["torchrun"]),
        Target("<=", 0.10),
        control=ratio(medians["torchrun again"], medians["torchrun"]),
        n=len(series["ftrun"].seconds),
        reference={f"{name} (s)": value for name, value in medians.items()},
        notes=[*notes, *absent],
    )


def _series_line(series: Series, version: str) -> str:
    soon = [each.seconds for each in series.soon if each.seconds is not None]
    name = f"{series.name} {version}".strip()
    return f"{name}: {spread(series.seconds)}; killed right after an attempt's first step: {spread(soon)}"


def in_a_row(settings: Settings) -> Iterator[Figure]:
    """``recovery.restarts`` and ``recovery.lost_steps``: kills in a row on one job."""
    count = settings.count(50, 5)
    restarts = ("--max-restarts", str(2 * count))
    launcher = ftrun(*restarts, "--name", "bench")
    ours, problem = _row(settings, launcher, count)
    again, _ = _row(settings, launcher, count)
    if settings.wants("recovery.restarts"):
        # Each of its restarts can take half a minute until the stale addresses are given up: fewer will do.
        fewer = settings.count(10, 3)
        stock, stock_problem = _row(settings, torchrun(*restarts, shared_store=True), fewer)
        yield Figure(
            "recovery.restarts",
            _succeeded(ours) / count,
            Target("=", 1.0),
            control=_succeeded(again) / count,
            n=count,
            reference={"torchrun": _succeeded(stock) / fewer},
            notes=[_row_line("ftrun", ours, count, problem), _row_line("torchrun", stock, fewer, stock_problem)],
        )
    if settings.wants("recovery.lost_steps"):
        sharded, sharded_problem = _row(settings, launcher, settings.count(20, 3), "--layout", "fsdp2")
        yield lost_steps({"DDP": (ours, problem), "FSDP2": (sharded, sharded_problem)}, again)


def lost_steps(rows: Mapping[str, tuple[Sequence[Kill], str]], again: Sequence[Kill]) -> Figure:
    """``recovery.lost_steps``: kills by layout, each with what went wrong; and those of the first layout again."""
    lost = {name: [each.lost for each in row if each.seconds is not None] for name, (row, _) in rows.items()}
    all_of_them = [steps for each in lost.values() for steps in each]
    control = [each.lost for each in again if each.seconds is not None]
    notes = [
        f"{name}: {sum(map(bool, each))} of {len(each)} kills lost a whole snapshot, {sum(each)} steps in all"
        + (f"; {rows[name][1]}" if rows[name][1] else "")
        for name, each in lost.items()
    ]
    return Figure(
        "recovery.lost_steps",
        float(max(all_of_them)) if all(lost.values()) else None,
        Target("=", 0.0),
        control=float(max(control)) if control else None,
        n=len(all_of_them),
        notes=["the worst kill counts: steps done again that a snapshot of all ranks held when it came", *notes],
    )


_EVERY = 5
"""Steps between the snapshots of jobs that are killed in a row."""


def _row(settings: Settings, launcher: Launcher, count: int, *more: str) -> tuple[list[Kill], str]:
    folder = settings.folder(launcher.name)
    rng = settings.random("in a row")
    options = ("--out", str(folder), "--every", str(_EVERY), "--pace", "0.01", *more)
    command = launcher.run(RANKS, launcher.training, *options)
    kills: list[Kill] = []
    with started(command, folder, ranks=RANKS, environment=launcher.environment) as job:
        while len(kills) < count:
            kill = kill_one(job, rng.randrange(RANKS), rng.uniform(0.0, 0.4), _EVERY)
            kills += [kill] if kill is not None else []
            if kill is None or kill.seconds is None:
                return kills, how_it_stands(job)
            if len(kills) % 10 == 0:
                say(f"{launcher.name}: {_succeeded(kills)} of {len(kills)} restarts succeeded")
    return kills, ""


def _succeeded(kills: Sequence[Kill]) -> int:
    """After how many kills the very next attempt made a step."""
    return sum(each.seconds is not None and each.starts == 1 for each in kills)


def _row_line(name: str, kills: Sequence[Kill], asked: int, problem: str) -> str:
    seconds = [each.seconds for each in kills if each.seconds is not None]
    more = sum(max(0, each.starts - 1) for each in kills)
    line = f"{name}: {_succeeded(kills)} of {asked} kills were followed by an attempt that made a step"
    line += f", {more} attempts fell by themselves, {spread(seconds)} to the next step"
    return f"{line}; {problem}" if problem else line
