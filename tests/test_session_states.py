"""States that are taken again and again are what they would be if nothing was remembered, whatever has changed."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ftrun.session.states import States
from ftrun.session.tracked import state_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Scene:
    """Two models and an optimizer of the first, tracked after a few steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        self.other = nn.Linear(2, 2)
        groups = [{"params": [*self.net[0].parameters()]}, {"params": [*self.net[2].parameters()], "lr": 0.5}]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "net": self.net, "other": self.other}

    def step(self) -> None:
        self.net(torch.ones(5, 3) * torch.arange(5.0)[:, None]).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def add_group(scene: Scene) -> None:
    scene.optimizer.add_param_group({"params": [*scene.net[3].parameters()], "lr": 0.7})


def add_group_of_another_model(scene: Scene) -> None:
    scene.optimizer.add_param_group({"params": [*scene.other.parameters()]})


def another_parameter(scene: Scene) -> None:
    scene.net[0].weight = nn.Parameter(torch.zeros(4, 3))
    old = scene.optimizer.param_groups[0]["params"][0]
    scene.optimizer.param_groups[0]["params"][0] = scene.net[0].weight
    scene.optimizer.state[scene.net[0].weight] = scene.optimizer.state.pop(old)


def parameter_that_the_optimizer_does_not_follow(scene: Scene) -> None:
    scene.net[0].weight = nn.Parameter(torch.zeros(4, 3))


def exchange_parameters(scene: Scene) -> None:
    scene.net[2].weight, scene.net[3].weight = scene.net[3].weight, scene.net[2].weight


def rename(scene: Scene) -> None:
    scene.net.add_module("last", scene.net._modules.pop("2"))


def rename_in_place(scene: Scene) -> None:
    parts = dict(scene.net._modules)
    scene.net._modules.clear()
    scene.net._modules.update({"two" if name == "2" else name: part for name, part in parts.items()})


def an_earlier_name(scene: Scene) -> None:
    """The optimizer's parameter has one more name, which comes first, and the number of names is the same."""
    scene.net[0], scene.net[3] = nn.Linear(4, 4, bias=False), nn.Linear(3, 4)
    scene.net[0].weight = scene.net[2].weight


def exchange_groups(scene: Scene) -> None:
    scene.optimizer.param_groups.reverse()


def move_to_another_group(scene: Scene) -> None:
    first, second = (group["params"] for group in scene.optimizer.param_groups)
    second.append(first.pop())


def another_order(scene: Scene) -> None:
    scene.optimizer.param_groups[0]["params"].reverse()


def state_in_another_order(scene: Scene) -> None:
    first = next(iter(scene.optimizer.state))
    scene.optimizer.state[first] = scene.optimizer.state.pop(first)


def state_by_a_text(scene: Scene) -> None:
    scene.optimizer.state["note"] = {"a": 1}  # type: ignore[index]


def hook(scene: Scene) -> None:
    scene.optimizer.register_state_dict_post_hook(lambda _optimizer, state: {**state, "more": 1})


def own_method(scene: Scene) -> None:
    scene.optimizer.state_dict = lambda: {"all": "mine"}  # type: ignore[method-assign]


def wrap(scene: Scene) -> None:
    class Odd(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "odd": True}

    scene.optimizer.__class__ = Odd


def another_optimizer(scene: Scene) -> None:
    scene.optimizer = torch.optim.SGD(
        [{"params": group["params"]} for group in scene.optimizer.param_groups], momentum=0.9
    )
    scene.step()


def model_with_a_state_of_its_own(scene: Scene) -> None:
    class Odd(nn.Sequential):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {f"odd.{name}": each for name, each in super().state_dict(*args, **kwargs).items()}

    scene.net.__class__ = Odd


def wrap_a_part(scene: Scene) -> None:
    scene.net[2] = checkpoint_wrapper(scene.net[2])


def untrack_the_model(scene: Scene) -> None:
    scene.net = nn.Linear(1, 1)  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Scene], object]] = {
    "nothing": lambda scene: None,
    "a step": Scene.step,
    "rate": lambda scene: scene.optimizer.param_groups[0].update(lr=0.3),
    "a new option": lambda scene: scene.optimizer.param_groups[1].update(initial_lr=0.3),
    "an option less": lambda scene: scene.optimizer.param_groups[1].pop("eps"),
    "no state": lambda scene: scene.optimizer.state.clear(),
    "one state less": lambda scene: scene.optimizer.state.pop(scene.net[0].weight),
    "another state": lambda scene: scene.optimizer.state[scene.net[0].bias].update(exp_avg=torch.ones(4)),
    "loaded": lambda scene: scene.optimizer.load_state_dict(scene.optimizer.state_dict()),
    "a group more": add_group,
    "a group of another model": add_group_of_another_model,
    "another parameter": another_parameter,
    "a parameter that the optimizer doesn't follow": parameter_that_the_optimizer_does_not_follow,
    "exchanged parameters": exchange_parameters,
    "another name": rename,
    "another name in the same place": rename_in_place,
    "an earlier name": an_earlier_name,
    "exchanged groups": exchange_groups,
    "moved to another group": move_to_another_group,
    "another order": another_order,
    "states in another order": state_in_another_order,
    "a state by a text": state_by_a_text,
    "a hook": hook,
    "a method of its own": own_method,
    "another class": wrap,
    "another optimizer": another_optimizer,
    "a model with a state of its own": model_with_a_state_of_its_own,
    "a part is wrapped": wrap_a_part,
    "the model is not tracked any more": untrack_the_model,
}


def the_same(one: Any, other: Any) -> bool:
    """Equal in types, order and objects."""
    if isinstance(one, torch.Tensor):
        return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(the_same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(the_same, one, other))
    return bool(one == other)


def check(states: States, objects: dict[str, Any]) -> None:
    wanted = {name: state_of(name, each, objects) for name, each in objects.items()}
    assert the_same(states.of(objects), wanted)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes(change: str) -> None:
    scene, states = Scene(), States()
    check(states, scene.objects)
    check(states, scene.objects)
    CHANGES[change](scene)
    check(states, scene.objects)
    check(states, scene.objects)
    scene.net.train()
    check(states, scene.objects)


def without_two_weights(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name in ("2.weight", "3.weight"):
        state.pop(name, None)


def test_parameters_that_a_model_leaves_out_of_its_state_keep_no_old_name() -> None:
    scene, states = Scene(), States()
    scene.net.register_state_dict_post_hook(without_two_weights)
    check(states, scene.objects)
    check(states, scene.objects)
    exchange_parameters(scene)
    check(states, scene.objects)


@pytest.mark.parametrize("several", [False, True])
def test_names_are_worked_out_once(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, states = Scene(), States()
    if several:
        add_group_of_another_model(scene)
    check(states, scene.objects)
    wanted = states.of(scene.objects)
    monkeypatch.setattr("ftrun.session.optimizer_names.names_of", None)
    scene.step()
    scene.optimizer.param_groups[0]["lr"] = 0.25
    found = states.of(scene.objects)
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert [*found["optimizer"]["state"]] == [*wanted["optimizer"]["state"]]
    assert "net.0.weight" in found["optimizer"]["state"] if several else "0.weight" in found["optimizer"]["state"]


def test_nothing_is_kept_alive() -> None:
    scene, states = Scene(), States()
    states.of(scene.objects)
    states.of(scene.objects)
    gone = [weakref.ref(each) for each in (scene.net[0].weight, scene.optimizer.state[scene.net[0].weight]["exp_avg"])]
    del scene
    gc.collect()
    assert [each() for each in gone] == [None, None]
