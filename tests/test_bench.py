"""What scripts/bench makes of its measurements: medians, ratios, the table, the JSON, and the judgement of a hang."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from bench_kit import imported  # noqa: F401 - the fixture "bench"

from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("how", "limit", "value", "verdict"),
    [
        ("<=", 0.1, 0.1, "met"),
        ("<=", 0.1, 0.11, "not met"),
        (">=", 0.95, 0.94, "not met"),
        ("=", 1.0, 1.0, "met"),
        ("=", 1.0, 0.98, "not met"),
        ("<=", 0.1, None, "not measured"),
    ],
)
def test_a_figure_meets_its_target_or_not(bench: Any, how: str, limit: float, value: float, verdict: str) -> None:
    figures = bench("figures")
    assert figures.Figure("a.b", value, figures.Target(how, limit)).verdict == verdict


def test_medians_and_ratios_know_what_was_not_measured(bench: Any) -> None:
    figures = bench("figures")
    assert figures.median([]) is None
    assert figures.median([3.0, 1.0, 2.0, 10.0]) == 2.5
    assert figures.ratio(1.0, 4.0) == 0.25
    assert figures.ratio(None, 4.0) is None
    assert figures.ratio(1.0, None) is None


def test_the_json_maps_each_id_to_value_control_n_and_reference(bench: Any) -> None:
    figures = bench("figures")
    target = figures.Target("<=", 0.1)
    made = [
        figures.Figure("x.one", 0.08, target, 1.02, 12, {"torchrun (s)": 2.5}),
        figures.Figure("x.two", None, target),
    ]
    assert json.loads(figures.to_json(made)) == {
        "x.one": {"value": 0.08, "control": 1.02, "n": 12, "reference": {"torchrun (s)": 2.5}},
        "x.two": {"value": None, "control": None, "n": 0, "reference": {}},
    }


def test_the_table_shows_target_and_verdict_and_the_notes(bench: Any) -> None:
    figures = bench("figures")
    made = figures.Figure("x.one", 0.0812, figures.Target("<=", 0.1), 1.02, 12, {"torchrun (s)": 2.5}, ["a note"])
    lines = figures.table([made]).splitlines()
    assert lines[1].split() == ["x.one", "0.0812", "<=", "0.1", "met", "1.02", "12", "torchrun", "(s)", "2.5"]
    assert lines[-1] == "  a note"


def stamped(folder: Path, rank: int, *lines: tuple[float, int, str, int]) -> None:
    text = "".join(f"{at:.6f} {pid} {rank} {word} {step}\n" for at, pid, word, step in lines)
    (folder / f"stamps-{rank}.txt").write_text(text)


def test_a_step_is_whole_when_a_new_process_of_every_rank_has_made_it(bench: Any, tmp_path: Path) -> None:
    stamps = bench("common").Stamps(tmp_path, 2)
    assert stamps.whole_step() is None
    stamped(tmp_path, 0, (10.0, 100, "step", 1), (20.0, 200, "step", 1))
    stamped(tmp_path, 1, (10.5, 101, "step", 1), (19.0, 101, "step", 2))
    assert stamps.whole_step() == 10.5
    assert stamps.whole_step(after=15.0, other_than=[100, 101]) is None
    with (tmp_path / "stamps-1.txt").open("a") as file:
        file.write("20.250000 201 1 step 1\n20.3 201 1 st")  # a line that is being written
    assert stamps.whole_step(after=15.0, other_than=[100, 101]) == 20.25


def fell(at: float, cause: str) -> dict[str, Any]:
    return {"t": at, "kind": "failed", "cause": cause, "message": "", "failed_rank": 1}


STEPS = [(1.0 + index / 10, 7, 0, "step", index) for index in range(10)]


@pytest.mark.parametrize(
    ("hangs", "falls", "code", "right"),
    [
        (True, [fell(7.0, "hang")], 0, True),
        (True, [fell(7.3, "hang")], 0, False),  # later than three steps of 0.1 s and 5 s after the last one, at 1.9
        (True, [fell(7.0, "hang")], 1, False),
        (True, [fell(7.0, "killed")], 0, False),
        (True, [], None, False),
        (False, [], 0, True),
        (False, [fell(7.0, "hang")], 0, False),
        (False, [], None, False),
    ],
)
def test_a_hang_is_judged_by_its_verdict_and_its_time(
    bench: Any, hangs: bool, falls: list[dict[str, Any]], code: int | None, right: bool
) -> None:
    hanging, common = bench("hangs"), bench("common")
    stamps = [common.Stamp(*each) for each in STEPS]
    verdict = hanging.judge(hanging.Case("x", "a case", hangs), falls, stamps, code)
    assert verdict.right is right, verdict


KILLED = """
import sys, time
from pathlib import Path
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.memory.tier import Tier
for name in ("told", "untold"):
    run_dir = Path("runs", name).absolute()
    (run_dir / "attempts").mkdir(parents=True)
    tier = Tier.of(run_dir, 0)
    for each in (tier, tier.copies):
        each.create()
        (each.path / "r00000").mkdir()
        (each.path / "r00000" / "0.safetensors").write_bytes(bytes(100))
        if name == "told":
            KeeperConfig(str(run_dir), name, "root", {}, "", 0, 1, None, None, 1).write(each)
Path("ready").touch()
time.sleep(600)
"""


def interrupted(common: Any, folder: Path, paths: list[Path]) -> None:
    with common.started([sys.executable, "-c", KILLED], folder, ranks=1) as job:
        assert job.wait_for(lambda: (folder / "ready").exists() or None, 60.0), job.output
        assert [path.is_dir() for path in paths] == [True] * 4
        raise KeyboardInterrupt


def test_nothing_of_a_killed_job_stays_in_shared_memory(bench: Any, tmp_path: Path) -> None:
    common = bench("common")
    other = Tier.of(tmp_path / "elsewhere", 0)
    other.create()
    try:
        with common.work_directory(keep=False) as work:
            folder = work / "job"
            folder.mkdir()
            tiers = [Tier.of(folder / "runs" / name, 0) for name in ("told", "untold")]
            paths = [each.path for tier in tiers for each in (tier, tier.copies)]
            with pytest.raises(KeyboardInterrupt):
                interrupted(common, folder, paths)
            assert [path.is_dir() for path in paths] == [False] * 4
            tiers[0].create()  # by what an interrupt has kept from being tidied up
            (folder / "runs" / "told" / "attempts").mkdir(exist_ok=True)
        assert not paths[0].exists()
        assert other.path.is_dir(), "it is of another run"
    finally:
        other.remove()
