"""Running the user's script as ``python -u script`` would: same ``__main__``, arguments, path and tracebacks."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
import zipimport


def run_script(path: str, args: list[str]) -> None:
    """Run a file, or an application in a directory or an archive, as ``__main__``.

    ``runpy.run_path`` would do most of this, but takes the module away again before threads and exit handlers of
    the script are done with it, and leaves its own frames in every traceback.

    Raises:
        SystemExit: the file can't be read; anything that the script raises.
    """
    # Joined and not tidied up: `..` after a symbolic link is not where its text says.
    absolute = os.path.join(os.getcwd(), path)
    sys.argv[:] = [path, *args]
    module = fresh_main()
    if is_archive(absolute):
        _search_first(absolute, always=True)
        _run_as_main("__main__", alter_argv=False)
        return
    _search_first(os.path.dirname(os.path.realpath(path)))
    module.__file__ = absolute
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", absolute)
    try:
        with io.open_code(absolute) as file:
            text = file.read()
    except OSError as error:
        sys.exit(f"{sys.executable}: can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}")
    code = compile(text, absolute, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - running the script is the purpose


def run_module(name: str, args: list[str]) -> None:
    """Run a module as ``python -m name`` does; ``sys.path[0]`` is the working directory.

    Raises:
        SystemExit: there is no such module; anything that the module raises.
    """
    sys.argv[:] = ["-m", *args]
    _search_first(os.getcwd())
    fresh_main()
    _run_as_main(name)


def run_path(path: str, args: list[str]) -> None:
    """Run a file as ``torchrun --run-path`` does, by ``runpy.run_path``; ``sys.path`` stays as it is.

    Raises:
        Anything that the script raises.
    """
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")


def _run_as_main(name: str, alter_argv: bool = True) -> None:
    # Private, and what `python -m` itself calls: __spec__, __package__ and argv[0] come out the same.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def fresh_main() -> types.ModuleType:
    """Put a new, empty ``__main__`` in place of the bootstrap's."""
    module = types.ModuleType("__main__")
    names = vars(module)
    names.update(__builtins__=builtins, __spec__=None, __package__=None, __cached__=None)
    if "__annotations__" in vars(sys.modules["__main__"]):
        names["__annotations__"] = {}
    sys.modules["__main__"] = module
    return module


def is_archive(path: str) -> bool:
    """Whether a script is a directory or an archive with a ``__main__`` in it."""
    if os.path.isdir(path):
        return True
    try:
        zipimport.zipimporter(path)
    except ImportError:
        return False
    return True


def _search_first(place: str, *, always: bool = False) -> None:
    """Put a place where the bootstrap's own is in ``sys.path``; with ``python -P`` there is none."""
    if not sys.flags.safe_path:
        sys.path[0] = place
    elif always:
        sys.path.insert(0, place)


def without_own_frames(error: BaseException) -> types.TracebackType | None:
    """The traceback of an error from where the user's code begins; for ``-m``, from where Python's own does."""
    trace = error.__traceback__
    own = os.path.dirname(os.path.abspath(__file__))
    while trace is not None and _home(trace) == own:
        trace = trace.tb_next
    return trace


def _home(trace: types.TracebackType) -> str:
    return os.path.dirname(os.path.abspath(trace.tb_frame.f_code.co_filename))
