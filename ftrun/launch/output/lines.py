"""What a console shows of a stream of bytes: as they come, in whole lines, or in lines with a prefix. No effects."""

from __future__ import annotations

import codecs
import io
from typing import Protocol

_LONGEST = 64 * 1024
"""A line longer than this is shown in pieces."""


class View(Protocol):
    """Takes bytes as a worker writes them, gives what can be shown."""

    @property
    def pending(self) -> bool:
        """Something is held back until its line is complete."""

    def feed(self, data: bytes) -> bytes:
        """New bytes have come."""

    def flush(self, *, final: bool = False) -> bytes:
        """Show what is held back: nothing has come for a while, or (``final``) nothing more will."""

    def matches(self) -> bytes:
        """What goes into the file of filtered lines."""


class AsWritten:
    """Bytes as they come, for the only rank that is shown: progress bars and prompts are there at once."""

    pending = False

    def feed(self, data: bytes) -> bytes:
        """All of it."""
        return data

    def flush(self, *, final: bool = False) -> bytes:
        """Nothing is ever held back."""
        return b""

    def matches(self) -> bytes:
        """Only torch's lines are filtered."""
        return b""


class WholeLines:
    """Up to the last line break or carriage return, so that ranks don't mix within a line."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def pending(self) -> bool:
        """A line has begun and not ended."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete."""
        data = self._held + data
        # A carriage return at the very end may be half of a line break.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, max(0, len(data) - 1))) + 1
        if len(data) - end > _LONGEST:
            end = len(data)
        self._held = data[end:]
        return data[:end]

    def flush(self, *, final: bool = False) -> bytes:
        """The line that has begun."""
        held, self._held = self._held, b""
        return held

    def matches(self) -> bytes:
        """Only torch's lines are filtered."""
        return b""


class Prefixed:
    """Lines as torch's ``--tee`` shows them: a prefix each, any kind of line break made one, torn characters marked.

    A line that is shown in pieces has its prefix once.

    Args:
        prefix: precedes each line.
        filters: :meth:`matches` gives the lines that hold one of these.
    """

    def __init__(self, prefix: str, filters: tuple[str, ...] = ()) -> None:
        self._prefix = prefix
        self._filters = filters
        self._decoder = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder("utf-8")(errors="replace"), translate=True
        )
        self._held = ""
        self._begun = False
        self._before = ""
        self._matching: list[str] = []

    @property
    def pending(self) -> bool:
        """A line has begun and not ended."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete."""
        return self._take(self._decode(data))

    def _take(self, text: str) -> bytes:
        *complete, self._held = (self._held + text).split("\n")
        show = _encode("".join([self._complete(f"{line}\n") for line in complete]))
        return show + self.flush() if len(self._held) > _LONGEST else show

    def _complete(self, line: str) -> str:
        self._match(line)
        begun, self._begun = self._begun, False
        return line if begun else f"{self._prefix}{line}"

    def _match(self, line: str) -> None:
        if self._filters:
            whole, self._before = self._before + line, ""
            if any(needle in whole for needle in self._filters):
                self._matching.append(f"{self._prefix}{whole}")

    def flush(self, *, final: bool = False) -> bytes:
        """The line that has begun, with its prefix if it has none yet."""
        show = self._take(self._decode(b"", final=True)) if final else b""
        held, self._held = self._held, ""
        if held:
            show += _encode(held if self._begun else f"{self._prefix}{held}")
            self._begun = True
            self._before = (self._before + held)[-_LONGEST:] if self._filters else ""
        if final and self._before:
            self._match("")
        return show

    def matches(self) -> bytes:
        """Lines since the last call that hold one of the filters, with their prefix."""
        found, self._matching = self._matching, []
        return _encode("".join(found))

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        return str(self._decoder.decode(data, final))


def _encode(text: str) -> bytes:
    return text.encode(errors="replace")
