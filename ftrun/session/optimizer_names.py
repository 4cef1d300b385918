"""Optimizer states by the names of parameters, so that they fit a model that is built in another order or sharding.

torch numbers parameters in the order in which an optimizer got them. Stored are their names instead::

    {"state": {"blocks.0.weight": {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": ["blocks.0.weight", ...]}]}

torch's own ``get_optimizer_state_dict`` is not used: for an optimizer that hasn't stepped yet it makes a step of its
own with a learning rate of zero, which changes states that count steps, runs hooks, and draws random numbers.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from ftrun.session.module_names import parameter_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


def names_of(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> list[list[str]] | None:
    """Names of an optimizer's parameters, group by group; None where one is in no tracked module.

    Those of one module have the names that they have in it. Where an optimizer has parameters of several, the name
    under which the module is tracked comes first.

    Args:
        optimizer: the optimizer.
        modules: tracked modules, without wrappers, by the names under which they are tracked.
    """
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    wanted = set(itertools.chain.from_iterable(groups))
    several: dict[int, str] = {}
    for tracked, module in modules.items():
        names = parameter_names(module)
        if wanted <= names.keys():
            return [[names[each] for each in group] for group in groups]
        several = {each: f"{tracked}.{name}" for each, name in names.items()} | several
    if wanted <= several.keys():
        return [[several[each] for each in group] for group in groups]
    return None


def by_name(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` with names for numbers, as it is where names can't be had. Copies no tensor.

    Args:
        state: what ``optimizer.state_dict()`` returned.
        optimizer: the optimizer.
        modules: tracked modules, without wrappers, by the names under which they are tracked.
    """
    return _renamed(state, names_of(optimizer, modules))


def _renamed(state: dict[str, Any], names: list[list[str]] | None) -> dict[str, Any]:
    numbers = _params(state)
    if names is None or numbers is None or [*map(len, names)] != [*map(len, numbers)]:
        return state
    name_of = dict(zip(itertools.chain(*numbers), itertools.chain(*names), strict=True))
    if len(name_of) != len(set(name_of.values())) or not state["state"].keys() <= name_of.keys():
        return state
    return {
        **state,
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": _with_params(state["param_groups"], names),
    }


class Held:
    """What the tracked modules hold at one moment.

    Args:
        modules: tracked modules, without wrappers, by the names under which they are tracked.
        states: of those modules, with the tensors themselves, parameters included.

    Attributes:
        modules: the modules.
        places: their names and the identities of what is there, in order; None where a module makes its own state.
    """

    def __init__(self, modules: Mapping[str, nn.Module], states: Mapping[str, Any]) -> None:
        self.modules = modules
        self._states = dict(states)
        stock = all(type(each).state_dict is torch.nn.Module.state_dict for each in modules.values())
        self.places: list[Any] | None = None
        if stock and all(isinstance(each, dict) for each in self._states.values()):
            self.places = [(name, [*each], [*map(id, each.values())]) for name, each in self._states.items()]

    def has(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> bool:
        """Whether each parameter is what has its name, in one module or in all of them together."""
        together = {
            f"{tracked}.{name}": each for tracked, state in self._states.items() for name, each in state.items()
        }
        for state in (*self._states.values(), together):
            if all(state.get(name) is each for name, each in zip(names, parameters, strict=True)):
                return True
        return False


class Names:
    """The state of one optimizer with names for numbers, save after save. Training thread only.

    Names are those of the save before where the same objects, told by their identities, are in the same places of the
    modules and of the optimizer. All of them live while they are looked at, and names depend on nothing but which place
    holds the same object as which other: so it does no harm that identities are given to others later.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._names: list[list[str]] = []
        self._keys: list[int] = []
        self._ordered: list[str] = []

    def state(self, optimizer: torch.optim.Optimizer, held: Held) -> dict[str, Any]:
        """What :func:`by_name` makes of its ``state_dict()``.

        Args:
            optimizer: the optimizer, the same each time.
            held: by the tracked modules.
        """
        groups = [[*map(id, group["params"])] for group in optimizer.param_groups]
        key = (groups, held.places)
        if self._key is not None and key == self._key and _is_stock(optimizer):
            known = self._again(optimizer)
            if known is not None:
                return known
        return self._anew(optimizer, held, key)

    def _again(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """What ``state_dict()`` would say, at once by name; None where its state is not by parameters."""
        keys = [*map(id, optimizer.state)]
        if keys != self._keys:
            return None
        state = dict(zip(self._ordered, optimizer.state.values(), strict=True))
        return {"state": state, "param_groups": _with_params(_without_params(optimizer), self._names)}

    def _anew(self, optimizer: torch.optim.Optimizer, held: Held, key: Any) -> dict[str, Any]:
        self._key = None
        names = names_of(optimizer, held.modules)
        state = optimizer.state_dict()
        named = _renamed(state, names)
        if named is state or names is None or held.places is None or not _is_stock(optimizer):
            return named
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        flat = [*itertools.chain(*names)]
        name_of = {id(each): name for each, name in zip(parameters, flat, strict=True)}
        self._keys = [*map(id, optimizer.state)]
        self._ordered = [name_of.get(each, "") for each in self._keys]
        # That this class says the same as torch's own is seen once, for the torch that is there.
        as_known = [*named] == ["state", "param_groups"] and [*named["state"]] == self._ordered
        alike = named["param_groups"] == _with_params(_without_params(optimizer), names) if as_known else False
        if alike and held.has(flat, parameters):
            self._key, self._names = key, names
        return named


def _is_stock(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``state_dict`` is torch's own, and nobody else has a say in it."""
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    own = type(optimizer).state_dict is torch.optim.Optimizer.state_dict and "state_dict" not in vars(optimizer)
    return own and not any(getattr(optimizer, each, True) for each in hooks)


def _without_params(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def by_index(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """A stored state with numbers for names, as ``optimizer.load_state_dict()`` takes it.

    Groups and parameters are found by name, and may come in another order than when they were stored. Where the
    script's names can't be had, they are taken in the order in which they were stored. A state whose names aren't
    those of the script comes back as it is; :func:`problems` says in what they differ.

    Args:
        state: what :func:`by_name` made; tensors may be of any kind.
        optimizer: the optimizer.
        modules: tracked modules, without wrappers, by the names under which they are tracked.
    """
    stored = _params(state)
    if stored is None or not all(isinstance(name, str) for name in itertools.chain(*stored)):
        return state
    names = names_of(optimizer, modules) or stored
    order = _match(stored, names)
    if order is None or [*map(len, names)] != [len(group["params"]) for group in optimizer.param_groups]:
        return state
    number_of = {name: number for number, name in enumerate(itertools.chain(*names))}
    numbers = [[number_of[name] for name in group] for group in names]
    return {
        **state,
        "state": {number_of.get(name, name): values for name, values in state["state"].items()},
        "param_groups": _with_params([state["param_groups"][each] for each in order], numbers, optimizer),
    }


def problems(state: dict[str, Any], optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> list[str]:
    """Why a state that :func:`by_index` left as it is doesn't fit; empty where names are not the reason."""
    stored = _params(state)
    names = names_of(optimizer, modules)
    if stored is None or names is None or not all(isinstance(name, str) for name in itertools.chain(*stored)):
        return []
    mine, theirs = list(itertools.chain(*names)), list(itertools.chain(*stored))
    found = [f"{name}: only in the script's optimizer" for name in mine if name not in set(theirs)]
    found += [f"{name}: only in the checkpoint's optimizer" for name in theirs if name not in set(mine)]
    if not found and _match(stored, names) is None:
        found.append("the same parameters in other groups")
    return found


def _params(state: Any) -> list[list[Any]] | None:
    """What a state calls the parameters of each group; None for a state of another make than torch's."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        return None
    params = [group.get("params") if isinstance(group, dict) else None for group in groups]
    return params if all(isinstance(each, list) for each in params) else None  # type: ignore[return-value]


def _match(stored: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> list[int] | None:
    """For each group of the script the number of the stored one with the same parameters."""
    if len(stored) != len(names):
        return None
    free = list(range(len(stored)))
    order = []
    for group in names:
        found = next((each for each in free if set(stored[each]) == set(group)), None)
        if found is None:
            return None
        free.remove(found)
        order.append(found)
    return order


def _with_params(
    groups: Sequence[dict[str, Any]], params: Sequence[list[Any]], optimizer: torch.optim.Optimizer | None = None
) -> list[dict[str, Any]]:
    """Groups with other parameters in the place of theirs; with the names that an optimizer may have of its own."""
    changed = [{**group, "params": each} for group, each in zip(groups, params, strict=True)]
    for group, live in zip(changed, optimizer.param_groups if optimizer is not None else (), strict=False):
        if "param_names" in group and "param_names" in live:
            group["param_names"] = list(live["param_names"])
    return changed
