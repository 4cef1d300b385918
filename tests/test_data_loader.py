from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from data_kit import (
    GLOBAL_BATCH,
    SEED,
    STEPS,
    Augmented,
    Batched,
    N,
    Row,
    drawing_collate,
    endless,
    failing_collate,
    indices,
    make,
    own,
    random_states,
    rows,
    train,
    woven,
)
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ftrun.data.feistel import Permutation
from ftrun.data.loader import DataLoader
from ftrun.data.position import Position
from ftrun.data.randomness import preserved, sample_seed, seed_everything
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def uninterrupted() -> list[Row]:
    return train(1, 0, 4 * STEPS)[0]


def test_the_uninterrupted_run_is_the_permutation(uninterrupted: list[Row]) -> None:
    usable = STEPS * GLOBAL_BATCH
    for epoch in range(4):
        part = indices(uninterrupted)[epoch * usable : (epoch + 1) * usable]
        assert part == Permutation(N, SEED, epoch).take(0, usable).tolist()


def test_draws_differ_between_samples_epochs_and_generators(uninterrupted: list[Row]) -> None:
    draws = [draw for row in uninterrupted for draw in row[1:]]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_see_the_epoch(workers: int, uninterrupted: list[Row]) -> None:
    loader = make(num_workers=workers)
    assert loader.persistent_workers == bool(workers)
    seen = [row for _ in range(3) for batch in loader for row in rows(batch)]
    assert seen == uninterrupted[: 3 * STEPS * GLOBAL_BATCH]
    assert loader.position == Position(3, 0)


def test_a_dataset_that_answers_for_many_samples_at_once(uninterrupted: list[Row]) -> None:
    assert train(2, 0, STEPS, dataset=Batched())[0] == uninterrupted[: STEPS * GLOBAL_BATCH]
    plain = train(2, 0, STEPS, dataset=Batched(), sample_seeds=False)[0]
    assert indices(plain) == indices(uninterrupted[: STEPS * GLOBAL_BATCH])
    assert plain != uninterrupted[: STEPS * GLOBAL_BATCH]


def test_without_shuffle_the_order_is_the_dataset_s() -> None:
    assert indices(train(3, 0, STEPS, shuffle=False)[0]) == list(range(STEPS * GLOBAL_BATCH))


def test_another_seed_is_another_order_and_other_draws(uninterrupted: list[Row]) -> None:
    other = train(1, 0, STEPS, seed=18)[0]
    assert indices(other) != indices(uninterrupted[: len(other)])
    same_order = train(1, 0, STEPS, seed=18, shuffle=False)[0]
    assert set(same_order).isdisjoint(train(1, 0, STEPS, shuffle=False)[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_in_collate_depend_on_the_batch_alone(workers: int) -> None:
    whole = [rows(batch) for batch in make(collate_fn=drawing_collate)]
    loader = make(collate_fn=drawing_collate, num_workers=workers)
    loader.load_state_dict({**loader.state_dict(), "samples": GLOBAL_BATCH})
    assert [rows(batch) for batch in loader] == whole[1:]
    assert len({batch[-1] for batch in whole}) == STEPS


@pytest.mark.parametrize("workers", [0, 1])
def test_the_training_process_s_random_streams_are_left_alone(workers: int) -> None:
    before = random_states()
    loader = make(num_workers=workers, collate_fn=drawing_collate)
    for _ in range(2):
        assert len(list(loader)) == STEPS
    assert random_states() == before


def disturbing() -> list[torch.Tensor]:
    seed_everything(1)
    return []


def test_streams_come_back_after_a_failure() -> None:
    before = random_states()
    with pytest.raises(ValueError, match="ragged"), preserved():
        failing_collate(disturbing())
    assert random_states() == before
    with preserved():
        seed_everything(1)
        assert random_states() != before


def test_no_two_generators_share_a_stream() -> None:
    with preserved():
        seed_everything(sample_seed(0, 0, 0))
        numpy_words = np.random.randint(0, 2**32, 50, dtype=np.uint32).tolist()
        torch_words = (torch.empty(50, dtype=torch.int64).random_(0, 2**32)).tolist()
    assert set(numpy_words).isdisjoint(torch_words)


def test_a_batch_counts_when_the_next_is_asked_for_or_by_commit() -> None:
    loader = make()
    loop = iter(loader)
    next(loop)
    assert loader.position == Position(0, 0)
    loader.commit()
    loader.commit()
    assert loader.position == Position(0, 12)
    next(loop)
    assert loader.position == Position(0, 12)
    next(loop)
    assert loader.position == Position(0, 24)


def test_the_last_batch_of_an_epoch_commits_to_the_next_epoch() -> None:
    loader = make()
    for _ in loader:
        assert loader.epoch == 0
        loader.commit()
    assert loader.position == Position(1, 0)
    assert loader.epoch == 1
    assert len(loader) == STEPS


def test_a_state_after_the_last_batch_resumes_in_the_next_epoch(uninterrupted: list[Row]) -> None:
    loader = make()
    list(loader)
    fresh = make()
    fresh.load_state_dict(loader.state_dict())
    assert [row for batch in fresh for row in rows(batch)] == uninterrupted[48:96]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("commit", [False, True])
def test_leaving_a_loop_early(workers: int, commit: bool, uninterrupted: list[Row]) -> None:
    loader = make(num_workers=workers)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    if commit:
        loader.commit()
    start = (2 if commit else 1) * GLOBAL_BATCH
    assert [row for batch in loader for row in rows(batch)] == uninterrupted[start:48]


def test_looking_at_a_first_batch_moves_nothing(uninterrupted: list[Row]) -> None:
    loader = make()
    assert rows(next(iter(loader))) == rows(next(iter(loader))) == uninterrupted[:12]
    assert loader.position == Position()


def test_a_new_loop_ends_the_one_before() -> None:
    loader = make()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="this loop over the loader has ended"):
        next(first)


def test_loading_after_the_loop_began_is_refused() -> None:
    loader = make()
    state = loader.state_dict()
    iter(loader)
    with pytest.raises(UsageError, match="load the state before the loop"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dataset": Augmented(54)}, "n: was 53, now 54"),
        ({"dataset": Batched()}, "dataset: was 'Augmented/53', now 'Batched/53'"),
        ({"shuffle": False}, "order: was 'feistel6-v1', now 'none'"),
        ({"seed": 18}, "seed: was 17, now 18"),
        ({"global_batch": 24}, "global_batch: was 12, now 24"),
        ({"global_batch": 53, "tail": "error"}, "tail: was 'drop', now 'error'"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StateMismatch, match=text) as caught:
        make(**change).load_state_dict(make().state_dict())
    assert "--fresh" in str(caught.value)


def test_a_size_per_rank_keeps_the_first_global_batch(uninterrupted: list[Row]) -> None:
    words: dict[str, Any] = {"global_batch": None, "batch_size": 6, "drop_last": True}
    seen, state = train(2, 0, 3, **words)
    assert state["global_batch"] == 12
    # Eight ranks of six would want 48 samples of 53 in a step: the stored twelve can't be split over eight.
    more, _ = train(4, 0, 3, state, **words)
    assert seen + more == uninterrupted[: 6 * GLOBAL_BATCH]
    with pytest.raises(UsageError, match=r"12 can't be split evenly over 8 ranks: .* 1, 2, 3, 4, 6, 12;"):
        make(8, **words).load_state_dict(state)
    # Twelve ranks of six would want more than there is, and need not: the stored global batch counts.
    make(12, **words).load_state_dict(state)
    with pytest.raises(UsageError, match="less than one global batch of 72"):
        iter(make(12, **words))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class PerRank(RandomSampler):
    num_replicas, rank = 2, 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset": object()}, "no __len__ and no __getitem__"),
        ({"dataset": Augmented(11)}, "11 samples, less than one global batch of 12.* at most 11"),
        ({"dataset": Augmented(0)}, "0 samples.* where the dataset gets its data"),
        ({"dataset": Augmented(0), "global_batch": None}, "0 samples.* where the dataset gets its data"),
        ({"world": 5}, "12 can't be split evenly over 5 ranks: .* 1, 2, 3, 4, 6, 12;.*even_shares=False"),
        ({"world": 13, "even_shares": False}, "12 can't be split evenly over 13 ranks"),
        ({"world": 2, "rank": 2}, "rank 2 is not in a world of 2"),
        ({"batch_size": 3}, "give one of global_batch"),
        ({"global_batch": 0}, "at least one sample, not 0"),
        ({"global_batch": 1.5}, "at least one sample, not 1.5"),
        ({"global_batch": None, "batch_size": -1}, "at least one sample, not -1"),
        ({"global_batch": None, "batch_size": None, "drop_last": True}, "no last batch"),
        ({"tail": "wrap"}, "tail is one of 'drop', 'error', 'pad', 'uneven'"),
        ({"tail": "error"}, "last 5 of 53 samples"),
        ({"tail": "pad", "drop_last": True}, "contradict each other: leave drop_last out"),
        ({"order": "random"}, "no order 'random': it is 'feistel6-v1'"),
        ({"order": "block:0"}, "no order 'block:0'"),
        ({"order": "none"}, "shuffle=True and order='none' contradict"),
        ({"order": "torch", "shuffle": False}, "shuffle=False and order='torch' contradict"),
        ({"sampler": [1]}, "sampler says the order: leave shuffle out"),
        ({"sampler": [1], "shuffle": None, "order": "torch"}, "leave out shuffle and order"),
        ({"batch_sampler": [[1]]}, "leave out global_batch, shuffle"),
        ({"sampler": PerRank(range(53)), "shuffle": None}, "one rank's part.* the same on all ranks"),
        ({"generator": torch.Generator()}, "seed and generator both say the order"),
        ({"in_order": False}, "in_order=False .* leave it out"),
        ({"num_workers": -1}, "num_workers is a whole number from 0: a number of processes, not -1"),
        ({"virtual_shards": 4}, "for iterable datasets"),
        ({"dataset": "data/train"}, "the dataset is text, 'data/train': give an object"),
        ({"dataset": Augmented}, "the dataset is the class Augmented: give an object"),
        ({"shuffle": "false"}, "shuffle is True or False, not 'false'"),
        ({"sample_seeds": "no"}, "sample_seeds is True or False"),
        ({"pin_memory": "cuda"}, "pin_memory is True or False"),
        ({"sampler": 5, "shuffle": None}, "sampler lists dataset indices.* and 5 can't be"),
        ({"sampler": iter([1]), "shuffle": None}, "list_iterator, which can be read only once"),
        ({"generator": 5, "seed": 0}, "generator is a torch.Generator, or left out, not 5"),
        ({"seed": 1.5}, "seed is a whole number, not 1.5"),
        ({"seed": 2**63, "order": "torch"}, "too large for order='torch'"),
        ({"order": ["torch"]}, r"no order \['torch'\]"),
        ({"rank": "0"}, "rank is a whole number, not '0'"),
        ({"num_workers": "2"}, "num_workers is a whole number from 0: a number of processes, not '2'"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is a whole number from 1"),
        ({"timeout": "5"}, "timeout is a number of seconds"),
        ({"timeout": 5}, "timeout=5 is for batches that workers load"),
        ({"collate_fn": "stack"}, "collate_fn is a function, not 'stack'"),
        (
            {"dataset": Stream(), "world": 5, "shuffle": False},
            r"world sizes that work are 1, 2, 3, 4, 6, 12; or start over with a global_batch that is a multiple of 5$",
        ),
        ({"dataset": Stream(), "sampler": [1]}, "read in order, so there is nothing to sample"),
        ({"dataset": Stream(), "tail": "pad"}, "whole global batches"),
    ],
)
def test_what_can_t_work_is_refused_with_a_way_out(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    two, one, none, size, seed = (np.int64(each) for each in (2, 1, 0, GLOBAL_BATCH, SEED))
    words: dict[str, Any] = {"world": two, "rank": one, "num_workers": none, "global_batch": size, "seed": seed}
    loader = make(**words)
    assert loader.state_dict() == make().state_dict()
    assert [type(value) for value in loader.state_dict().values()] == [type(v) for v in make().state_dict().values()]


@pytest.mark.parametrize("state", [None, [1], {}, {"_iterator_finished": False}])
def test_what_is_no_state_of_a_loader_is_refused(state: Any) -> None:
    with pytest.raises(StateMismatch, match="no position of a loader of ftrun's"):
        make().load_state_dict(state)


def test_tail_error_accepts_data_that_fits() -> None:
    assert len(make(dataset=Augmented(48), tail="error")) == 4


def test_users_see_their_own_dataset_and_collate() -> None:
    dataset = Subset(Augmented(), range(30))
    loader = make(dataset=dataset, collate_fn=drawing_collate)
    assert loader.dataset is dataset
    assert loader.collate_fn is drawing_collate


# ---------------------------------------------------------------- torch's words


@pytest.mark.parametrize("n", [1, 7, 8, 53])
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"batch_size": 8},
        {"batch_size": 8, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 8, "num_workers": 1},
        {"batch_size": 3, "collate_fn": list},
        {"sampler": [0, 0, 0], "batch_size": 2},
        {"batch_sampler": [[0], [0, 0], [0]]},
        {"batch_sampler": BatchSampler(range(7), 3, False)},
        {"sampler": SequentialSampler(range(5)), "batch_size": 2},
    ],
)
def test_torch_s_words_mean_what_they_mean_to_torch(n: int, words: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.arange(n if "sampler" not in str(words) else max(n, 7)))
    if n < 8 and words.get("drop_last"):
        with pytest.raises(UsageError, match=f"{n} samples, less than one global batch of 8"):  # torch yields nothing
            iter(DataLoader(dataset, **words))
        return
    ours, theirs = DataLoader(dataset, **words), torch.utils.data.DataLoader(dataset, **words)
    assert isinstance(ours, torch.utils.data.DataLoader)
    assert len(ours) == len(theirs)
    for _ in range(2):
        assert repr(list(ours)) == repr(list(theirs))
    for name in ("dataset", "num_workers", "drop_last", "collate_fn", "timeout", "pin_memory"):
        assert getattr(ours, name) == getattr(theirs, name), name
    if ours.recipe.n is not None:
        assert len(ours.sampler) == len(list(ours.sampler))  # type: ignore[arg-type]


def test_arguments_may_come_by_place() -> None:
    loader = DataLoader(TensorDataset(torch.arange(20)), 4, True)
    assert (loader.batch_size, loader.recipe.order, loader.drop_last) == (4, "feistel6-v1", False)
    assert sorted(value for (batch,) in loader for value in batch.tolist()) == list(range(20))


def test_what_frameworks_look_at() -> None:
    loaders = [make(2, rank, num_workers=1) for rank in (0, 1)]
    for rank, loader in enumerate(loaders):
        assert loader.batch_size == 6
        assert loader.drop_last
        assert isinstance(loader.batch_sampler, BatchSampler)
        assert loader.batch_sampler.batch_size == 6
        listed = list(loader.batch_sampler)
        assert [index for batch in listed for index in batch] == list(loader.sampler)
        assert (len(loader.sampler), len(loader)) == (24, 4)  # type: ignore[arg-type]
        assert listed[0] == Permutation(N, SEED, 0).take(rank, 12, 2).tolist()
        assert loader.position == loader.dispatched == Position()


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_taken_for_what_it_means(shuffle: bool) -> None:
    dataset, world = Augmented(48), 2
    for rank in range(world):
        sampler: Any = DistributedSampler(dataset, world, rank, shuffle=shuffle, seed=5)
        ours = DataLoader(dataset, 5, sampler=sampler)
        assert ours.recipe.order == ("torch-v1" if shuffle else "none")
        assert (ours.share.rank, ours.share.world_size, ours.recipe.seed) == (rank, 2, 5)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen = [index for batch in ours for index in indices(rows(batch))]
            assert seen == list(sampler)


def _sizes(batches: Any, world: int) -> list[list[int]]:
    shares = [DataLoader(Augmented(20), batch_sampler=batches, rank=rank, world_size=world) for rank in range(world)]
    return [[len(rows(batch)) for batch in loader] for loader in shares]


@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_any_batch_sampler_are_those_of_all_ranks(drop_last: bool) -> None:
    class Own(BatchSampler):
        pass

    for kind in (BatchSampler, Own):
        batches = kind(range(20), 6, drop_last)
        assert _sizes(batches, 1) == [[6, 6, 6] if drop_last else [6, 6, 6, 2]], kind
        assert _sizes(batches, 2) == [[3, 3, 3] if drop_last else [3, 3, 3, 1]] * 2, kind
    for word in ({"global_batch": 4}, {"tail": "pad"}):
        with pytest.raises(UsageError, match=f"which samples make which batch: leave out {next(iter(word))}"):
            DataLoader(Augmented(20), batch_sampler=BatchSampler(range(20), 6, drop_last), **word)


def test_batches_over_a_distributed_sampler_are_those_of_one_rank() -> None:
    for rank in range(2):
        sampler: Any = DistributedSampler(Augmented(20), 2, rank)
        loader = DataLoader(Augmented(20), batch_sampler=BatchSampler(sampler, 5, True))
        assert ([len(rows(batch)) for batch in loader], loader.global_batch) == ([5, 5], 10)


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (DistributedSampler(Augmented(), 4, 1), "for rank 1 of 4 and the loader for rank 0 of 2"),
        (DistributedSampler(Augmented(52), 2, 0), "another dataset"),
        (DistributedSampler(Augmented(), 2, 0, seed=3), "seed=17, and the DistributedSampler's is 3"),
    ],
)
def test_a_distributed_sampler_for_something_else_is_refused(sampler: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make(2, 0, shuffle=None, sampler=sampler)


def test_random_and_sequential_samplers_of_the_dataset_are_orders_of_the_loader_s() -> None:
    dataset = Augmented()
    orders = [make(dataset=dataset, shuffle=None, sampler=kind(dataset)) for kind in (RandomSampler, SequentialSampler)]
    assert [loader.recipe.order for loader in orders] == ["feistel6-v1", "none"]
    seeded = make(dataset=dataset, shuffle=True, seed=0, generator=torch.Generator().manual_seed(23))
    assert seeded.recipe.seed == 23


class Stubborn:
    """A sampler whose list depends on nothing that the loader can settle."""

    def __init__(self) -> None:
        self.dice = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.dice.sample(range(N), N))

    def __len__(self) -> int:
        return N


def test_a_sampler_that_lists_something_else_on_resume_is_found_out() -> None:
    loader = make(shuffle=None, sampler=Stubborn())
    next(iter(loader))
    loader.commit()
    sampler = Stubborn()
    list(sampler)
    resumed = make(shuffle=None, sampler=sampler)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="Stubborn lists other samples for epoch 0"):
        next(iter(resumed))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"sampler": ["a"]}, "lists no dataset indices for epoch 0 such as 'a'"),
        ({"sampler": []}, "0 samples"),
        ({"sampler": "ab"}, "lists no dataset indices for epoch 0 such as 'a'"),
        ({"sampler": [1, [2]]}, r"lists no dataset indices for epoch 0 such as \[2\]"),
        ({"batch_sampler": []}, "and nothing at all"),
        (
            {"batch_sampler": [1, 2]},
            "lists no batches for epoch 0 such as 1: .* give one that lists indices as sampler",
        ),
        ({"batch_sampler": [[1, 2], [3]], "world": 2}, "batch of 1 samples, which can't be split evenly over 2"),
        ({"batch_sampler": [[1, 2], []], "even_shares": False}, "batch of 0 samples"),
    ],
)
def test_what_a_sampler_can_t_list(words: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        list(make(**{"shuffle": None, "global_batch": 1 if "sampler" in words else None, **words}))


def test_a_sampler_s_own_generator_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = SubsetRandomSampler(range(N), generator=generator)
    before, states = generator.get_state(), random_states()
    assert len(list(make(shuffle=None, sampler=sampler))) == STEPS
    assert torch.equal(generator.get_state(), before)
    assert random_states() == states


def test_set_epoch_is_checked() -> None:
    loader = make()
    loader.set_epoch(0)
    list(loader)
    loader.set_epoch(1)
    for wrong in (0, 2):
        with pytest.raises(UsageError, match=rf"set_epoch\({wrong}\), and the loader is in epoch 1"):
            loader.set_epoch(wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_three_counters(workers: int) -> None:
    loader = make(num_workers=workers, global_batch=6, prefetch_factor=2 if workers else None)
    loop = iter(loader)
    next(loop)
    next(loop)
    ahead = 6 * workers * 2
    assert (loader.committed, loader.yielded, loader.dispatched) == (
        Position(0, 6),
        Position(0, 12),
        Position(0, 12 + ahead),
    )


# ---------------------------------------------------------------- samples that don't fill a global batch


@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 12])
def test_an_epoch_is_the_same_for_every_world_size(world: int, tail: str) -> None:
    loaders = [make(world, rank, tail=tail, even_shares=False) for rank in range(world)]
    assert {len(loader) for loader in loaders} == {4 if tail == "drop" else 5}
    seen = []
    for batches in zip(*loaders, strict=True):
        sizes = [len(batch) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        seen += woven([own(loader, batch) for loader, batch in zip(loaders, batches, strict=True)])
    assert indices(seen) == Permutation(N, SEED, 0).take(0, 48 if tail == "drop" else 53).tolist()
    assert all(loader.position == Position(1, 0) for loader in loaders)


def test_repeats_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    loaders = [make(4, rank, tail="pad") for rank in range(4)]
    padding = [[loader.padding for _ in loader] for loader in loaders]
    assert padding == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 2], [0, 0, 0, 0, 2]]
    assert caplog.text.count("loader.padding says") == 4
    last = list(make(1, tail="pad"))[-1]
    assert indices(rows(last)[5:]) == Permutation(N, SEED, 0).take(0, 7).tolist()
    short = make(dataset=Augmented(5), tail="pad")
    assert [len(batch) for batch in short] == [12]
    assert short.padding == 7


def test_a_rank_for_which_nothing_is_left_takes_part_all_the_same() -> None:
    loaders = [make(4, rank, dataset=Augmented(50), tail="uneven") for rank in range(4)]
    last = [list(loader)[-1] for loader in loaders]
    assert [(len(batch), loader.padding) for batch, loader in zip(last, loaders, strict=True)] == [
        (1, 0), (1, 0), (1, 1), (1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("n", [52, 54])
def test_a_dataset_that_changes_its_length_is_refused(n: int) -> None:
    dataset = Augmented()
    loader = make(dataset=dataset)
    list(loader)
    dataset.n = n
    with pytest.raises(UsageError, match=f"had 53 samples when its loader was made, and has {n} now"):
        list(loader)


def test_a_weighted_sampler_resumes_exactly() -> None:
    def loader() -> DataLoader[torch.Tensor]:
        weighted = WeightedRandomSampler([1.0] * N, 36, generator=torch.Generator().manual_seed(random.getrandbits(32)))
        return make(shuffle=None, sampler=weighted)

    whole = [rows(batch) for _, batch in zip(range(6), endless(loader()), strict=False)]
    first = loader()
    stream = endless(first)
    seen = [rows(next(stream)) for _ in range(4)]
    first.commit()
    second = loader()
    second.load_state_dict(first.state_dict())
    assert seen + [rows(batch) for batch in second] == whole
