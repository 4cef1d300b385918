"""A run that is killed anywhere, again and again, and goes on with other ranks and workers, sees what it would have.

Ranks are simulated one after another in this process: a kill leaves nothing but the state of the last step that was
committed. The runs under the launcher, with real kills, are at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import eventually, kill_tree
from data_kit import N, Row, drawing_collate, endless, make, own, woven
from torch.utils.data import WeightedRandomSampler

from ftrun import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Runner

    from ftrun.data.loader import DataLoader

TOTAL = 13  # steps: three or four epochs


@dataclass(frozen=True)
class Case:
    """One way to read data.

    Attributes:
        name: of the case.
        arguments: of the loader.
        sampler: makes a new sampler or batch sampler for each loader, by its argument's name.
        contiguous: whether the ranks' shares are one after another in the global batch, instead of in turn.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    sampler: dict[str, Callable[[], Any]] = field(default_factory=dict, hash=False)
    contiguous: bool = False

    def loader(self, world: int, rank: int, **arguments: Any) -> DataLoader[torch.Tensor]:
        made = {name: make_sampler() for name, make_sampler in self.sampler.items()}
        return make(world, rank, **{**self.arguments, **made, **arguments})

    def put_together(self, shares: list[list[Row]]) -> list[Row]:
        return list(chain.from_iterable(shares)) if self.contiguous else woven(shares)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, N + 1).tolist(), 40)


class Buckets:
    """A batch sampler whose batches and their number differ from epoch to epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(N).tolist()
        sizes = [12, 24, 12] if self.epoch % 2 else [12, 12, 24, 4]
        return iter([[order.pop() for _ in range(size)] for size in sizes])


CASES = [
    Case("feistel"),
    Case("none", {"shuffle": False}),
    Case("torch", {"order": "torch"}),
    Case("block", {"order": "block:7x2"}),
    Case("uneven", {"tail": "uneven", "global_batch": 10}),
    Case("pad", {"tail": "pad"}),
    Case("sampler", {"shuffle": None}, {"sampler": weighted}),
    Case("batches", {"shuffle": None, "global_batch": None}, {"batch_sampler": Buckets}),
]
IN_WORKERS = [case for case in CASES if case.name in ("feistel", "pad", "batches")]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True)
class Life:
    """One attempt of a run: so many ranks and workers, for so many steps, and then it is killed.

    Attributes:
        committed: whether the last step's batch counts: a kill may come while the step is computed.
    """

    world: int
    workers: int
    prefetch: int
    steps: int
    committed: bool = True


@cache
def uninterrupted(case: Case) -> list[list[Row]]:
    return live(case, Life(1, 0, 2, TOTAL), None)[0]


def live(case: Case, life: Life, state: dict[str, Any] | None) -> tuple[list[list[Row]], dict[str, Any]]:
    """Batch for batch what the ranks of one attempt train on together, and the state that is left when it is killed."""
    prefetch = life.prefetch if life.workers else None
    loaders = [
        case.loader(life.world, rank, num_workers=life.workers, prefetch_factor=prefetch) for rank in range(life.world)
    ]
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    streams = [endless(loader) for loader in loaders]
    seen = []
    for step in range(life.steps):
        seen.append(
            case.put_together([own(loader, next(stream)) for loader, stream in zip(loaders, streams, strict=True)])
        )
        if step < life.steps - 1 or life.committed:
            for loader in loaders:
                loader.commit()
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1
    return seen[: len(seen) - (not life.committed)], json.loads(states[0])


def run(case: Case, lives: Iterator[Life]) -> None:
    """Live until the run is over; every batch and every augmentation is compared with the uninterrupted run's."""
    whole, seen, state = uninterrupted(case), list[list[Row]](), None
    for life in lives:
        life = Life(life.world, life.workers, life.prefetch, min(life.steps, TOTAL - len(seen)), life.committed)
        more, state = live(case, life, state)
        assert more == whole[len(seen) : len(seen) + len(more)], f"after {len(seen)} steps, in {life}"
        seen += more
        if len(seen) == TOTAL:
            return


def lives_of(case: Case, dice: random.Random, workers: list[int]) -> Iterator[Life]:
    worlds = [1, 2, 4] if case.name == "batches" else [1, 2, 5] if case.name == "uneven" else [1, 2, 3, 4]
    while True:
        yield Life(
            dice.choice(worlds), dice.choice(workers), dice.choice([1, 2, 3]), dice.randrange(1, 6), dice.random() < 0.7
        )


def dice_of_this_test() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@by_name
def test_killed_anywhere_and_gone_on_with_anything(case: Case) -> None:
    dice = dice_of_this_test()
    for _ in range(2):
        run(case, lives_of(case, dice, [0]))


@pytest.mark.parametrize("case", IN_WORKERS, ids=lambda case: case.name)
def test_killed_anywhere_and_gone_on_with_any_workers(case: Case) -> None:
    run(case, lives_of(case, dice_of_this_test(), [0, 0, 1, 2]))


@by_name
@pytest.mark.parametrize("workers", [0, 1])
def test_three_resumes_in_one_epoch_two_of_them_with_other_ranks_and_one_at_its_edge(case: Case, workers: int) -> None:
    last = len({"batches": [1, 2, 3, 4]}.get(case.name, list(case.loader(1, 0))))
    lives = [
        Life(2, workers, 2, 1),
        Life(1, 0, 2, 1, committed=True),
        Life(1, workers, 3, last - 2),
        Life(2, 0, 2, TOTAL),
    ]
    run(case, iter(lives))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_whole_matrix(world: int) -> None:
    dice = dice_of_this_test()
    for workers in (0, 1, 2):
        for prefetch in (1, 2, 4):
            for case in dice.sample(CASES[:4], 2):
                lives = [Life(dice.choice([1, 2, 3, 4]), 0, 2, dice.randrange(1, 5), dice.random() < 0.5)]
                lives += [Life(world, workers, prefetch, dice.randrange(1, 6), dice.random() < 0.5)]
                lives += [Life(dice.choice([1, 2, 3, 4]), 0, 2, TOTAL)]
                run(case, iter(lives))


@pytest.mark.parametrize("case", [Case("collate", {"collate_fn": drawing_collate})], ids=["collate"])
def test_draws_in_collate_are_exact_for_the_same_number_of_ranks(case: Case) -> None:
    run(case, iter([Life(1, 0, 2, 3), Life(1, 2, 3, 4), Life(1, 1, 2, 1, committed=False), Life(1, 0, 2, TOTAL)]))


def test_every_resume_point_of_two_epochs() -> None:
    case = CASES[0]
    for first in range(1, 10):
        run(case, iter([Life(1, 0, 2, first), Life(4, 0, 2, TOTAL)]))


# ---------------------------------------------------------------- real kills, under the launcher

SCRIPT = """
import json, os, sys, time
import torch
import ftrun
sys.path.insert(0, {tests!r})
from data_kit import Augmented, rows

@ftrun.entrypoint(every=2)
def main(ft):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    ft.track(model=model)
    loader = ft.loader(Augmented(), global_batch=12, shuffle=True, seed=17, num_workers={workers})
    with open(f"rank{{ft.rank}}-{{os.getpid()}}.jsonl", "a", buffering=1) as out:
        for batch in ft.steps(loader, total={total}):
            print(json.dumps([ft.step, ft.rank, ft.world_size, rows(batch)]), file=out)
            time.sleep({pace})

main()
"""

ODD = """
import torch
import ftrun
from torch.utils.data import TensorDataset

@ftrun.entrypoint(every=2)
def main(ft):
    torch.manual_seed(0)
    ft.track(model=torch.nn.Linear(4, 1))
    loader = ft.loader(TensorDataset(torch.arange(64)), global_batch=4)
    loop = iter(loader)
    for step in ft.steps(total=6):
        next(loop)
        if step == 2 and ft.rank == 1:
            next(loop)

main()
"""


def write(runner: Runner, text: str, **values: Any) -> Path:
    script = runner.cwd / "train.py"
    script.write_text(text.format(tests=str(Path(__file__).parent), **values) if values else text)
    return script


def trained(below: Path) -> dict[tuple[int, int], dict[int, list[Row]]]:
    """What ranks have trained on, by step and world size, by rank; a step that was done again must be the same."""
    found: dict[tuple[int, int], dict[int, list[Row]]] = {}
    for path in below.glob("rank*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # of a rank that was killed
            step, rank, world, given = json.loads(line)
            share = [tuple(row) for row in given]
            before = found.setdefault((step, world), {}).setdefault(rank, share)
            assert before == share, f"step {step} of rank {rank} was another when it was done again"
    return found


def compare(below: Path) -> None:
    steps = set()
    for (step, world), shares in trained(below).items():
        if len(shares) == world:
            assert woven([shares[rank] for rank in range(world)]) == uninterrupted(CASES[0])[step]
            steps.add(step)
    assert steps == set(range(TOTAL))


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_job_under_the_launcher(runner: Runner) -> None:
    dice = dice_of_this_test()
    first = runner.start("--nproc", "2", "--name", "job", write(runner, SCRIPT, workers=1, total=TOTAL, pace=0.1))
    one, two = dice.randrange(2, 5), dice.randrange(6, 9)
    eventually(lambda: max(trained(runner.cwd), default=(0, 0))[0] >= one, 60, "steps before the first kill")
    with contextlib.suppress(ProcessLookupError):  # on a machine with no time for us the run may be over
        os.kill(pids_of_ranks(runner)[dice.randrange(2)], signal.SIGKILL)
    eventually(lambda: max(trained(runner.cwd), default=(0, 0))[0] >= two, 60, "steps before the second kill")
    kill_tree(first.process.pid)
    first.process.wait(20)
    again = write(runner, SCRIPT, workers=0, total=TOTAL, pace=0)
    assert runner.run("--nproc", "3", "--name", "job", again).code == 0
    compare(runner.cwd)


def pids_of_ranks(runner: Runner) -> list[int]:
    attempts = [each.event for each in runner.events("job") if isinstance(each.event, events.AttemptStarted)]
    return list(attempts[-1].pids.values())


@pytest.mark.slow
def test_ranks_at_different_positions_are_no_checkpoint(runner: Runner) -> None:
    job = runner.start("--nproc", "2", "--name", "job", write(runner, ODD))

    def refused() -> list[events.SaveFailed]:
        found = [each.event for each in runner.events("job") if isinstance(each.event, events.SaveFailed)]
        return found if {each.step for each in found} == {4, 6} else []

    error = eventually(refused, 60, "both refusals")[0].error
    assert "the ranks disagree on the data position" in error
    assert all(f'"samples":{number}' in error for number in (16, 20))
    job.wait()
    committed = [each.event.step for each in runner.events("job") if isinstance(each.event, events.Committed)]
    assert committed == [2]
