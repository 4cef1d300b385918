"""The hang verdict, on made-up beats and a made-up clock: ten ways to hang, and more ways to be slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from conftest import eventually

from ftrun import pulse
from ftrun.config.supervisor import Watch as WatchSection
from ftrun.launch.evidence import process_state
from ftrun.launch.evidence.model import RankEvidence
from ftrun.launch.watching import work
from ftrun.launch.watching.culprit import name_culprit
from ftrun.launch.watching.limits import merged
from ftrun.launch.watching.watch import Value, Verdict, Watch, WatchLimits
from ftrun.launch.watching.work import Work
from ftrun.pulse import Beat, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TURN = 0.25  # exact in binary, so that sums are
IN_COLLECTIVE = ("/lib/torch/distributed/distributed_c10d.py:2834 in all_reduce", "/job/train.py:40 in main")
IN_BACKWARD = ("/lib/torch/autograd/graph.py:824 in _engine_run_backward", "/lib/torch/_tensor.py:630 in backward")
IN_SCRIPT = ("/job/train.py:31 in load", "/job/train.py:40 in main")


def histogram(*durations: float) -> tuple[int, ...]:
    counts = [0] * 128
    for each in durations:
        counts[pulse.bucket(each)] += 1
    return tuple(counts)


@dataclass
class Group:
    """Ranks that train together, seen as the agent sees them."""

    limits: WatchLimits = field(default_factory=WatchLimits)
    num_ranks: int = 2
    owned: bool = True
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.watch = Watch(self.limits)
        self.ended: dict[int, float] = {}
        self.verdict = Verdict(Value.PROGRESS, "", 0, 0, 0, "")
        self.start()

    def start(self) -> None:
        new = Beat(0, 0, None, Phase.START, owned=self.owned, time=0.0, first_step=0.0)
        self.beats = dict.fromkeys(range(self.num_ranks), new)

    def put(self, phase: Phase, *ranks: int, steps: int = 0) -> None:
        """Some ranks, or all, enter a phase after some more steps."""
        for rank in ranks or tuple(self.beats):
            old = self.beats[rank]
            self.beats[rank] = replace(old, step=old.step + steps, phase=phase, phase_since=self.now, time=self.now)

    def look(self) -> Verdict:
        self.now += TURN
        living = {rank: beat for rank, beat in self.beats.items() if rank not in self.ended}
        self.verdict = self.watch.observe(living, self.now, self.ended)
        return self.verdict

    def train(self, count: int, seconds: float) -> None:
        """Make steps; of those that are shorter than a look, many between two looks."""
        for rank, beat in self.beats.items():
            self.beats[rank] = replace(beat, steps=merged([beat.steps, histogram(*[seconds] * count)]))
        if seconds <= 1.0:
            self.put(Phase.STEP, steps=count)
            assert self.look().value is Value.PROGRESS, self.verdict
            return
        for _ in range(count):
            self.put(Phase.STEP, steps=1)
            self.stay(seconds)

    def stay(self, seconds: float) -> None:
        """Nothing moves for a while, and nobody may call it a hang."""
        for _ in range(round(seconds / TURN)):
            assert self.look().value is not Value.HUNG, self.verdict

    def time_to_hang(self, at_most: float) -> float:
        began = self.now
        while self.look().value is not Value.HUNG:
            assert self.now - began <= at_most, self.verdict
        return self.now - began


def trained(usual: float = 0.2, count: int = 100, **options: Any) -> Group:
    group = Group(**options)
    group.put(Phase.FIRST_STEP)
    group.stay(1)
    group.train(count, usual)
    return group


# --- hangs


def all_stand(usual: float) -> Callable[[], Group]:
    return lambda: trained(usual, count=25 if usual > 1 else 100)


def one_is_behind() -> Group:
    group = trained()
    group.put(Phase.STEP, 0, steps=1)
    return group


def uneven_steps() -> Group:
    group = trained(0.2, 100)
    group.train(10, 0.35)
    group.train(100, 0.2)
    return group


def after_a_checkpoint() -> Group:
    group = trained()
    group.put(Phase.SAVE)
    group.stay(300)
    group.put(Phase.STEP)
    return group


def after_an_evaluation() -> Group:
    group = trained()
    group.put(Phase.EVAL)
    group.stay(1000)
    group.put(Phase.STEP)
    return group


def the_other_saves_what_this_one_never_reaches() -> Group:
    group = trained()
    group.put(Phase.SAVE, 0, steps=1)
    return group


def the_other_is_at_its_end() -> Group:
    group = trained()
    group.put(Phase.END, 0, steps=1)
    return group


def one_has_left() -> Group:
    group = trained()
    group.ended[1] = group.now
    return group


def in_the_second_step_after_a_restart() -> Group:
    group = trained()
    group.watch.begin()
    group.start()
    group.put(Phase.FIRST_STEP)
    group.stay(60)
    group.put(Phase.STEP, steps=1)
    return group


def alone() -> Group:
    return trained(num_ranks=1)


HANGS = {
    "all stand, 10 ms steps": (all_stand(0.01), 0.01),
    "all stand, 0.2 s steps": (all_stand(0.2), 0.2),
    "all stand, 20 s steps": (all_stand(20.0), 20.0),
    "one is behind": (one_is_behind, 0.2),
    "uneven steps": (uneven_steps, 0.2),
    "after a checkpoint": (after_a_checkpoint, 0.2),
    "after an evaluation": (after_an_evaluation, 0.2),
    "the other saves": (the_other_saves_what_this_one_never_reaches, 0.2),
    "the other is at its end": (the_other_is_at_its_end, 0.2),
    "one has left": (one_has_left, 0.2),
    "after a restart": (in_the_second_step_after_a_restart, 0.2),
    "alone": (alone, 0.2),
}


@pytest.mark.parametrize(("scene", "usual"), HANGS.values(), ids=HANGS.keys())
def test_a_hang_is_seen_within_three_steps_and_five_seconds(scene: Callable[[], Group], usual: float) -> None:
    group = scene()
    waited = group.time_to_hang(3 * usual + 5)
    assert waited > usual + 2  # and not at the first stumble
    assert group.verdict.session
    assert not group.verdict.firm
    confirmed = group.watch.confirm(group.verdict, stacks({0: IN_SCRIPT, 1: IN_COLLECTIVE}), idle())
    assert confirmed is group.verdict


def test_the_verdict_explains_itself() -> None:
    group = one_is_behind()
    group.time_to_hang(6)
    verdict = group.verdict
    assert (verdict.rank, verdict.step, verdict.phase) == (1, 100, "step")
    assert verdict.waited > verdict.limit
    assert verdict.why == (
        "rank 1 has been in step 101 for 4.25 s; steps took 0.22 s at most (p99.9 of 100; the longest 0.22 s), the "
        "limit is 4 s"
    )


def test_a_rank_that_left_is_named() -> None:
    group = one_has_left()
    group.time_to_hang(6)
    assert group.verdict.phase == "end"
    assert group.verdict.why.startswith(
        "rank 1 left with exit code 0 4 s ago, and rank 0 has been in step 101 for 4.25 s; "
    )


# --- slow, and no hang


def slow(phase: Phase, seconds: float, *ranks: int) -> Callable[[], None]:
    def scene() -> None:
        group = trained()
        group.put(phase, *ranks)
        group.stay(seconds)

    return scene


def start_of_everything() -> None:
    group = Group()
    for phase in (Phase.START, Phase.RESTORE, Phase.FIRST_STEP):
        group.put(phase)
        group.stay(1700)
    group.put(Phase.STEP, steps=1)
    group.stay(3)


def first_steps_are_slow() -> None:
    group = trained(count=10)
    group.stay(600)


def stall_within_the_limit() -> None:
    group = trained()
    group.stay(4.0)


def stall_seen_before() -> None:
    group = trained(0.2, 30_000)
    group.train(1, 0.2)
    for rank, beat in group.beats.items():
        group.beats[rank] = replace(beat, steps=merged([beat.steps, histogram(45.0)]))
    group.stay(50)


def one_evaluates_and_the_others_wait() -> None:
    group = trained(num_ranks=4)
    group.put(Phase.EVAL, 0)
    group.stay(900)
    group.put(Phase.STEP, 0)
    group.stay(3)
    group.train(1, 0.2)


def one_leaves_and_the_others_go_on() -> None:
    group = trained()
    group.ended[0] = group.now
    for _ in range(50):
        group.put(Phase.STEP, 1, steps=1)
        group.stay(1)
    group.put(Phase.END, 1)
    group.stay(1500)


def the_machine_sleeps() -> None:
    group = trained()
    for _ in range(5):
        group.stay(3)
        group.now += 3600


def the_clock_is_set() -> None:
    group = trained()
    group.stay(2)
    group.now -= 7200
    group.stay(1)
    group.train(1, 0.2)
    group.now += 9
    group.stay(2)


def switched_off() -> None:
    group = trained(limits=WatchLimits(enabled=False))
    group.stay(4000)


def no_limit_for_steps() -> None:
    group = trained(limits=WatchLimits(step=float("inf")))
    group.stay(4000)


def no_page_can_be_read() -> None:
    watch = Watch(WatchLimits())
    for second in range(4000):
        assert watch.observe({0: None, 1: None}, float(second)).value is Value.PROGRESS


SLOW = {
    "a long checkpoint": slow(Phase.SAVE, 1700),
    "a long checkpoint of one rank": slow(Phase.SAVE, 1700, 0),
    "a long evaluation": slow(Phase.EVAL, 1700),
    "the exit barrier": slow(Phase.END, 1700),
    "one is at its end, and waits": slow(Phase.END, 3, 0),
    "the loader of an epoch starts": slow(Phase.FIRST_STEP, 1700),
    "a dataset is scanned, a checkpoint read, a model compiled": start_of_everything,
    "the first few steps": first_steps_are_slow,
    "a stall within the limit": stall_within_the_limit,
    "a stall that was seen before": stall_seen_before,
    "one evaluates": one_evaluates_and_the_others_wait,
    "one leaves": one_leaves_and_the_others_go_on,
    "the machine sleeps": the_machine_sleeps,
    "the clock is set": the_clock_is_set,
    "switched off": switched_off,
    "no limit": no_limit_for_steps,
    "no page": no_page_can_be_read,
}


@pytest.mark.parametrize("scene", SLOW.values(), ids=SLOW.keys())
def test_what_is_slow_is_no_hang(scene: Callable[[], None]) -> None:
    scene()


def test_slow_is_said() -> None:
    group = trained()
    assert group.verdict.value is Value.PROGRESS
    group.stay(2)
    assert (group.verdict.value, group.verdict.rank) == (Value.SLOW, 0)
    group.train(1, 0.2)
    assert group.verdict.value is Value.PROGRESS


@pytest.mark.parametrize("phase", [Phase.START, Phase.RESTORE, Phase.FIRST_STEP, Phase.SAVE, Phase.EVAL, Phase.END])
def test_every_phase_has_an_end(phase: Phase) -> None:
    group = trained()
    group.put(phase)
    assert group.time_to_hang(1801) > 1799
    assert group.verdict.firm


def test_a_given_limit_is_kept() -> None:
    group = trained(limits=WatchLimits(step=60.0, given=frozenset({"step"})))
    assert group.time_to_hang(61) > 59.5
    assert "watch.step" in group.verdict.why


def test_a_node_of_several_leaves_steps_to_the_ceiling() -> None:
    group = trained(limits=WatchLimits().of_a_part())
    assert group.time_to_hang(1801) > 1799


def test_others_get_the_end_limit_after_one_has_left() -> None:
    group = Group(limits=WatchLimits(end=100.0), owned=False)
    group.stay(500)
    group.ended[0] = group.now
    assert group.time_to_hang(101) > 99


def test_each_hang_makes_the_learnt_limit_more_careful() -> None:
    group = trained()
    evidence = stacks({0: IN_SCRIPT, 1: IN_COLLECTIVE})
    for wanted in (4.0, 4 * 4.0):
        group.time_to_hang(wanted + 1)
        assert group.watch.confirm(group.verdict, evidence).value is Value.HUNG
        group.watch.begin()
        group.start()
        group.train(50, 0.2)
    for _ in range(3):  # an hour without a hang, and the limit is as it was
        group.put(Phase.EVAL)
        group.stay(1300)
    group.train(1, 0.2)
    group.time_to_hang(5)


def test_limits_come_from_the_job() -> None:
    limits = WatchLimits.from_config(
        WatchSection(step=timedelta(minutes=2), save="off", eval="auto", floor=timedelta(seconds=7))
    )
    assert (limits.step, limits.save, limits.eval, limits.start) == (120.0, float("inf"), None, 1800.0)
    assert (limits.floor, limits.ceiling, limits.enabled) == (7.0, 1800.0, True)
    assert limits.given == {"step", "save", "eval"}


# --- scripts without a Session


def stacks(frames: Mapping[int, tuple[str, ...]], state: str = "S") -> list[RankEvidence]:
    return [RankEvidence(rank, stack=stack, state=state) for rank, stack in frames.items()]


def idle(*busy: int) -> dict[int, Work]:
    return {rank: Work(main=rank in busy) for rank in (0, 1)}


def test_a_plain_script_that_does_nothing_in_a_collective_hangs() -> None:
    group = trained(owned=False)
    group.time_to_hang(5.6)
    assert not group.verdict.session
    verdict = group.watch.confirm(group.verdict, stacks({0: IN_SCRIPT, 1: IN_BACKWARD}), idle())
    assert verdict.value is Value.HUNG


@pytest.mark.parametrize(
    ("frames", "works"),
    [
        ({0: IN_SCRIPT, 1: IN_COLLECTIVE}, idle(0)),  # evaluates
        ({0: IN_SCRIPT, 1: IN_SCRIPT}, idle()),  # nobody waits for anybody
        ({0: ("/lib/python3.12/ssl.py:1100 in read", *IN_SCRIPT), 1: IN_COLLECTIVE}, idle()),
        ({0: IN_SCRIPT, 1: IN_COLLECTIVE}, {0: Work(children=True), 1: Work()}),
        ({0: IN_SCRIPT, 1: IN_COLLECTIVE}, {0: Work(in_kernel=True), 1: Work()}),
    ],
)
def test_a_plain_script_gets_the_benefit_of_the_doubt(
    frames: dict[int, tuple[str, ...]], works: dict[int, Work]
) -> None:
    group = trained(owned=False)
    group.time_to_hang(5.6)
    verdict = group.watch.confirm(group.verdict, stacks(frames), works)
    assert verdict.value is Value.SLOW
    assert "; but " in verdict.why
    group.stay(verdict.waited - 0.3)  # and isn't asked at every turn
    group.time_to_hang(2)


def test_a_plain_script_without_optimizer_steps_is_left_alone() -> None:
    Group(owned=False).stay(4_000)


def test_a_limit_that_the_job_gives_holds_for_plain_scripts() -> None:
    group = Group(limits=WatchLimits(start=30.0, given=frozenset({"start"})), owned=False)
    group.time_to_hang(31)
    assert group.watch.confirm(group.verdict, stacks({0: IN_SCRIPT, 1: IN_SCRIPT}), idle(0, 1)).value is Value.HUNG


# --- what speaks against a hang


@pytest.mark.parametrize(
    ("evidence", "works", "longest"),
    [
        (stacks({0: IN_SCRIPT, 1: ("/lib/python3.12/bdb.py:90 in trace",)}), {}, 4_000),
        (stacks({0: IN_SCRIPT, 1: IN_SCRIPT}, state="t"), {}, 4_000),
        (stacks({0: ("/x/a.py:1 in f", "/lib/torch/_dynamo/convert_frame.py:500 in compile")}), {}, 1700),
        (stacks({0: ("/x/a.py:1 in f", "<frozen importlib._bootstrap>:241 in _call")}), {}, 1700),
        (stacks({0: IN_SCRIPT}, state="D"), {}, 100),
        (stacks({0: IN_SCRIPT}), {0: Work(children=True)}, 50),
        (stacks({0: IN_SCRIPT}), {0: Work(main=True)}, 0),  # a loop without end keeps a core busy
    ],
)
def test_excuses(evidence: list[RankEvidence], works: dict[int, Work], longest: float) -> None:
    group = trained(num_ranks=1)
    began = group.now
    while group.now - began < longest:
        if group.look().value is Value.HUNG:
            assert group.watch.confirm(group.verdict, evidence, works).value is Value.SLOW, group.verdict
    if longest < 4_000:
        confirmed = False
        while not confirmed:
            assert group.now - began < max(2.2 * longest, 6)
            confirmed = group.look().value is Value.HUNG and (
                group.watch.confirm(group.verdict, evidence, works).value is Value.HUNG
            )


# --- who is at fault


def at(rank: int, stack: tuple[str, ...], step: int = 7, **more: Any) -> RankEvidence:
    beat = Beat(step, 0, None, Phase.STEP, owned=True, time=more.pop("time", 100.0), first_step=1.0)
    return RankEvidence(rank, stack=stack, beat=beat, **{"state": "S", **more})


WAITS = ("/lib/python3.12/threading.py:327 in wait", "/lib/ftrun/checkpoint/writer.py:130 in wait")

CULPRITS: list[tuple[list[RankEvidence], int | None, str]] = [
    ([at(0, IN_COLLECTIVE)], 0, "only rank"),
    ([at(0, IN_COLLECTIVE), at(1, IN_SCRIPT)], 1, "rank 1 is in train.py:31 in load, while rank 0 waits in distr"),
    ([at(0, IN_BACKWARD), at(1, IN_SCRIPT), at(2, IN_COLLECTIVE)], 1, "rank 1 is in"),
    ([at(0, WAITS), at(1, IN_SCRIPT)], 1, "rank 1 is in"),
    ([at(0, IN_COLLECTIVE), at(1, ("/lib/python3.12/threading.py:327 in wait", *IN_SCRIPT))], 1, "rank 1 is in train"),
    ([at(0, IN_COLLECTIVE), at(1, ())], 1, "gives no stack"),
    ([at(0, IN_COLLECTIVE), at(1, (), state="T")], 1, "stopped"),
    ([at(0, IN_SCRIPT, exit_code=0, exited_at=9.0), at(1, IN_COLLECTIVE)], 0, "has ended, with exit code 0"),
    ([at(0, IN_COLLECTIVE, 8), at(1, IN_SCRIPT, 8), at(2, IN_SCRIPT, 7)], 2, "rank 2 is in"),
    ([at(0, IN_COLLECTIVE), at(1, IN_SCRIPT, time=99.0), at(2, IN_SCRIPT, time=95.0)], 2, "rank 2 is in"),
    ([at(0, IN_COLLECTIVE), at(1, IN_SCRIPT), at(2, IN_SCRIPT, state="D")], 2, "rank 2 is in"),
    ([at(0, IN_COLLECTIVE, 8), at(1, IN_COLLECTIVE, 7)], 1, "rank 1 has completed 7 steps, others 8"),
    ([at(0, IN_SCRIPT), at(1, IN_SCRIPT, state="D", waits_in="nfs_wait")], 1, "uninterruptible sleep in nfs_wait"),
    ([at(0, IN_SCRIPT), at(1, IN_SCRIPT), at(2, ("/job/other.py:3 in f",))], 2, "all others in train.py:31"),
    ([at(0, IN_COLLECTIVE), at(1, IN_COLLECTIVE)], None, "nothing sets"),
    ([at(0, IN_SCRIPT), at(1, ("/job/other.py:3 in f",))], None, "nothing sets"),
]


@pytest.mark.parametrize(("ranks", "culprit", "why"), CULPRITS)
def test_the_culprit(ranks: list[RankEvidence], culprit: int | None, why: str) -> None:
    named, reason = name_culprit(ranks)
    assert named == culprit
    assert why in reason


# --- what real processes do


@pytest.fixture
def process() -> Iterator[Callable[[str], int]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE))
        stdout = started[-1].stdout
        assert stdout is not None
        assert stdout.readline() == b"ready\n"
        return started[-1].pid

    yield start
    for each in started:
        os.killpg(each.pid, signal.SIGKILL)
        each.communicate(timeout=60)


READY = "print('ready', flush=True)\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import threading\n" + READY + "threading.Event().wait()", Work()),
        (READY + "while True: pass", Work(main=True)),
        ("import time\n" + READY + "while True: time.sleep(0.001)", Work(main=True)),
        (
            "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
            + READY
            + "time.sleep(60)",
            Work(children=True),
        ),
    ],
    ids=["idle", "computes", "moves data", "its child computes"],
)
def test_work_is_seen(process: Callable[[str], int], code: str, expected: Work) -> None:
    pid = process(code)
    eventually(lambda: work.measure({3: pid}) == {3: expected}, what="a look at its settled state")


def test_a_stopped_process_does_nothing(process: Callable[[str], int]) -> None:
    pid = process(READY + "while True: pass")
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: process_state.letter(pid) == "T", what="it to stop")
    assert work.measure({0: pid}) == {0: Work()}
    assert work.measure({0: 2**22 + 1}) == {0: Work()}  # and neither does one that isn't there
