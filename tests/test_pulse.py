"""The pulse page: phases, marks, the histogram of steps, and pages that are none."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from conftest import NO_COMPILER, eventually

import ftrun
from ftrun import pulse
from ftrun.contract import Every
from ftrun.errors import UsageError
from ftrun.pulse import Beat, Marks, Phase, Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from session_kit import Launch

    from ftrun.contract import WorkerContract


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pulse.create(tmp_path / "pulse")
    return tmp_path / "pulse"


def seen(path: Path) -> Beat:
    beat = pulse.read(path)
    assert beat is not None
    return beat


def test_a_phase_has_a_beginning(path: Path) -> None:
    page = Pulse(path)
    assert seen(path).phase_since == 0.0
    before = time.time()
    page.phase(Phase.EVAL)
    first = seen(path)
    assert first.phase is Phase.EVAL
    assert before <= first.phase_since <= time.time()
    page.phase(Phase.EVAL)
    assert seen(path).phase_since > first.phase_since  # the same phase anew
    page.step(1)
    assert seen(path).phase is Phase.STEP


def test_a_phase_for_a_block_ends_in_the_one_before(path: Path) -> None:
    page = Pulse(path)
    page.phase(Phase.FIRST_STEP)

    def fail() -> None:
        with page.during(Phase.SAVE):
            assert seen(path).phase is Phase.SAVE
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen(path).phase is Phase.FIRST_STEP


def test_marks_are_set_once(path: Path) -> None:
    page = Pulse(path)
    assert seen(path).marks == Marks()
    page.mark("booted", 5.0)
    page.mark("booted", 7.0)
    page.mark("restored")
    marks = seen(path).marks
    assert (marks.booted, marks.script, marks.group, marks.grouped) == (5.0, 0.0, 0.0, 0.0)
    assert marks.restored == pytest.approx(time.time(), abs=60.0)
    Pulse(path).mark("booted")  # another view of the same page
    assert seen(path).marks.booted == 5.0


def test_every_mark_has_a_place_of_its_own(path: Path) -> None:
    page = Pulse(path)
    page.own(base=3, total=9)
    page.step(4)
    names = ("booted", "script", "group", "grouped", "restored")
    for number, name in enumerate(names, start=1):
        page.mark(name, float(number))  # type: ignore[arg-type]
    beat = seen(path)
    assert beat.marks == Marks(1.0, 2.0, 3.0, 4.0, 5.0)
    assert (beat.step, beat.base, beat.total, beat.owned, beat.phase) == (4, 3, 9, True, Phase.STEP)


def test_stretches_of_steps_are_counted_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # a clock of its own: by the machine's, which may stand still, a step takes as long as a save here
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    page = Pulse(path)
    page.phase(Phase.FIRST_STEP)
    page.step(1)
    assert sum(seen(path).steps) == 0  # the first step doesn't tell how long steps take
    for step in (2, 3):
        now[0] += 0.01
        page.step(step)
    assert sum(seen(path).steps) == 2
    with page.during(Phase.SAVE):
        assert sum(seen(path).steps) == 3
        now[0] += 0.3
    page.step(4)
    counts = seen(path).steps
    assert sum(counts) == 4
    assert pulse.quantile(counts, 1.0) < 0.3


@pytest.mark.parametrize("seconds", [1e-9, 2e-5, 0.001, 0.2, 0.5, 0.9999, 1.0, 1.3, 60.0, 3600.0, 30000.0])
def test_a_bucket_holds_its_duration(seconds: float) -> None:
    index = pulse.bucket(seconds)
    assert seconds < pulse.upper_bound(index)
    if index:
        assert pulse.upper_bound(index - 1) <= seconds
        assert pulse.upper_bound(index) <= 1.25 * seconds + 1e-12


@pytest.mark.parametrize(("seconds", "index"), [(0.0, 0), (-1.0, 0), (1e9, 127)])
def test_durations_beyond_the_histogram_count_at_its_ends(seconds: float, index: int) -> None:
    assert pulse.bucket(seconds) == index


def test_quantiles() -> None:
    counts = [0] * 80
    counts[pulse.bucket(0.2)] = 998
    counts[pulse.bucket(3.0)] = 2
    assert pulse.quantile(counts, 0.5) == pulse.upper_bound(pulse.bucket(0.2))
    assert pulse.quantile(counts, 0.999) == pulse.upper_bound(pulse.bucket(3.0))
    assert pulse.quantile(counts, 0.99) < 0.3
    assert pulse.quantile((), 0.5) == 0.0


def test_a_page_of_the_former_kind_is_read(path: Path) -> None:
    page = bytearray(path.read_bytes())
    page[:8] = b"FTPULSE1"
    struct.pack_into("=2q", page, 8, 12, 10)
    path.write_bytes(page)
    assert (seen(path).step, seen(path).base, seen(path).steps, seen(path).marks) == (12, 10, (), Marks())


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (8, struct.pack("=q", -1)),
        (48, struct.pack("=d", float("nan"))),
        (64, struct.pack("=d", float("inf"))),
        (72, struct.pack("=d", -5.0)),
        (256, struct.pack("=q", -7)),
        (0, b"FTPULSE9"),
        (0, b"\0" * 8),
    ],
)
def test_pages_that_make_no_sense(path: Path, offset: int, value: bytes) -> None:
    page = bytearray(path.read_bytes())
    page[offset : offset + 8] = value
    path.write_bytes(page)
    assert pulse.read(path) is None


def test_a_cut_page_is_none(path: Path) -> None:
    os.truncate(path, 4000)
    assert pulse.read(path) is None


def test_a_reader_beside_a_writer_sees_whole_values(path: Path) -> None:
    page = Pulse(path)
    end = threading.Event()

    def write() -> None:
        # Each value differs from the next in many bytes, so that a mixture would show.
        for number in range(10**9):
            if end.is_set():
                return
            page.step((1 << 40) - 1 if number % 2 else 1 << 40)

    writer = threading.Thread(target=write)
    writer.start()
    steps: set[int] = set()

    def read() -> bool:
        beats = (pulse.read(path) for _ in range(3000))
        steps.update(beat.step for beat in beats if beat is not None)
        return len(steps) >= 2

    try:
        eventually(read, 60, "a value that was written meanwhile")  # a writer without a processor writes none
    finally:
        end.set()
        writer.join()
    assert steps <= {0, 1 << 40, (1 << 40) - 1}


# --- what workers write


class Slow:
    """A tracked object that looks at the page while its state is put back."""

    def __init__(self, look: Callable[[], Beat]) -> None:
        self.look = look
        self.seen: list[Phase] = []

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen.append(self.look().phase)


@pytest.mark.usefixtures("here")
def test_the_phases_of_a_session(launch: Launch) -> None:
    contracts: list[WorkerContract] = []
    phases: list[tuple[int, Phase]] = []

    def look() -> Beat:
        return launch.beat(contracts[-1])

    def note() -> None:
        phases.append((look().step, look().phase))

    ftrun.on("save")(note)
    for last_step in (3, 100):
        contracts.append(launch(every=Every(steps=3)))
        with ftrun.Session.open() as ft:
            note()
            slow = Slow(look)
            ft.track(slow=slow)
            note()
            assert slow.seen == ([Phase.RESTORE] if ft.resume else [])
            for step in ft.steps(total=4):
                note()
                if step == 1:
                    with ft.phase("eval"):
                        note()
                    note()
                if step == last_step:
                    break
            note()
        assert look().phase is Phase.END
        marks = look().marks
        assert 0 < marks.group <= marks.grouped <= marks.restored <= time.time()
    start, first, step_, save, evaluation = Phase.START, Phase.FIRST_STEP, Phase.STEP, Phase.SAVE, Phase.EVAL
    fresh = [(0, start), (0, start), (0, first), (1, step_), (1, evaluation), (1, step_), (2, step_), (3, save)]
    resumed = [(3, start), (3, start), (3, first), (4, save), (4, Phase.END)]
    assert phases == [*fresh, (3, step_), (3, step_), *resumed]


@pytest.mark.usefixtures("here")
def test_a_phase_that_there_is_not(launch: Launch) -> None:
    launch()
    with ftrun.Session.open() as ft, pytest.raises(UsageError, match="say 'eval' or 'save'"), ft.phase("lunch"):  # type: ignore[arg-type]
        raise AssertionError


PLAIN = """
import os, sys, traceback
from pathlib import Path
from ftrun import pulse
from ftrun.contract import WorkerContract
from ftrun.session import imports, optimizer_steps

sys.meta_path.insert(0, imports.Order())  # as the bootstrap does
if "first" in sys.argv:
    import torch.distributed
contract = WorkerContract.from_environment(os.environ)
optimizer_steps.watch(contract, pulse.Pulse(Path(contract.worker_dir) / "pulse"), rank=0)
import torch
import torch.distributed as dist

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
try:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="nonsense://")
except Exception:
    assert "ftrun" not in traceback.format_exc(), traceback.format_exc()
else:
    raise AssertionError
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(3):
    weight.grad = torch.ones(1)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("order", ["first", "later"])
def test_a_plain_script_is_seen_with_torch_imported_before_or_after(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    contract = launch()
    monkeypatch.setenv("PYTHONPATH", str(NO_COMPILER))
    before = time.time()
    subprocess.run([sys.executable, "-c", PLAIN, order], check=True, timeout=100)
    beat = launch.beat(contract)
    assert (beat.step, beat.phase, beat.owned, sum(beat.steps)) == (3, Phase.STEP, False, 2)
    assert before < beat.marks.group < beat.marks.grouped < beat.first_step
    assert (Path(contract.worker_dir) / "imports.json").exists()
