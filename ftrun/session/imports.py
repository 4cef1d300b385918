"""Which modules a process has imported from libraries, and importing them ahead of a script.

Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Mapping

FILE = "imports.json"
_SITES = ("site-packages", "dist-packages")

Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and size: what tells one version of a file from another."""


class Order:
    """Sits in ``sys.meta_path`` and finds nothing: it sees in which order imports begin.

    ``sys.modules`` knows only in which order they ended. A library that sets a variable and then imports another one
    must come first when they are imported again.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Note a name."""
        self.names.append(name)


def note(directory: Path) -> None:
    """Write the names of the library modules that are imported by now, for a standby. Once; local rank 0 only.

    Called at the first step. Never raises: what it is for only saves time.
    """
    target = directory / FILE
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if os.environ.get("LOCAL_RANK", "0") != "0" or target.exists():
            return
        order = next((each for each in sys.meta_path if isinstance(each, Order)), None)
        if order is None:  # no bootstrap, so no launcher
            return
        sys.meta_path.remove(order)
        begun = {name: sys.modules[name] for name in order.names if name in sys.modules}
        temporary = target.with_name(f".{FILE}.{os.getpid()}")
        temporary.write_text(json.dumps(libraries(begun)))
        temporary.replace(target)


def libraries(modules: Mapping[str, types.ModuleType]) -> list[str]:
    """Names of modules that lie in the standard library, in site-packages or in ftrun, in the order given.

    The script's own directory and package are left out, wherever they lie: their import may have effects.
    """
    main = sys.modules.get("__main__")
    own_place = os.path.dirname(os.path.realpath(getattr(main, "__file__", None) or "/"))
    own_package = (getattr(getattr(main, "__spec__", None), "name", None) or "").partition(".")[0]
    places = _places(sys.path)
    return [
        name
        for name, module in modules.items()
        if name.partition(".")[0] not in (own_package, "__main__", "__mp_main__")
        and name != "ftrun.session.bootstrap"
        and (file := _file(name, module)) is not None
        and is_library(file, places, own_place)
    ]


def _file(name: str, module: object) -> str | None:
    """Where a module was loaded from; None unless it is a plain one that its name imports again."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    plain = getattr(spec, "name", None) == name and isinstance(origin, str) and os.path.isabs(origin)
    return origin if plain else None


def _places(path: Iterable[str]) -> list[str]:
    ours = str(Path(__file__).resolve().parents[1])
    return [os.path.dirname(os.__file__), ours, *(each for each in path if os.path.basename(each) in _SITES)]


def is_library(file: str, places: Iterable[str], own_place: str) -> bool:
    """Whether a file lies in a library's place, and not in the script's own; the one closer to it counts."""
    library = max((len(place) for place in places if file.startswith(place + os.sep)), default=0)
    own = len(own_place) if own_place != "/" and file.startswith(own_place + os.sep) else 0
    return library > own


def bring_in(name: str) -> str | None:
    """Import a module whose failure is nobody's concern: the script meets it itself, if it imports it.

    Returns:
        None, or why this process can't be used any more.
    """
    before = set(sys.modules)
    try:
        importlib.import_module(name)
    except BaseException:  # whatever a library raises, SystemExit included, it is the script's to see
        return _drop_orphans(before)
    return None


def _drop_orphans(before: set[str]) -> str | None:
    """Take out modules whose package failed after it had imported them: the next try must import them again."""
    orphans = [name for name in sys.modules if name not in before and _has_lost_its_package(name)]
    for name in orphans:
        origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
        if origin.endswith(tuple(EXTENSION_SUFFIXES)):
            return f"a failed import left the extension {name}"  # which can't be loaded a second time
        del sys.modules[name]
    return None


def _has_lost_its_package(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return bool(parent) and (parent not in sys.modules or _has_lost_its_package(parent))


class Stamps:
    """The files of all imported modules as they were when they were imported."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp | None] = {}

    def take(self) -> None:
        """Note the files of modules that have come since the last time."""
        for module in list(sys.modules.values()):
            file = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(file, str) and os.path.isabs(file) and file not in self._stamps:
                self._stamps[file] = _stamp(file)

    def changed(self) -> str | None:
        """A file that isn't what it was, if there is one."""
        for file, stamp in self._stamps.items():  # thousands of them, and a restart waits for it
            try:
                found = os.stat(file)
            except OSError:
                if stamp is not None:
                    return file
            else:
                if (found.st_mtime_ns, found.st_size) != stamp:
                    return file
        return None


def _stamp(file: str) -> Stamp | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
