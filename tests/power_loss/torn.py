"""What may be left of a file whose last writes were not synced."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

SECTOR = 512
_EXHAUSTIVE = 256
"""Up to so many combinations all are made; beyond, one operation at a time is lost or torn."""


@dataclass(frozen=True)
class Change:
    """One change of a file's bytes.

    Attributes:
        offset: of the data; the new size where there is none.
        data: bytes written; None where only the size changed.
        grows_only: the size never shrinks by it.
    """

    offset: int
    data: bytes | None = None
    grows_only: bool = False


def apply(content: bytes, change: Change) -> bytes:
    """The file's bytes after a change."""
    if change.data is None:
        size = max(len(content), change.offset) if change.grows_only else change.offset
        return content[:size].ljust(size, b"\0")
    content = content.ljust(change.offset, b"\0")
    return content[: change.offset] + change.data + content[change.offset + len(change.data) :]


def outcomes(change: Change) -> tuple[tuple[Change, ...], ...]:
    """What may be left of one change: nothing, all, and one of each kind of part."""
    if not change.data:
        return ((), (change,))
    first, last = change.offset, change.offset + len(change.data)
    inner = range(first - first % SECTOR + SECTOR, last, SECTOR)
    # A write within one sector may still be cut where the filesystem is a remote one.
    cuts = sorted({inner[0], inner[-1], inner[len(inner) // 2]} if inner else {(first + last) // 2} - {first})
    size_only = Change(last, grows_only=True)
    parts: list[tuple[Change, ...]] = [(), (change,), (size_only,)]
    for cut in cuts:
        head = Change(first, change.data[: cut - first])
        parts += [(head,), (head, size_only), (Change(cut, change.data[cut - first :]),)]
    return tuple(parts)


def contents(durable: bytes, changes: tuple[Change, ...]) -> list[bytes]:
    """All contents that a crash may leave, each one once, the durable one first.

    Args:
        durable: the bytes as of the last sync.
        changes: what was done since, in order.
    """
    choices = [outcomes(change) for change in changes]
    total = 1
    for each in choices:
        total *= len(each)
    combinations = itertools.product(*choices) if total <= _EXHAUSTIVE else _one_at_a_time(choices)
    found = {durable: None}
    for combination in combinations:
        content = durable
        for change in itertools.chain.from_iterable(combination):
            content = apply(content, change)
        found[content] = None
    return list(found)


def _one_at_a_time(choices: list[tuple[tuple[Change, ...], ...]]) -> list[tuple[tuple[Change, ...], ...]]:
    """One change in each of its outcomes: everything before it is there, and after it either everything or nothing."""
    whole = tuple(each[1] for each in choices)
    nothing: tuple[tuple[Change, ...], ...] = ((),) * len(choices)
    found = [nothing, whole]
    for at, each in enumerate(choices):
        for rest in (whole, nothing):
            found += [(*whole[:at], outcome, *rest[at + 1 :]) for outcome in each]
    # The last writes may arrive before the first ones.
    found += [(*nothing[:at], *whole[at:]) for at in range(len(choices))]
    return found
