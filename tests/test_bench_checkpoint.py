"""What scripts/bench checkpoint makes of what its jobs wrote: ratios, the case that decides, and what can't be told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_kit import imported  # noqa: F401 - the fixture "bench"

MIB = 2**20


def lines(**series: list[float]) -> list[dict[str, Any]]:
    """One rank's lines; ``a_b=[...]`` is the series ``a.b``, a cycle for each value."""
    return [
        {"name": name.replace("_", "."), "cycle": cycle, "value": value}
        for name, values in series.items()
        for cycle, value in enumerate(values)
    ]


def trained(bench: Any, *ranks: list[dict[str, Any]], problem: str = "", **more: Any) -> Any:
    jobs, results = bench("checkpoint_jobs"), bench("checkpoint_results")
    subject = jobs.Subject("ddp", "large", 64 * MIB)
    return jobs.Trained(subject, more.pop("folder", Path()), results.Results(ranks, problem), **more)


def test_ranks_wait_for_the_slowest_and_cycles_that_one_lacks_do_not_count(bench: Any) -> None:
    results = bench("checkpoint_results").Results([lines(held=[1.0, 5.0, 2.0]), lines(held=[3.0, 4.0])])
    assert results.worst("held") == [3.0, 5.0]
    assert results.worst("other") == []
    assert bench("checkpoint_results").Results().worst("held") == []


def test_torn_lines_of_a_rank_that_was_killed_are_left_out(bench: Any, tmp_path: Path) -> None:
    whole = json.dumps({"name": "held", "cycle": 0, "value": 0.5})
    (tmp_path / "results-0.jsonl").write_text(f'{whole}\n{{"name": "he')
    read = bench("checkpoint_results").read_results(tmp_path, 2)
    assert [dict(each) for each in read.ranks[0]] == [json.loads(whole)]
    assert read.ranks[1] == []


def test_a_span_runs_from_the_last_ranks_start_to_the_end_that_rank_0_saw(bench: Any) -> None:
    first, second = lines(released=[10.0, 20.0], committed=[11.0, 19.5]), lines(released=[10.4, 20.0])
    spans = bench("checkpoint_results").Results([first, second]).spans("released", "committed")
    assert spans == pytest.approx([0.6, 0.0])


@pytest.mark.parametrize(
    ("values", "largest", "chosen"),
    [
        ([0.9, 1.2, 1.0], True, 1.2),
        ([0.9, 1.2, 1.0], False, 0.9),
        ([0.9, None, 1.0], True, None),  # what was not measured may be the worst
        ([], True, None),
    ],
)
def test_the_hardest_case_decides_a_figure(
    bench: Any, values: list[float | None], largest: bool, chosen: float | None
) -> None:
    results, figures = bench("checkpoint_results"), bench("figures")
    cases = [results.Case(f"case {number}", each, 1.0, 10) for number, each in enumerate(values)]
    made = results.figure("x.y", cases, figures.Target("<=", 1.1), {"peer": 2.0}, largest=largest)
    assert made.value == chosen
    assert made.reference == {f"case {number}": each for number, each in enumerate(values)} | {"peer": 2.0}
    assert (made.verdict == "not measured") == (chosen is None)


def test_stall_is_what_training_is_held_over_the_memcpy_of_the_same_cycle(bench: Any) -> None:
    rank = lines(blocking_held=[0.2, 0.3], overlap_held=[0.01, 0.02], memcpy=[0.1, 0.1]) + [
        {"name": "memcpy again", "cycle": cycle, "value": 0.11} for cycle in range(2)
    ]
    job, saves = trained(bench, rank), bench("checkpoint_saves")
    made = saves.stall([job], [], [])
    assert made.value == pytest.approx(2.5)
    assert made.control == pytest.approx(1.1)
    assert (made.n, made.verdict) == (2, "not met")
    assert saves.overlap([job], []).value == pytest.approx(0.15)


def test_a_job_that_went_wrong_gives_no_figure_but_says_why(bench: Any) -> None:
    job = trained(bench, lines(blocking_held=[0.2], memcpy=[0.1]), problem="ended with code 1: ValueError: no")
    made = bench("checkpoint_saves").stall([job], [], [])
    assert made.value is None
    assert made.notes == ["DDP, 4 tensors: ended with code 1: ValueError: no"]


def test_persist_begins_when_training_goes_on_and_ends_with_the_commit(bench: Any) -> None:
    rank = lines(blocking_released=[10.0, 20.0], blocking_committed=[10.6, 20.6], raw=[0.5, 0.5])
    made = bench("checkpoint_saves").persist([trained(bench, rank)], [])
    assert made.value == pytest.approx(1.2)
    assert made.control == 1.0


def test_bytes_staged_are_those_of_the_rank_that_staged_most(bench: Any, tmp_path: Path) -> None:
    attempt = tmp_path / "runs" / "bench" / "checkpoints" / "ckpt" / "e00000001-s0000000001-00000000"
    attempt.mkdir(parents=True)
    (attempt / "r00000.0.safetensors").write_bytes(bytes(500))
    (attempt / "r00001.0.safetensors").write_bytes(bytes(600))
    events = tmp_path / "runs" / "bench" / "events" / "n0000.jsonl"
    events.parent.mkdir()
    events.write_text("".join(json.dumps({"kind": "saved", "size": 500}) + "\n" for _ in range(3)))
    made = bench("checkpoint_saves").staged([trained(bench, lines(total=[1000.0]), folder=tmp_path)])
    assert (made.value, made.n, made.verdict) == (0.6, 3, "not met")


def test_interference_compares_each_drain_with_the_idle_steps_before_it(bench: Any) -> None:
    def steps(name: str, cycle: int, *seconds: float) -> list[dict[str, Any]]:
        return [{"name": name, "cycle": cycle, "value": each} for each in seconds]

    rank = [
        *steps("idle", 0, 0.9, 0.9),
        *steps("idle again", 0, 0.9, 0.9),
        *steps("draining", 0, 1.0, 1.0, 9.0),
        *steps("idle", 1, 1.8),
        *steps("idle again", 1, 1.8),
        *steps("draining", 1, 2.0),
        *steps("idle", 2, 1.0),  # committed within a step: nothing to compare
    ]
    made = bench("checkpoint_interference").interference([trained(bench, rank)])
    assert made.value == pytest.approx(0.9)
    assert (made.control, made.n) == (1.0, 2)


def test_loading_is_counted_without_the_opening_of_a_session(bench: Any) -> None:
    rank = lines(loaded=[0.7, 0.7, 0.7], fresh=[0.2, 0.2], read=[0.4, 0.4, 0.4])
    rank += [{"name": "read again", "cycle": cycle, "value": 0.4} for cycle in range(3)]
    case = bench("checkpoint_load").case(trained(bench, rank))
    assert (case.value, case.control, case.n) == (pytest.approx(1.25), 1.0, 3)
    assert bench("checkpoint_load").case(trained(bench, lines(loaded=[0.7], read=[0.4]))).value is None
    rank += [{"name": "fresh read", "cycle": cycle, "value": 0.5} for cycle in range(3)]
    assert bench("checkpoint_load").over_half_fresh(trained(bench, rank)) == pytest.approx(1.0)


def test_memory_is_the_highest_peak_over_what_was_there_before(bench: Any) -> None:
    def samples(*pairs: tuple[float, int, int]) -> list[Any]:
        return [bench("checkpoint_samples").Sample(at, private * MIB, shared * MIB) for at, private, shared in pairs]

    taken = samples((1.0, 100, 10), (2.0, 100, 10), (3.5, 110, 70), (3.6, 100, 80), (4.5, 120, 130), (5.0, 100, 90))
    phases = [(0.5, "quiet"), (3.0, "saves"), (4.0, "saves"), (6.0, "over")]
    owned = [[{"name": "owned", "cycle": 0, "value": 32.0 * MIB}] for _ in range(2)]
    case = bench("checkpoint_memory").case(trained(bench, *owned, samples=taken, phases=phases))
    assert (case.value, case.control, case.n) == (140 / 64, 140 / 70, 4)
    assert bench("checkpoint_memory").case(trained(bench, *owned)).value is None


@pytest.mark.parametrize(("committed", "value"), [(1.4, 50.0), (0.1, None)])
def test_a_remote_that_was_not_slow_gives_no_figure(bench: Any, committed: float, value: float | None) -> None:
    owned = [{"name": "owned", "cycle": 0, "value": 200e6}]
    stock = [{"name": "torch.save", "cycle": 0, "value": 1.0}]
    rank = owned + stock + lines(slow_held=[0.02], slow_released=[10.0], slow_committed=[10.0 + committed])
    case = bench("checkpoint_remote").case(trained(bench, rank))
    assert case.value == value
    assert "not the slow remote" in case.notes[0] or value is not None


def test_a_peer_that_could_not_be_measured_is_in_the_reference_with_its_error(bench: Any) -> None:
    jobs, peers, results = bench("checkpoint_jobs"), bench("checkpoint_peers"), bench("checkpoint_results")
    subject = jobs.Subject("fsdp2", "large", 64 * MIB)
    good = lines(memcpy=[0.1, 0.1], raw=[0.5, 0.5]) + [
        {"name": f"dcp.save.{what}", "cycle": cycle, "value": value}
        for what, value in (("held", 0.6), ("done", 0.75), ("read", 0.1), ("load", 0.6))
        for cycle in range(2)
    ]
    dcp = peers.peer(results.Results([good]), "dcp.save", subject)
    fell = peers.peer(results.Results([[]], "hangs: AssertionError: no CUDA"), "nvrx", subject)
    assert (dcp.stall, dcp.persist, dcp.load) == (pytest.approx(6.0), 1.5, pytest.approx(6.0))
    told = peers.reference([dcp, fell], lambda each: each.stall)
    assert told == {"dcp.save (FSDP2)": pytest.approx(6.0), "nvrx (FSDP2)": "hangs: AssertionError: no CUDA"}
    assert peers.reference([dcp, fell], lambda each: each.load, only=("dcp.save",)).keys() == {"dcp.save (FSDP2)"}


def test_a_peer_whose_checkpoint_holds_later_changes_is_called_unstaged(bench: Any) -> None:
    jobs, peers, results = bench("checkpoint_jobs"), bench("checkpoint_peers"), bench("checkpoint_results")
    worker = [
        {"name": f"nvrx on CPU.{what}", "cycle": 0, "value": value} for what, value in (("held", 0.005), ("torn", 1.0))
    ]
    rank = lines(memcpy=[0.1]) + worker
    made = peers.peer(results.Results([rank]), "nvrx on CPU", jobs.Subject("ddp", "large", MIB))
    assert made.name == "nvrx on CPU (DDP), unstaged"
    assert any("takes no snapshot" in note for note in made.notes)


@pytest.mark.parametrize(
    ("output", "code", "told"),
    [
        ("x\nAssertionError: Torch not compiled with CUDA enabled\n", None, "hangs: AssertionError: Torch not comp"),
        ("[rank1]: RuntimeError: no\nValueError: later\n", 1, "ended with code 1: RuntimeError: no"),
        ("ftrun: checkpoint root x\n", 2, "ended with code 2: ftrun: checkpoint root x"),
        ("site.py:64: FutureWarning: old\n", 1, "ended with code 1 without a word"),
    ],
)
def test_a_job_that_fails_is_explained_by_its_first_error(bench: Any, output: str, code: int | None, told: str) -> None:
    assert bench("checkpoint_jobs").why(output, code).startswith(told)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("....\n30 passed, 3507 deselected in 25.08s", (30, 0)),
        ("F.\n3 failed, 27 passed, 2 errors in 9s\n", (27, 5)),
        ("1 passed, 1 error in 1s", (1, 1)),
        ("No module named pytest", (0, 0)),
    ],
)
def test_power_loss_counts_the_tests_that_fail(bench: Any, output: str, expected: tuple[int, int]) -> None:
    assert bench("checkpoint_power").counts(output) == expected


def test_the_slow_remote_holds_back_whoever_writes_and_shows_whole_files_only(bench: Any, tmp_path: Path) -> None:
    environment = bench("slowfs").install(tmp_path) | {"SLOWFS_RATE": "20e6"}
    script = """
import time, fsspec
files, top = fsspec.url_to_fs("slow://bench/run")
files.makedirs(f"{top}/a", exist_ok=True)
began = time.monotonic()
with files.open(f"{top}/a/x", "wb") as file:
    file.write(bytes(2 * 10**6))
    assert not files.exists(f"{top}/a/x")
assert time.monotonic() - began >= 0.1
assert files.find(top) == [f"{top}/a/x"] and files.info(f"{top}/a/x")["size"] == 2 * 10**6
files.pipe_file(f"{top}/a/y", b"1", mode="create")
try:
    files.pipe_file(f"{top}/a/y", b"2", mode="create")
except FileExistsError:
    pass
assert files.cat_file(f"{top}/a/y", start=0, end=1) == b"1"
file = files.open(f"{top}/a/z", "wb")
file.write(b"3")
file.discard()
files.rm_file(f"{top}/a/x")
print(files.find(top))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['bench/run/a/y']"
