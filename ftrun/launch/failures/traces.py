"""Reading Python tracebacks, whole or torn, and finding the exception that began it all. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Raised:
    """One exception.

    Attributes:
        type: its class, as the traceback names it.
        text: what it says, further lines included.
        frames: where it came through, outermost first.
    """

    type: str
    text: str
    frames: tuple[Frame, ...] = ()

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.type.rpartition(".")[2]

    @property
    def said(self) -> str:
        """Class and text as one."""
        return f"{self.type}: {self.text}" if self.text else self.type

    @property
    def line(self) -> str:
        """Class and first line of the text."""
        return self.said.partition("\n")[0]


_PREFIX = re.compile(r"^\[rank\d+\]: ?|^\s*[|+]-?[-+ ]*(?=Traceback|[|]|File)|^\s*\| ?")
_HEADER = re.compile(r"^\s*(Original )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<text>.*))?$")
_ALONE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Timeout|Expired|Exit)): (?P<text>.*)$")
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_LOG_LINE = re.compile(
    r"^\[[WEFI]\d{3,4} |^[WEFI]\d{4} |^\[?\d{4}-\d\d-\d\d|^(Fatal Python error|Exception raised from|frame #)"
)
_MOST_LINES = 15

# Exceptions by which code asks a question; what happens while one is handled is the real trouble.
_LOOKUPS = {"KeyError", "IndexError", "AttributeError", "StopIteration", "ImportError", "ModuleNotFoundError", "Empty"}


@dataclass
class _Block:
    link: str
    frames: list[Frame] = field(default_factory=list)
    type: str = ""
    lines: list[str] = field(default_factory=list)

    def raised(self) -> Raised:
        return Raised(self.type, "\n".join(self.lines).rstrip(), tuple(self.frames))


def cause(text: str) -> Raised | None:
    """The exception that the others in a text followed from; None where the text shows none.

    Of an explicit chain (``raise ... from``) the first. Of an implicit one the first too, unless it is one by which
    code asks a question, such as KeyError. Of an error that was carried over from another process the original.
    Of several unrelated tracebacks the last, which ended the process.
    """
    found: Raised | None = None
    for block in _blocks(text):
        is_lookup = found is not None and found.name in _LOOKUPS
        if found is None or block.link in ("new", "original") or (block.link == "context" and is_lookup):
            found = block.raised()
    return found or _alone(text)


def last(text: str) -> Raised | None:
    """The exception that ended the process."""
    blocks = [block for block in _blocks(text) if block.link != "original"]
    return blocks[-1].raised() if blocks else _alone(text)


def _blocks(text: str) -> list[_Block]:
    """The tracebacks of a text, each with how it hangs together with those before it."""
    blocks: list[_Block] = []
    link, inside = "new", False
    for raw in text.split("\n"):
        line = _PREFIX.sub("", raw.rstrip("\r"))
        if header := _HEADER.match(line):
            blocks.append(_Block("original" if header[1] else link))
            link, inside = "new", True
        elif line.strip() in (_CAUSE, _CONTEXT):
            link, inside = ("cause" if line.strip() == _CAUSE else "context"), False
        elif frame := _FRAME.match(line):
            if not inside or blocks[-1].type:  # its header is cut off
                blocks.append(_Block(link))
                link, inside = "new", True
            blocks[-1].frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
        elif inside:
            inside = _continue(blocks[-1], line)
    return [block for block in blocks if block.type]


def _continue(block: _Block, line: str) -> bool:
    """Take one more line of a traceback; whether it goes on after it."""
    if block.type:
        if len(block.lines) >= _MOST_LINES or _LOG_LINE.match(line):
            return False
        block.lines.append(line)
    elif line[:1].strip() and (match := _EXCEPTION.match(line)):
        block.type, block.lines = match["type"], [match["text"] or ""]
    return True


def _alone(text: str) -> Raised | None:
    """An exception without its traceback: the last line that looks like one, with what follows it."""
    lines = [_PREFIX.sub("", line) for line in text.split("\n")]
    for index in range(len(lines) - 1, -1, -1):
        if match := _ALONE.match(lines[index]):
            return Raised(match["type"], "\n".join([match["text"], *lines[index + 1 : index + _MOST_LINES]]).rstrip())
    return None
