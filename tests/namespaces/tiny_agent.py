"""An agent that meets others and does nothing else: what it goes through, one JSON object a line, with monotonic times.

    python tiny_agent.py ENDPOINT MIN MAX [OPTION=VALUE ...]    options as of --rdzv-conf, traits as trait.NAME=VALUE,
                                                              a directory that all share as notes=DIRECTORY

SIGTERM: leave. SIGUSR1: as if a worker had failed. SIGUSR2: as if all workers had ended well.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ftrun.rendezvous.handler import Handler

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what torch writes about lost connections is no news here


class Asked(Exception):
    """A signal came."""


def say(what: str, **more: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps({"at": time.monotonic(), "what": what, **more}) + "\n")  # in one go: threads do it, too
    sys.stdout.flush()


def take_part(handler: Handler) -> None:
    """One round after the other, until the run is over."""
    from torch.distributed.elastic.utils.store import synchronize

    from ftrun.rendezvous.round_store import RoundBroken

    while True:
        info = handler.next_rendezvous()
        formed = handler.round
        assert formed is not None
        assert info.bootstrap_store_info is not None
        names = [each.name for each in formed.members]
        try:
            info.store.set_timeout(dt.timedelta(seconds=60))
            synchronize(info.store, b"x", info.rank, info.world_size, "met")
        except RoundBroken as broken:
            say("broken", why=str(broken))
            continue
        say(
            "round",
            generation=formed.generation,
            rank=info.rank,
            members=names,
            why=formed.reason,
            address=info.bootstrap_store_info.master_addr,
        )
        work(handler)


def work(handler: Handler) -> None:
    """What a main loop does until this round is over."""
    while True:
        select.select([handler.alarm], [], [], 0.1)
        if handler.num_nodes_waiting():
            say("disturbed", why=handler.disturbance)
            return
        if signal.SIGUSR1 in HEARD:
            HEARD.remove(signal.SIGUSR1)
            say("fell")
            return
        if signal.SIGUSR2 in HEARD and handler.finished():
            say("finished")
            sys.exit(0)


HEARD: list[signal.Signals] = []


def main() -> NoReturn:
    """Meet."""
    say("start")
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousGracefulExitError

    from ftrun.errors import UsageError
    from ftrun.rendezvous.handler import BACKEND, Handler
    from ftrun.rendezvous.settings import read

    def asked(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            raise Asked
        HEARD.append(signal.Signals(number))

    for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, asked)
    where, least, most, *options = sys.argv[1:]
    given = dict(each.split("=", 1) for each in options)
    traits = {name.removeprefix("trait."): given.pop(name) for name in list(given) if name.startswith("trait.")}
    run_id = given.pop("run_id", "a-run")
    notes = Path(given.pop("notes")) if "notes" in given else None
    parameters = RendezvousParameters(BACKEND, where, run_id, int(least), int(most), **given)
    handler = Handler(read(parameters, traits, lambda text: say("leader", text=text), notes))
    say("ready")
    code = 1
    try:
        take_part(handler)
    except Asked:
        handler.leave("asked to")
        say("left")
        code = 0
    except SystemExit:
        code = 0
    except RendezvousGracefulExitError as error:
        say("not needed", why=str(error))
        code = 0
    except (RendezvousError, UsageError) as error:
        say("failed", kind=type(error).__name__, why=str(error))
    handler.shutdown()
    say("end")
    sys.exit(code)


if __name__ == "__main__":
    main()
