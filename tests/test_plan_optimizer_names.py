"""What a checkpoint holds of models and optimizers: names that fit with and without wrappers, and come back exactly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from session_kit import alike
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ftrun.checkpoint.state import decode, encode
from ftrun.errors import StateMismatch, UsageError
from ftrun.session import optimizer_names
from ftrun.session.tracked import differences, modules_of, restore, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 15).view(5, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(times):
        optimizer.step(closure)


def through_a_checkpoint(state: Any) -> Any:
    encoded = encode({"tracked": state})
    tensors = {name: each.detach().clone() for name, each in encoded.tensors.items()}
    return decode(encoded.tree, tensors)["tracked"]


def stored(objects: dict[str, Any]) -> dict[str, Any]:
    return through_a_checkpoint({name: state_of(name, each, objects) for name, each in objects.items()})


def give_back(objects: dict[str, Any], states: dict[str, Any]) -> None:
    for name, value in objects.items():
        restore(name, value, states[name], "e1", "start over", objects)


GROUPED: dict[str, Make] = {
    "adamw": lambda each: torch.optim.AdamW(each, lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda each: torch.optim.Adam(each, amsgrad=True),
    "momentum": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    "plain": lambda each: torch.optim.SGD(each, lr=0.1),
    "adafactor": lambda each: torch.optim.Adafactor(each),  # noqa: PLW0108 (a name for the table's type)
    "lbfgs": lambda each: torch.optim.LBFGS(each, max_iter=3),
    "rate in a tensor": lambda each: torch.optim.Adam(each, lr=torch.tensor(0.01)),
    "two groups": lambda each: torch.optim.AdamW([{"params": each[:1], "lr": 0.3}, {"params": each[1:]}], lr=0.1),
    "an empty group": lambda each: torch.optim.AdamW([{"params": each}, {"params": []}]),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_an_optimizer_comes_back_exactly(kind: str) -> None:
    make = GROUPED[kind]
    model = net()
    optimizer = make(list(model.parameters()))
    step(model, optimizer)
    objects = {"model": model, "optimizer": optimizer}
    states = stored(objects)
    names = [name for group in states["optimizer"]["param_groups"] for name in group["params"]]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert set(states["optimizer"]["state"]) <= set(names)

    other = net(1)
    again = make(list(other.parameters()))
    defaults = copy.deepcopy(again.defaults)
    give_back({"model": other, "optimizer": again}, states)
    assert alike(again.state_dict(), optimizer.state_dict())
    assert alike({name: again.defaults[name] for name in defaults}, defaults)
    for one, its in ((model, optimizer), (other, again)):
        step(one, its)
    assert alike(other.state_dict(), model.state_dict())


def test_a_fresh_optimizer_is_not_stepped() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    before = torch.get_rng_state()
    state = state_of("optimizer", optimizer, {"model": model})
    assert state["state"] == {}
    assert not optimizer.state
    assert torch.equal(before, torch.get_rng_state())


def test_an_optimizer_that_tracks_no_model_keeps_its_numbers() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    for objects in ({}, {"other": net()}, {"part": model[0]}):
        state = state_of("optimizer", optimizer, {**objects, "optimizer": optimizer})
        assert list(state["state"]) == [0, 1, 2, 3]
        again = torch.optim.Adam(net().parameters())
        restore("optimizer", again, through_a_checkpoint(state), "e1", "start over", objects)
        assert alike(again.state_dict(), optimizer.state_dict())


def test_an_optimizer_that_is_restored_before_its_model_is_tracked() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    states = stored({"model": model, "optimizer": optimizer})
    again = torch.optim.Adam(net().parameters())
    restore("optimizer", again, states["optimizer"], "e1", "start over", {"optimizer": again})
    assert alike(again.state_dict(), optimizer.state_dict())


def test_parameters_in_another_order_get_their_own_states() -> None:
    model = net()
    first, second = list(model[0].parameters()), list(model[2].parameters())
    optimizer = torch.optim.Adam([{"params": first, "lr": 0.5}, {"params": second, "lr": 0.25}])
    step(model, optimizer)
    states = stored({"model": model, "optimizer": optimizer})
    other = net(1)
    there = [list(other[2].parameters())[::-1], list(other[0].parameters())]
    again = torch.optim.Adam([{"params": there[0]}, {"params": there[1]}])
    give_back({"model": other, "optimizer": again}, states)
    assert [group["lr"] for group in again.param_groups] == [0.25, 0.5]
    for name, parameter in other.named_parameters():
        expected = optimizer.state[dict(model.named_parameters())[name]]
        assert alike(again.state[parameter], expected), name


def test_parameters_of_several_models() -> None:
    encoder, decoder = net(), net(1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1, momentum=0.9)
    step(encoder, optimizer)
    objects = {"encoder": encoder, "decoder": decoder, "optimizer": optimizer, "average": net()}
    names = stored(objects)["optimizer"]["param_groups"][0]["params"]
    assert names == [f"{part}.{name}" for part in ("encoder", "decoder") for name, _ in net().named_parameters()]


def test_a_model_and_a_part_of_it_are_tracked() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"head": model[2], "model": model, "optimizer": optimizer}
    assert stored(objects)["optimizer"]["param_groups"][0]["params"][-1] == "2.bias"


def test_shared_and_frozen_parameters() -> None:
    model = net()
    model.tied = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    states = stored({"model": model, "optimizer": optimizer})
    assert states["optimizer"]["param_groups"][0]["params"] == ["tied", "0.bias", "2.weight", "2.bias"]
    assert "0.bias" not in states["optimizer"]["state"]
    assert states["model"]["tied"] is states["model"]["0.weight"]


def test_sparse_optimizers_and_states_of_another_make_are_left_alone() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert list(stored({"table": table, "optimizer": optimizer})["optimizer"]["state"]) == ["weight"]
    for odd in ({}, {"state": {}}, {"state": {}, "param_groups": [{"lr": 1}]}, {"state": [], "param_groups": []}):
        assert optimizer_names.by_name(odd, optimizer, {"table": table}) is odd
        assert optimizer_names.by_index(odd, optimizer, {"table": table}) is odd
    extra = optimizer.state_dict()
    extra["state"]["global"] = {"count": 3}
    assert optimizer_names.by_name(extra, optimizer, {"table": table}) is extra


def test_names_given_to_the_optimizer_itself_stay_with_their_parameters() -> None:
    def make(model: nn.Module, order: int) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(model.named_parameters())[::order])

    model, other = net(), net(1)
    optimizer, again = make(model, 1), make(other, -1)
    step(model, optimizer)
    states = stored({"model": model, "optimizer": optimizer})
    give_back({"model": other, "optimizer": again}, states)
    assert again.param_groups[0]["param_names"] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert alike(again.state[other[0].weight], optimizer.state[model[0].weight])


# ---------------------------------------------------------------- what doesn't fit


def refusal(model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> str:
    before = copy.deepcopy(optimizer.state_dict())
    objects = {"model": model, "optimizer": optimizer}
    with pytest.raises(StateMismatch) as refused:
        restore("optimizer", optimizer, states["optimizer"], "e1", "start over", objects)
    assert alike(optimizer.state_dict(), before), "nothing has changed"
    return str(refused.value)


def test_other_parameters_are_named() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    states = stored({"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    text = refusal(other, torch.optim.Adam(other.parameters()), states)
    assert "1.weight: only in the script's optimizer" in text
    assert "2.bias: only in the checkpoint's optimizer" in text
    wider = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert "parameter 0.weight, exp_avg: [5, 3] in the script, [4, 3]" in refusal(
        wider, torch.optim.Adam(wider.parameters()), states
    )
    split = net()
    groups = [{"params": list(split[0].parameters())}, {"params": list(split[2].parameters())}]
    assert "same parameters in other groups" in refusal(split, torch.optim.Adam(groups), states)


def test_differences_are_seen_before_tensors_are_read() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    objects = {"model": model, "optimizer": optimizer}
    encoded = encode({name: state_of(name, each, objects) for name, each in objects.items()})
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in encoded.tensors.items()}
    outline = decode(encoded.tree, meta)
    assert differences(model, outline["model"], objects) == []
    by_index = optimizer_names.by_index(outline["optimizer"], optimizer, modules_of(objects))
    assert differences(optimizer, by_index, objects) == []
    wider = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert "0.weight: [5, 3] in the script, [4, 3] in the checkpoint" in differences(wider, outline["model"], {})


# ---------------------------------------------------------------- wrappers


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nested() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))


def wrap_inside(model: Any) -> Any:
    model[0] = torch.compile(model[0], backend="eager")
    model[1][0] = checkpoint_wrapper(torch.compile(model[1][0], backend="eager"))
    model[1] = nn.parallel.DistributedDataParallel(model[1])
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "DDP": nn.parallel.DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "parts": wrap_inside,
    "parts and all": lambda model: torch.compile(wrap_inside(model), backend="eager"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("after", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
def test_a_checkpoint_fits_with_and_without_wrappers(before: str, after: str) -> None:
    model = WRAPPERS[before](nested())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    states = stored({"model": model, "optimizer": optimizer})
    assert list(states["model"]) == list(nested().state_dict())
    assert states["optimizer"]["param_groups"][0]["params"] == [name for name, _ in nested().named_parameters()]

    from ftrun.session.tracked import unwrapped

    other = WRAPPERS[after](nested())
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    give_back({"model": unwrapped(other), "optimizer": again}, states)
    assert alike(again.state_dict(), optimizer.state_dict())
    mine, theirs = list(unwrapped(model).state_dict().values()), list(unwrapped(other).state_dict().values())
    assert alike(mine, theirs)


def test_a_part_that_is_called_like_a_wrapper_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    model.register_module("_orig", nn.Linear(1, 1))
    assert "module.weight" in state_of("model", model, {})
    restore("model", model, through_a_checkpoint(state_of("model", model, {})), "e1", "start over")


def test_models_that_make_their_own_state_are_left_to_it() -> None:
    class Own(nn.Linear):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {"mine": self.weight.detach()}

        def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
            self.weight.data.copy_(state["mine"])

    model, other = Own(2, 2), Own(2, 2)
    restore("model", other, through_a_checkpoint(state_of("model", model, {})), "e1", "start over")
    assert torch.equal(model.weight, other.weight)


def test_an_object_that_returns_no_state_is_refused() -> None:
    class Nothing:
        def state_dict(self) -> None:
            return None

        def load_state_dict(self, state: Any) -> None:
            pass

    with pytest.raises(UsageError, match=r"ft\.track\(it=\.\.\.\): Nothing\.state_dict\(\) returned None"):
        state_of("it", Nothing(), {})
