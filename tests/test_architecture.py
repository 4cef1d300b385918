"""Which way imports go, what may not be imported at all, and what every public thing owes its user."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ftrun
from ftrun import errors, events

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(ftrun.__file__).parent
LOADER = "ftrun.__main__"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imports(name: str, *, types_too: bool = False) -> frozenset[str]:
    """What a module imports anywhere in it; what only a type checker sees, on request."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types_too:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in MODULES or not base.startswith("ftrun") else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(name))
    return frozenset(found)


def room(name: str) -> str:
    """The package of ftrun that a module lives in; ``top`` for what lies directly in ftrun."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and MODULES[name].name == "__init__.py") else "top"


# Which rooms a room may import, itself and the top level aside.
MAY_IMPORT = {
    "cli": {"config", "launch", "goodput", "health", "checkpoint", "data"},
    "launch": {"config", "goodput", "health", "checkpoint", "data", "rendezvous"},
    "health": {"config"},
    "rendezvous": set(),
    "goodput": {"config"},
    "config": set(),
    "session": {"checkpoint", "data"},
    "checkpoint": set(),
    "data": set(),
    "top": set(),
}


def each_module(check: Callable[[str], None]) -> Callable[[str], None]:
    """One test for each room, which looks at all of its modules: thousands of tests cost more than what they do."""

    @pytest.mark.parametrize("where", MAY_IMPORT)
    def test(where: str) -> None:
        for name in MODULES:
            if room(name) == where:
                check(name)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


# The package's front door hands out names of other rooms, and the program starts the command line.
DOORS = {"ftrun": {"session", "data", "checkpoint"}, "ftrun.dcp": {"checkpoint"}, "ftrun.__main__": {"cli", "launch"}}


@each_module
def test_imports_go_one_way(name: str) -> None:
    mine = room(name)
    allowed = MAY_IMPORT[mine] | {mine, "top"} | DOORS.get(name, set())
    for imported in imports(name, types_too=True):
        if imported.split(".")[0] == "ftrun":
            assert imported in MODULES, f"{name} imports {imported}, which is no module"
            assert room(imported) in allowed, f"{name} ({mine}) imports {imported} ({room(imported)})"


def test_the_scan_sees_imports() -> None:
    assert {room(name) for name in MODULES} == set(MAY_IMPORT)
    assert "ftrun.checkpoint.reader" in imports("ftrun.launch.plan")
    assert "ftrun.launch.execute" in imports("ftrun.cli.run")  # within a function
    assert "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent" in imports(
        "ftrun.launch.agent"
    )
    assert "ftrun.contract" not in imports("ftrun.inject")
    assert "ftrun.contract" in imports("ftrun.inject", types_too=True)


def test_goodput_needs_units_and_nothing_else_of_the_configuration() -> None:
    for name in MODULES:
        if room(name) == "goodput":
            used = {each for each in imports(name, types_too=True) if each.startswith("ftrun.config")}
            assert used <= {"ftrun.config.units"}, name


@each_module
def test_only_the_launcher_knows_torchs_elastic(name: str) -> None:
    elastic = {
        each
        for each in imports(name, types_too=True)
        if each.startswith(("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run"))
    }
    assert not elastic or room(name) in ("launch", "rendezvous"), name


@each_module
def test_nothing_is_pickled(name: str) -> None:
    for imported in imports(name, types_too=True):
        assert imported.split(".")[0] not in (
            "pickle",
            "cPickle",
            "_pickle",
            "dill",
            "cloudpickle",
            "shelve",
            "marshal",
        )
    called = {ast.unparse(node.func) for node in ast.walk(parsed(name)) if isinstance(node, ast.Call)}
    # Formats of others, made on request; nothing of theirs is ever read back that way.
    writers = {"ftrun.checkpoint.export_formats", "ftrun.checkpoint.dcp.found"}
    assert not called & ({"torch.load", "eval"} | (set() if name in writers else {"torch.save"}))
    assert not {each for each in called if each.endswith((".all_gather_object", ".broadcast_object_list"))}


@each_module
def test_modules_have_no_effect_when_they_are_imported(name: str) -> None:
    """Nothing but definitions, imports and constants at the top level, and no module-level mutable state."""
    for node in parsed(name).body:
        if isinstance(node, ast.Expr):
            value = node.value
            # A docstring, or (in the command line) the one call that registers the commands.
            assert isinstance(value, ast.Constant) or ast.unparse(value) == "main_commands()", ast.unparse(node)
        assert not isinstance(node, ast.For | ast.While | ast.With | ast.Global | ast.Delete | ast.AugAssign)
    writes = [
        ast.unparse(node)
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Assign) and any(ast.unparse(each).startswith("os.environ[") for each in node.targets)
    ]
    assert not writes or room(name) == "launch"


@each_module
def test_every_module_says_what_it_is(name: str) -> None:
    tree = parsed(name)
    assert ast.get_docstring(tree), name
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert futures or len(tree.body) <= 1, name


# --- torch stays out until it is needed

WITHOUT_TORCH = sorted(
    {
        "ftrun",
        "ftrun.cli.app",
        "ftrun.checkpoint",
        "ftrun.checkpoint.reader",
        "ftrun.checkpoint.epochs",
        "ftrun.checkpoint.manifest",
        "ftrun.checkpoint.layout",
        "ftrun.checkpoint.interval",
        "ftrun.checkpoint.records",
        "ftrun.checkpoint.resuming",
        "ftrun.checkpoint.safetensors_file",
        "ftrun.checkpoint.verify",
        "ftrun.checkpoint.loading.sealed",
        "ftrun.checkpoint.memory.outcomes",
        "ftrun.checkpoint.memory.tier",
        *(f"ftrun.checkpoint.plan.{name}" for name in ("pieces", "sharding", "ownership", "layout")),
        *(name for name in MODULES if name.startswith(("ftrun.checkpoint.keeper.", "ftrun.checkpoint.storage."))),
        "ftrun.launch.keeping",
        "ftrun.session.bootstrap",
        "ftrun.launch.options",
        "ftrun.launch.plan",
        "ftrun.launch.policy",
        "ftrun.launch.remembering",
        "ftrun.launch.failures.failure",
        *(name for name in MODULES if room(name) in ("config", "goodput", "health", "cli", "top") and name != LOADER),
    }
)


def test_torch_is_imported_when_it_is_needed() -> None:
    text = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "import ftrun\n"
        "assert ftrun.UsageError and ftrun.on and dir(ftrun)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_front_door_imports_nothing_of_ours() -> None:
    text = "import sys, ftrun; print(*[name for name in sys.modules if name.startswith('ftrun')])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["ftrun"]


# --- what is public


@pytest.mark.parametrize("name", ftrun.__all__)
def test_public_names_are_there_and_documented(name: str) -> None:
    value = getattr(ftrun, name)
    assert value is getattr(ftrun, name)
    if name == "__version__":
        return
    assert (inspect.getdoc(value) or "").strip(), name
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            assert (inspect.getdoc(member) or "").strip(), f"{name}.{attribute}"


def test_public_names_stay_near_a_dozen() -> None:
    assert len(ftrun.__all__) == len(set(ftrun.__all__)) <= 14
    assert dir(ftrun) == sorted(ftrun.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = ftrun.nope


def test_every_error_is_ours_and_drawn_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    kinds = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
    for kind in kinds:
        assert issubclass(kind, errors.FtrunError)
        assert kind.__name__ in tree
        assert kind.__doc__


def test_every_event_is_known_by_its_kind() -> None:
    def below(kind: type[events.Event]) -> set[type[events.Event]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    for module in pkgutil.walk_packages([str(ROOT)], "ftrun."):
        if module.name in imports_events() and module.name != LOADER:
            importlib.import_module(module.name)
    kinds = {kind for kind in below(events.Event) - {events.Event} if kind.__module__.startswith("ftrun")}
    assert kinds == set(events.KINDS.values())
    for name, kind in events.KINDS.items():
        assert kind.kind == name
        assert name == "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
        assert kind.__doc__
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def imports_events() -> set[str]:
    return {name for name in MODULES if "ftrun.events" in imports(name, types_too=True)}
