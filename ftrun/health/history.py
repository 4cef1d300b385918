"""What is kept of each node: entries in the order in which they were written. Frozen data, and its JSON.

Where a node stands is a fold over its entries (:mod:`ftrun.health.standing`); nothing else is stored. Times are seconds
since 1970 by the clock of whoever wrote the entry: they tell how long ago it was, and never the order.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ftrun.health.marks import Mark, Sign

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA_VERSION = 1

_MOST_ENTRIES = 200
_LONGEST_TEXT = 500


class By(enum.StrEnum):
    """Who decided."""

    POLICY = "policy"
    USER = "user"
    CHECK = "check"


@dataclass(frozen=True)
class Marked:
    """Something happened on the node that counts against it."""

    what: ClassVar[str] = "failed"
    at: float
    sign: Sign
    evidence: str
    attempt: int = 0
    rank: int | None = None
    fingerprint: str = ""

    @classmethod
    def of(cls, mark: Mark, at: float) -> Marked:
        """A mark as an entry."""
        return cls(at, mark.sign, mark.evidence[:_LONGEST_TEXT], mark.attempt, mark.rank, mark.fingerprint)


@dataclass(frozen=True)
class Excluded:
    """The node is left out from now on, for so many seconds; None until somebody admits it."""

    what: ClassVar[str] = "excluded"
    at: float
    by: By
    reason: str
    seconds: float | None = None
    sign: Sign | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Admitted:
    """The node may take part again: a user says so, a check was passed, or the policy was wrong."""

    what: ClassVar[str] = "admitted"
    at: float
    by: By
    reason: str


@dataclass(frozen=True)
class Withheld:
    """The policy would have excluded the node, and too many would have been left out."""

    what: ClassVar[str] = "withheld"
    at: float
    reason: str
    sign: Sign


Entry = Marked | Excluded | Admitted | Withheld


@dataclass(frozen=True)
class Host:
    """One node.

    Attributes:
        first_seen: when it first took part, 0.0 if it never did.
        last_seen: when it was last known to; written anew every few minutes at most.
        entries: what happened to it.
    """

    first_seen: float = 0.0
    last_seen: float = 0.0
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Book:
    """All nodes of a run, by host name."""

    hosts: Mapping[str, Host] = field(default_factory=lambda: MappingProxyType({}))

    def add(self, name: str, *entries: Entry) -> Book:
        """The book with more entries of a node. Very old ones make room."""
        host = self.hosts.get(name, Host())
        return self._put(name, replace(host, entries=(*host.entries, *entries)[-_MOST_ENTRIES:]))

    def saw(self, names: Iterable[str], now: float) -> Book:
        """The book after nodes have been seen."""
        book = self
        for name in sorted(names):
            host = book.hosts.get(name, Host())
            book = book._put(name, replace(host, first_seen=host.first_seen or now, last_seen=now))
        return book

    def _put(self, name: str, host: Host) -> Book:
        return Book(MappingProxyType({**self.hosts, name: host}))

    def without(self, names: Iterable[str]) -> Book:
        """The book without some nodes."""
        dropped = set(names)
        return Book(MappingProxyType({name: host for name, host in self.hosts.items() if name not in dropped}))


def to_json(book: Book) -> dict[str, Any]:
    """The document of ``nodes.json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hosts": {
            name: {
                "first_seen": host.first_seen,
                "last_seen": host.last_seen,
                "history": [{"what": entry.what} | dataclasses.asdict(entry) for entry in host.entries],
            }
            for name, host in sorted(book.hosts.items())
        },
    }


def from_json(document: Any) -> Book:
    """Read what :func:`to_json` made.

    Raises:
        ValueError: it is something else.
    """
    try:
        hosts = {str(name): _host(each) for name, each in document["hosts"].items()}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no record of nodes ({type(error).__name__}: {error})") from error
    return Book(MappingProxyType(hosts))


def _host(document: Any) -> Host:
    entries = tuple(_entry(each) for each in document["history"])
    return Host(float(document["first_seen"]), float(document["last_seen"]), entries)


def _entry(document: Any) -> Entry:
    kinds: dict[str, type[Entry]] = {each.what: each for each in (Marked, Excluded, Admitted, Withheld)}
    kind = kinds[document["what"]]
    return kind(**{each.name: _value(each.name, document.get(each.name, each.default)) for each in _fields(kind)})


def _fields(kind: type[Entry]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _value(name: str, value: Any) -> Any:
    if value is dataclasses.MISSING:
        raise ValueError(f"an entry lacks its {name!r}")
    if name in ("at", "seconds", "attempt", "rank"):
        if isinstance(value, bool) or not isinstance(value, int | float | None) or (name == "at" and value is None):
            raise ValueError(f"{name} is {value!r}")
        return float(value) if name in ("at", "seconds") and value is not None else value
    if name == "sign":
        return None if value is None else Sign(value)
    return By(value) if name == "by" else str(value)
