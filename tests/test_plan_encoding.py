"""A state that is taken apart again and again comes out as if it had never been seen before, whatever has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from session_kit import alike

from ftrun.checkpoint import state
from ftrun.checkpoint.plan.encoding import _MOVED, Encoding
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.record_text import RecordText
from ftrun.checkpoint.records import RankRecord, TensorEntry
from ftrun.checkpoint.staging.runs import Words
from ftrun.errors import NotStorable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def fresh() -> dict[str, Any]:
    model = {f"layer{number}.weight": torch.nn.Parameter(torch.randn(4, 6)) for number in range(10)}
    slots = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 6), "exp_avg_sq": torch.randn(4, 6)}
        for name in model
    }
    groups = [{"lr": 0.1, "params": list(model)}]
    return {
        "tracked": {"model": model, "optimizer": {"state": slots, "param_groups": groups}},
        "random": {"numpy": np.arange(8, dtype=np.int32), "python": (3, tuple(range(20)))},
        "extra": {
            "loss": torch.tensor(0.5),
            "c": torch.ones(3, dtype=torch.complex64),
            "none": [torch.empty(0), torch.empty(0)],
        },
    }


def model(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = value["tracked"]["model"]
    return found


def slots(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = value["tracked"]["optimizer"]["state"]
    return found


def data(value: Any, new: torch.Tensor) -> None:
    model(value)["layer3.weight"].data = new


def swap(value: Any) -> None:
    model(value)["layer3.weight"] = torch.nn.Parameter(model(value)["layer3.weight"].detach().clone())


def resize(value: Any) -> None:
    slots(value)["layer2.weight"]["exp_avg"].resize_(8, 6)


def reorder(value: Any) -> None:
    model(value)["layer0.weight"] = model(value).pop("layer0.weight")


def inner_order(value: Any) -> None:
    inner = slots(value)["layer4.weight"]
    inner["step"] = inner.pop("step")


def rename(value: Any) -> None:
    slots(value)["other"] = slots(value).pop("layer9.weight")


def tie(value: Any) -> None:
    model(value)["layer1.weight"] = model(value)["layer0.weight"]


def move(value: Any, name: str) -> None:
    """Away from what it is tied to."""
    if name in model(value):
        old = model(value)[name].detach()
        model(value)[name] = torch.empty_strided(old.shape, old.stride()).copy_(old + 1)


def overlap(value: Any) -> None:
    flat = torch.zeros(48)
    model(value)["layer5.weight"].data = flat.view(8, 6)[:4]
    model(value)["layer6.weight"].data = flat.view(8, 6)[2:6]


def lie_within_another(value: Any) -> None:
    value["extra"]["loss"] = model(value)["layer7.weight"].detach()[0]


def number_for_tensor(value: Any) -> None:
    slots(value)["layer8.weight"]["step"] = 4


def all_steps_are_numbers(value: Any) -> None:
    for each in slots(value).values():
        each["step"] = 4


def nested_for_number(value: Any) -> None:
    slots(value)["layer8.weight"] = {"step": {"x": torch.ones(1), "y": torch.ones(1), "z": torch.ones(1)}}


def lr(value: Any) -> None:
    value["tracked"]["optimizer"]["param_groups"][0]["lr"] = 0.05


def group(value: Any) -> None:
    params = value["tracked"]["optimizer"]["param_groups"][0]["params"]
    value["tracked"]["optimizer"]["param_groups"].append({"lr": 0.2, "params": [params.pop()]})


def array_type(value: Any) -> None:
    value["random"]["numpy"] = value["random"]["numpy"].view(np.float32)


def array_moves(value: Any) -> None:
    value["random"]["numpy"] = value["random"]["numpy"].copy() + 1


def dtypes(value: Any) -> None:
    slots(value)["layer0.weight"]["exp_avg"] = slots(value)["layer0.weight"]["exp_avg"].view(torch.int32)


def one_empty(value: Any) -> None:
    value["extra"]["none"][1] = value["extra"]["none"][0]


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda value: None,
    "values": lambda value: model(value)["layer3.weight"].data.add_(1),
    "another storage": lambda value: data(value, torch.randn(4, 6)),
    "other strides": lambda value: data(value, model(value)["layer3.weight"].detach().view(6, 4).t()),
    "another shape": lambda value: data(value, model(value)["layer3.weight"].detach().view(6, 4)),
    "a copy in its place": swap,
    "resized": resize,
    "other dtype of the same memory": dtypes,
    "another order of keys": reorder,
    "another order of inner keys": inner_order,
    "another name": rename,
    "tied": tie,
    "the first of those that are tied is elsewhere": lambda value: move(value, "layer0.weight"),
    "another of them is elsewhere": lambda value: move(value, "head"),
    "a view is elsewhere": lambda value: move(value, "view"),
    "overlapping": overlap,
    "a value in another's memory": lie_within_another,
    "a number for a tensor": number_for_tensor,
    "numbers for tensors": all_steps_are_numbers,
    "a dict for a tensor": nested_for_number,
    "one tensor less": lambda value: model(value).pop("layer9.weight"),
    "one state less": lambda value: slots(value).pop("layer9.weight"),
    "none left": lambda value: slots(value).clear(),
    "another number": lr,
    "another group": group,
    "an array of another type": array_type,
    "an array elsewhere": array_moves,
    "a lazily conjugated one": lambda value: value["extra"].update(c=value["extra"]["c"].conj()),
    "a negated one": lambda value: value["extra"].update(c=torch._neg_view(value["extra"]["c"])),
    "two empty ones are one": one_empty,
    "frozen": lambda value: model(value)["layer3.weight"].requires_grad_(False),
}


def laid_out(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """All that a plan is made for."""
    return [
        (name, each.dtype, each.shape, each.stride(), each.is_conj(), each.is_neg()) for name, each in tensors.items()
    ]


class Checked:
    """An encoding, and for which states it has said that they are alike."""

    def __init__(self) -> None:
        self.encoding = Encoding()
        self._said: dict[object, list[Any]] = {}

    def encode(self, value: Any) -> state.Encoded:
        found = self.encoding.encode(value)
        assert found.alike is not None
        now = laid_out(found.tensors)
        assert self._said.setdefault(found.alike.token, now) == now, "what is laid out otherwise is said to be alike"
        return found


def same(encoding: Checked, value: Any) -> None:
    found, wanted = encoding.encode(value), state.encode(value)
    assert alike(found.tree, wanted.tree)
    assert list(found.tensors) == list(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        mine = found.tensors[name]
        assert type(mine) is torch.Tensor
        assert not mine.requires_grad
        assert (mine.dtype, mine.shape, mine.stride(), mine.data_ptr()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.data_ptr(),
        )
    assert found.alike is not None
    assert found.alike.addresses.tolist() == [each.data_ptr() for each in wanted.tensors.values()]
    assert [each.data_ptr() for each in found.alike.given] == found.alike.addresses.tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes(change: str, tied: bool) -> None:
    value, encoding = fresh(), Checked()
    if tied:
        model(value)["head"] = model(value)["layer0.weight"]
        model(value)["view"] = model(value)["layer0.weight"].detach().t()
    same(encoding, value)
    same(encoding, value)
    CHANGES[change](value)
    same(encoding, value)
    same(encoding, value)


@pytest.mark.parametrize("change", CHANGES)
def test_records_are_the_same_bytes_whatever_is_remembered(change: str) -> None:
    value, encoding, text, planner = fresh(), Encoding(), RecordText(), Planner(0, 1, None)

    def record(number: int) -> RankRecord:
        encoded = encoding.encode(value)
        plan = planner.plan(encoded, {}, number)
        made = RankRecord(f"e1-s{number}", 0, number, None, {"at": number}, encoded.tree, plan.entries, plan.pieces)
        assert text.to_bytes(made, encoded.settled) == made.to_bytes()
        return made

    record(1)
    assert encoding.encode(value).settled, "nothing is remembered"
    record(2)
    CHANGES[change](value)
    wanted = state.encode(value).tree
    assert alike(record(3).tree, wanted)
    assert alike(RankRecord.from_bytes(record(4).to_bytes()).tree, wanted)


def test_digests_are_said_anew() -> None:
    entries = {name: TensorEntry("float32", (2,), "0-1") for name in ("a", "b")}
    text = RecordText()
    for digest in ("0a", "0b"):
        tensors = entries | {"b": replace(entries["b"], digest=digest)}
        made = RankRecord("e1-s1", 0, 1, None, None, {}, tensors, ())
        assert text.to_bytes(made, {}) == made.to_bytes()
        assert RankRecord.from_bytes(text.to_bytes(made, {})).tensors["b"].digest == digest


def test_what_was_negated_may_be_another_one_later() -> None:
    one = torch.ones(4)
    value, encoding = {"one": one, "other": torch._neg_view(one)}, Checked()
    same(encoding, value)
    value["other"] = one
    same(encoding, value)
    same(encoding, value)


def test_dicts_without_anything_are_nothing_new() -> None:
    value = {"model": {str(number): torch.ones(1) for number in range(9)}, "more": {"a": {}, "b": {}}}
    encoding = Encoding()
    first, second = encoding.encode(value).alike, encoding.encode(value).alike
    assert first is not None
    assert second is not None
    assert second.token is first.token


def test_where_many_lie_elsewhere_all_are_looked_at_anew() -> None:
    """To look for each at what else lies there would take longer."""

    def is_alike(count: int) -> bool:
        encoding, value = Encoding(), {str(number): torch.ones(3) for number in range(_MOVED + 1)}
        first, kept = encoding.encode(value).alike, list(value.values())  # kept, so that no memory is used twice
        value |= {str(number): torch.ones(3) for number in range(count)}
        second = encoding.encode(value).alike
        assert first is not None
        assert second is not None
        assert len(kept) == _MOVED + 1
        return first.token is second.token

    assert is_alike(_MOVED)
    assert not is_alike(_MOVED + 1)


def test_texts_of_parts_that_are_gone_are_not_kept() -> None:
    encoding, text, planner = Encoding(), RecordText(), Planner(0, 1, None)
    for number in range(3):
        encoded = encoding.encode({f"at{number}": {str(each): torch.ones(1) for each in range(9)}, "note": 1})
        plan = planner.plan(encoded, {}, number)
        made = RankRecord(f"e1-s{number}", 0, number, None, None, encoded.tree, plan.entries, plan.pieces)
        assert text.to_bytes(made, encoded.settled) == made.to_bytes()
    assert [*text._blocks] == ["at2"]


def test_the_token_says_that_nothing_has_changed() -> None:
    value, encoding = fresh(), Encoding()

    def token() -> object:
        found = encoding.encode(value).alike
        assert found is not None
        return found.token

    first = token()
    lr(value)
    array_moves(value)
    assert token() is first
    data(value, torch.randn(4, 6).t().contiguous().t())
    assert token() is not first


def test_what_can_not_be_stored_is_refused_by_its_path_the_second_time_too() -> None:
    value, encoding = fresh(), Encoding()
    encoding.encode(value)
    value["tracked"]["optimizer"]["param_groups"][0]["lr"] = object()
    with pytest.raises(NotStorable, match="lr"):
        encoding.encode(value)
    value["tracked"]["optimizer"]["param_groups"][0]["lr"] = 0.1
    slots(value)["layer0.weight"]["exp_avg"] = torch.ones(3).to_sparse()
    with pytest.raises(NotStorable, match="sparse"):
        encoding.encode(value)


def test_names_that_are_not_apart() -> None:
    value = {"a/b": {str(number): torch.ones(2) for number in range(9)}, "a": {"b": {"0": torch.zeros(2)}}}
    encoding = Checked()
    for _ in range(3):
        same(encoding, value)


def words_of(parts: list[torch.Tensor], turn: int) -> Words:
    starts = np.array([each.data_ptr() for each in parts], dtype=np.uint64)
    sizes = np.array([each.nbytes for each in parts], dtype=np.uint64)
    return Words([chr(ord("a") + number) for number in range(len(parts))], starts, sizes, turn)


@pytest.mark.parametrize("turn", range(8))
def test_words_tell_of_a_write_to_all_of_a_tensor_past_torch(turn: int) -> None:
    whole = [torch.zeros(5000, dtype=torch.uint8) for _ in range(3)]
    parts = [each[3:] for each in whole]  # which begins and ends within a word
    words = words_of(parts, turn)
    assert words.changed() == set()
    parts[1].numpy()[:] = 1
    assert words.changed() == {"b"}
    parts[2].numpy()[2500:] = 1  # and to half of it
    whole[0][:3] = 7  # outside
    assert words.changed() == {"b", "c"}


def test_words_come_by_everywhere() -> None:
    part = torch.zeros(8 * 41, dtype=torch.uint8)[3:-3]
    seen = set()
    for turn in range(40):
        for at in range(0, 312, 8):
            words = words_of([part], turn)
            part.numpy()[at + 5] += 1  # one byte of each word
            if words.changed():
                seen.add(at)
    assert seen == set(range(0, 312, 8))
