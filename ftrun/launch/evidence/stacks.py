"""Reading stacks: what ``faulthandler`` writes into ``stacks.txt``, and what ``py-spy dump`` prints. Pure.

``faulthandler`` lists threads newest first, so the main thread comes last, and frames innermost first. Text that is
torn, huge or no dump at all gives fewer frames or none: never an error, and never another thread's as the main one's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_FRAMES = 100
"""What ``faulthandler`` writes of one thread."""

_THREAD = re.compile(r"(?P<current>Current t|T)hread 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):$")
_FRAME = re.compile(r'  File "?(?P<file>.+?)"?, line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_CUT = "  ..."  # in place of the frames beyond the hundredth
_CRASH = "Fatal Python error: "
# Outermost frames of a main thread: of `python script` and `python -c`, and of `python -m`.
_MAIN_ENDS = (" in <module>", " in _run_module_as_main")

_SPIED_THREAD = re.compile(r'Thread \S+ \([^)]*\)(?:: "(?P<name>.*)")?$')
_SPIED_FRAME = re.compile(r"    (?P<function>\S.*?) \((?P<file>.*?)(?::(?P<line>\d+))?\)$")


@dataclass
class _Thread:
    """One thread as it is read; ``cut`` where frames beyond the hundredth are left out."""

    current: bool
    frames: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def is_main(self) -> bool:
        return self.cut or bool(self.frames and self.frames[-1].endswith(_MAIN_ENDS))


def main_thread(text: str) -> tuple[str, ...]:
    """Frames of the main thread in the last dump of the text, innermost first, as ``file:line in function``.

    Empty where that isn't there: a dump leaves the oldest out of more than a hundred threads, and may be torn.
    """
    threads = _threads(text)
    return tuple(threads[-1].frames) if threads and threads[-1].is_main else ()


def crashed_thread(text: str) -> tuple[str, ...]:
    """Frames of the thread that crashed, in the last dump that a fatal signal left; empty if there is none."""
    _, found, crash = text.rpartition(_CRASH)
    threads = _threads(crash) if found else []
    return next((tuple(each.frames) for each in threads if each.current), ())


def is_whole(end: str) -> bool:
    """Whether a growing dump, of which the end is given, has surely come to its end: nothing marks that."""
    line = end[:-1].rpartition("\n")[2] if end.endswith("\n") else ""
    return line.endswith(_MAIN_ENDS) and _FRAME.match(line) is not None


def spied(text: str) -> tuple[str, ...]:
    """Frames of the main thread as ``py-spy dump`` prints them, innermost first; empty if it printed none."""
    threads: list[tuple[str | None, list[str]]] = []
    for line in text.splitlines():
        if thread := _SPIED_THREAD.match(line):
            threads.append((thread["name"], []))
        elif threads and (frame := _SPIED_FRAME.match(line)):
            threads[-1][1].append(_named(frame))
    named = [frames for name, frames in threads if name == "MainThread"]
    nameless = [frames for name, frames in threads if name is None]
    return tuple((named or nameless or [[]])[0][:MAX_FRAMES])


def _threads(text: str) -> list[_Thread]:
    """The threads of all dumps in the text, in its order."""
    threads: list[_Thread] = []
    inside = False
    for line in text.split("\n"):
        if header := _THREAD.match(line):
            threads.append(_Thread(header["current"].startswith("C")))
            inside = True
        elif not line.startswith("  "):
            inside = False  # what follows, such as the C stack or a list of modules, belongs to no thread
        elif inside and line == _CUT:
            threads[-1].cut = True
        elif inside and (frame := _FRAME.match(line)) and len(threads[-1].frames) < MAX_FRAMES:
            threads[-1].frames.append(_named(frame))
    return threads


def _named(frame: re.Match[str]) -> str:
    where = f"{frame['file']}:{frame['line']}" if frame["line"] else frame["file"]
    return f"{where} in {frame['function']}"
