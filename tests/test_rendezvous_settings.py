"""What of --rdzv-conf and of addresses is refused, in which words."""

from __future__ import annotations

import errno
import socket

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ftrun.errors import UsageError
from ftrun.rendezvous import endpoint
from ftrun.rendezvous.handler import BACKEND
from ftrun.rendezvous.hosting import Hosting, NotAdmitted
from ftrun.rendezvous.model import Terms
from ftrun.rendezvous.settings import Settings, read


def parameters(local_addr: str | None = None, **conf: str) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, "127.0.0.1:29400", "a-run", 1, 2, local_addr=local_addr, **conf)


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"lost_timeout": "0.4"}, "lost_timeout=0.4: nodes are heard five times a second, so give 0.5 or more"),
        ({"lost_timeout": "0"}, "give 0.5 or more"),
        ({"half_timeout": "1"}, "half_timeout=1: so soon the half of the nodes that goes on .* give 2 or more, or 0"),
        ({"half_timeout": "4", "lost_timeout": "5"}, "give 5 or more, or 0 for never"),
        ({"join_timeout": "-1"}, "join_timeout=-1 is no number of seconds"),
        ({"join_timeout": "inf"}, "join_timeout=inf is no number of seconds"),
        ({"stop_timeout": "nan"}, "stop_timeout=nan is no number of seconds"),
        ({"quorum": "maybe"}, "quorum=maybe: give 1 or 0"),
        ({"lost_timeuot": "3"}, "lost_timeuot: there is no such option; there are last_call_timeout, "),
    ],
)
def test_options_that_cannot_be(conf: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(parameters(**conf), {}, print)


def test_options_of_torchs_own_backends_do_no_harm() -> None:
    settings = read(parameters(timeout="900", keep_alive_interval="5", lost_timeout="0.5"), {}, print)
    assert settings.terms.lost_after == 0.5
    assert settings.timing.patience < settings.terms.lost_after  # a node that is cut off stops before the others go on


def test_who_may_go_on_alone_is_the_same_on_all_nodes() -> None:
    traits = [read(parameters(**conf), {"a": "b"}, print).traits for conf in ({}, {"quorum": "1"}, {"quorum": "0"})]
    given = {"failover": "1", "quorum": "1", "half_timeout": "300"}
    assert traits[0] == traits[1] == {"a": "b", **{f"--rdzv-conf {name}": value for name, value in given.items()}}
    assert traits[2] == {**traits[0], "--rdzv-conf quorum": "0"}
    assert read(parameters(failover="0"), {}, print).traits["--rdzv-conf failover"] == "0"


def test_an_own_address_that_is_a_name_becomes_one_that_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"this-node": ["127.0.1.1", "10.0.0.5"], "only-here": ["127.0.1.1"]}

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert read(parameters("this-node"), {}, print).local_addr == "10.0.0.5"
    assert read(parameters("only-here"), {}, print).local_addr == "127.0.1.1"
    assert read(parameters("localhost"), {}, print).local_addr == "localhost"
    assert read(parameters(), {}, print).local_addr is None
    with pytest.raises(UsageError, match="--local-addr no-such-node: Name or service not known"):
        read(parameters("no-such-node"), {}, print)


def test_a_port_at_which_nobody_may_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int) -> socket.socket | None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(endpoint, "listen", refuse)  # root may listen anywhere
    hosting = Hosting(Settings(endpoint.Endpoint("127.0.0.1", 80), "a-run", Terms(1, 1)), "me")
    with pytest.raises(NotAdmitted, match=r"127\.0\.0\.1:80: this node can't listen there: Permission denied"):
        hosting.start()
    hosting.close(0.0)
