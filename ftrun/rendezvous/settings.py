"""What a handler is made from, and how torch's parameters are read."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftrun.errors import UsageError
from ftrun.rendezvous.endpoint import Endpoint, is_loopback, parse_list, resolve
from ftrun.rendezvous.member import Timing
from ftrun.rendezvous.model import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.distributed.elastic.rendezvous import RendezvousParameters

_SECONDS = {
    "last_call_timeout": 5.0,
    "join_timeout": 600.0,
    "lost_timeout": 1.2,
    "stop_timeout": 180.0,
    "stall_timeout": 60.0,
    "half_timeout": 300.0,
}
_SHORTEST_LOST = 0.5
_SHORTEST_HALF = 2.0
_SWITCHES = ("is_host", "failover", "quorum", "preflight")
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_SAME_ON_ALL = ("failover", "quorum")
"""One that goes on without asking and one that asks first would both go on."""
_OTHER_BACKENDS = {"timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt",
                   "read_timeout", "store_type", "rank"}  # fmt: skip
"""Options of torch's own backends, which mean nothing here: they do no harm in a command that was written for those."""


@dataclass(frozen=True)
class Settings:
    """What a handler is made from. Durations are seconds.

    Attributes:
        where: the endpoint; the first one of a list.
        more: the others of the list, where the run is looked for, too.
        notes: a directory shared by all nodes, in which the leader writes where it is; None where there is none.
        name: of this node, for people: its host's, and ``#2`` behind it for a second one on that host.
        run_id: the run; nodes with another one are refused.
        terms: what the leader goes by, if this node hosts it.
        local_addr: how other nodes reach this one; found out where it is None.
        is_host: whether this node hosts the rendezvous; found out where it is None.
        traits: what must be the same on all nodes, by name.
        join_timeout: how long a round may take to come about.
        timing: how patient this node is.
        report: is told in words what the leader decides, on a thread of its own; on the hosting node.
        failover: another node takes over where the host of the rendezvous is lost.
    """

    where: Endpoint
    run_id: str
    terms: Terms
    local_addr: str | None = None
    is_host: bool | None = None
    traits: dict[str, str] = field(default_factory=dict)
    join_timeout: float = 600.0
    timing: Timing = field(default_factory=Timing)
    report: Callable[[str], None] = lambda _text: None
    failover: bool = True
    more: tuple[Endpoint, ...] = ()
    notes: Path | None = None
    name: str = field(default_factory=socket.gethostname)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        return (self.where, *self.more)


def read(
    parameters: RendezvousParameters,
    traits: dict[str, str],
    report: Callable[[str], None],
    notes: Path | None = None,
    name: str = "",
) -> Settings:
    """Read torch's parameters. The others are as in :class:`Settings`.

    Raises:
        UsageError: an option that doesn't exist, or with a value that can't be.
    """
    given, switches = _understood(parameters.config)
    terms = Terms(
        parameters.min_nodes,
        parameters.max_nodes,
        last_call=given["last_call_timeout"],
        lost_after=given["lost_timeout"],
        stop_within=given["stop_timeout"],
        # Nobody takes over a run that only its first host can lead: it needs nobody's vote.
        quorum=switches["quorum"] is not False and switches["failover"] is not False,
        gather=0.25,
        # Without stores that stand by there is nothing to connect to.
        preflight=switches["preflight"] is not False and switches["failover"] is not False,
        claim_lasts=given["half_timeout"],
    )
    same = {name: str(int(switches[name] is not False)) for name in _SAME_ON_ALL}
    same["half_timeout"] = f"{terms.claim_lasts:g}"  # one half has stopped by then, and the other one goes on
    where, *more = parse_list(parameters.endpoint)
    return Settings(
        where,
        parameters.run_id,
        terms,
        local_addr=_numeric(parameters.local_addr),
        is_host=switches["is_host"],
        traits={**traits, **{f"--rdzv-conf {name}": value for name, value in same.items()}},
        join_timeout=given["join_timeout"],
        # A node that is cut off has to stop its workers before the others go on without it.
        timing=Timing(patience=0.8 * given["lost_timeout"], stall=given["stall_timeout"]),
        report=report,
        failover=switches["failover"] is not False,
        more=tuple(more),
        notes=notes,
        name=name or socket.gethostname(),
    )


def check(text: str) -> None:
    """See that the value of ``--rdzv-conf`` can be used, before anything is started.

    Raises:
        UsageError: an option that doesn't exist, or with a value that can't be.
    """
    _understood(_options(text))


def _understood(config: Mapping[str, object]) -> tuple[dict[str, float], dict[str, bool | None]]:
    """What options mean: seconds, and switches, which are None where nothing is given."""
    seconds = {name: _seconds(name, config.get(name, default)) for name, default in _SECONDS.items()}
    if unknown := set(config) - {*_SECONDS, *_SWITCHES, *_OTHER_BACKENDS}:
        known = ", ".join([*_SECONDS, *_SWITCHES])
        raise UsageError(f"--rdzv-conf {min(unknown)}: there is no such option; there are {known}.")
    lost, half = seconds["lost_timeout"], seconds["half_timeout"]
    if lost < _SHORTEST_LOST:
        raise UsageError(
            f"--rdzv-conf lost_timeout={lost:g}: nodes are heard five times a second, so give {_SHORTEST_LOST:g} or "
            "more."
        )
    if 0 < half < max(_SHORTEST_HALF, lost):
        raise UsageError(
            f"--rdzv-conf half_timeout={half:g}: so soon the half of the nodes that goes on can't tell that it may no "
            f"longer: give {max(_SHORTEST_HALF, lost):g} or more, or 0 for never."
        )
    return seconds, {name: _switch(name, config.get(name)) for name in _SWITCHES}


def _options(text: str) -> dict[str, str]:
    """The options of a line, as torch reads it."""
    options = {}
    for each in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in each.partition("="))
        if not name or not value:
            raise UsageError(f"--rdzv-conf {text!r}: write NAME=VALUE, with commas between several.")
        options[name] = value
    return options


def _numeric(local_addr: str | None) -> str | None:
    """Sockets are told apart by numeric addresses, and other nodes may know no such name."""
    if not local_addr or is_loopback(local_addr):
        return local_addr
    try:
        found = resolve(local_addr)
    except OSError as error:
        raise UsageError(f"--local-addr {local_addr}: {error.strerror}. Give an address of this node.") from error
    return next((each for each in found if not is_loopback(each)), found[0])


def _switch(name: str, value: object) -> bool | None:
    """As torch reads one."""
    if value is None:
        return None
    text = str(int(value) if isinstance(value, bool) else value).lower()
    if text not in (*_YES, *_NO):
        raise UsageError(f"--rdzv-conf {name}={value}: give 1 or 0.")
    return text in _YES


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise UsageError(f"--rdzv-conf {name}={value} is no number of seconds.")
    return seconds
