"""The store of one round: served by its first node, used by torch's agents, and by workers as ``MASTER_ADDR``.

Torch's agent calls it on its main thread, and waits there for what other nodes write. :class:`RoundStore` lets it wait
only as long as the round stands: when a member is lost in the meantime, there is nothing left to wait for.
"""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from ftrun.rendezvous import torch_store
from ftrun.rendezvous.line import leave_behind
from ftrun.rendezvous.wire import LineDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import TCPStore

    from ftrun.rendezvous.line import Line

T = TypeVar("T")

_WAIT_SECONDS = 120.0
"""For what another node is about to write. Torch waits for five minutes, and ends the run then."""
_SLICE = 0.25
_START_SECONDS = 30.0
"""It may look up its own name, and that of whoever connects: as long as a name server that is away is waited for."""


class RoundBroken(RendezvousError):
    """The round is over before it was done: a member is lost, or a new round is called. Meet again."""


@dataclass(frozen=True)
class Address:
    """Where a round's store is.

    Attributes:
        host: address of the round's first node.
        port: the store's port.
        master_port: what workers are told: the same, or a free port of that node where they make a store of their own.
    """

    host: str
    port: int
    master_port: int

    def encode(self) -> str:
        """As text."""
        return json.dumps(self.__dict__)

    @classmethod
    def decode(cls, text: str) -> Address:
        """Read what :meth:`encode` wrote."""
        return cls(**json.loads(text))


class RoundServer:
    """Serves one round's store from this process.

    Args:
        address: how others reach this node.
        shared: workers use it, too.
    """

    def __init__(self, address: str, *, shared: bool) -> None:
        self._address = address
        self._store: TCPStore | None = None
        self._shared = shared
        self._trouble = f"not within {_START_SECONDS:g} s"
        self.port = self.master_port = 0

    def start(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Serve, at a port of the system's choice.

        Args:
            meanwhile: called now and then.

        Raises:
            RendezvousConnectionError: it can't.
        """
        # The store connects to itself: not on the main thread, which calls no store.
        thread = threading.Thread(target=self._make, name="ftrun-round-server", daemon=True)
        thread.start()
        deadline = time.monotonic() + _START_SECONDS
        try:
            while thread.is_alive() and time.monotonic() < deadline:
                meanwhile()
                thread.join(_SLICE)
        finally:
            if thread.is_alive():  # this node gives up, or has been told to end
                leave_behind(thread)
        if self._store is None:
            raise RendezvousConnectionError(f"no store could be started on this node: {self._trouble}.")

    def _make(self) -> None:
        try:
            self._serve()
        except (OSError, RuntimeError) as error:
            first, *_ = str(error).splitlines() or [""]
            self._trouble = first or type(error).__name__

    def _serve(self) -> None:
        store = torch_store.serve(self._address, _START_SECONDS)
        self.port = self.master_port = store.port
        if not self._shared:
            with socket.socket() as free:
                free.bind(("", 0))
                self.master_port = free.getsockname()[1]
        self._store = store

    def close(self) -> None:
        """Serve no longer."""
        self._store = None


class RoundStore(Store):
    """A client of a round's store whose calls end when the round does.

    A wait without a limit of its own is one for what another node is about to write: in vain, it breaks the round.

    Args:
        line: to the store.
        broken: says why the round is over, in words; empty while it stands.
    """

    def __init__(self, line: Line, broken: Callable[[], str]) -> None:
        super().__init__()
        self.set_timeout(dt.timedelta(seconds=_WAIT_SECONDS))
        self._line = line
        self._broken = broken

    def close(self) -> None:
        """Hang up."""
        self._line.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._call(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Read a value, and wait for it as long as the store's timeout says."""
        return self._patiently([key], lambda store: store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Returns its new value."""
        return self._call(lambda store: store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._call(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._patiently(keys, lambda _store: None, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values, and wait for them."""
        return self._patiently(keys, lambda store: store.multi_get(keys)) if keys else []

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several values."""
        if keys:
            self._call(lambda store: store.multi_set(keys, values))  # type: ignore[attr-defined]

    def append(self, key: str, value: str) -> None:
        """Append to a value."""
        self._call(lambda store: store.append(key, value))  # type: ignore[attr-defined]

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if the present one is as expected. Returns the value that holds then."""
        return self._call(lambda store: store.compare_set(key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        return self._call(lambda store: store.delete_key(key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._call(lambda store: store.num_keys())

    def has_extended_api(self) -> bool:
        """It appends, and reads and writes several values at once."""
        return True

    def _call(self, act: Callable[[Store], T]) -> T:
        try:
            return self._line.call(act, until=self._broken)
        except LineDown as error:
            raise self._lost(error) from error

    def _lost(self, error: LineDown) -> RoundBroken:
        return RoundBroken(self._broken() or f"the store of the round is lost: {error}")

    def _patiently(self, keys: list[str], act: Callable[[Store], T], timeout: dt.timedelta | None = None) -> T:
        """Do something once all keys are there."""
        limit: dt.timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        seconds = limit.total_seconds()

        def wait_and_act(store: Store) -> T:
            if not store.check(keys):
                store.wait(keys, dt.timedelta(seconds=seconds))
            return act(store)

        try:
            return self._line.call(wait_and_act, seconds, until=self._broken)
        except LineDown as error:
            raise self._lost(error) from error
        except DistStoreError as error:
            if timeout is not None:
                raise
            first, *_ = str(error).splitlines() or [""]
            raise RoundBroken(f"another node has not come as far as this one within {seconds:g} s ({first})") from error
