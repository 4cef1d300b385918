"""How a snapshot travels from one node's memory to another's.

The receiver says a random number; the sender answers with a header, signed together with it; the receiver says whether
it takes what that names. Then come the bytes of the files in order, and the receiver says what came of it. Bytes are
compared with the checksums in the header as they come, and nothing of a snapshot is sealed before all of it is there.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.checksums import Checksums
from ftrun.checkpoint.keeper.peer_call import PeerError
from ftrun.checkpoint.keeper.work import works
from ftrun.checkpoint.layout import AttemptName, rank_json, rank_shard
from ftrun.checkpoint.memory.files import put, remove
from ftrun.checkpoint.records import Seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ftrun.checkpoint.keeper.peer_call import Call
    from ftrun.checkpoint.keeper.peers import Peers
    from ftrun.checkpoint.keeper.work import NodeWork
    from ftrun.checkpoint.memory.tier import Slot, Tier

_CONNECT_SECONDS = 3.0
_SECONDS = 15.0
"""Without a byte, after which the other side is given up."""
_NONCE, _SIGNATURE = 16, 32
_MOST_HEADER = 64 * 2**20
_PIECE = 2**20
_KEPT = 2
_OK = b'"ok"\n'


class Refused(PeerError):
    """The node that it was meant for did not take it."""


def send(peers: Peers, work: NodeWork, pace: Callable[[int], None], call: Call | None = None) -> None:
    """Copy one node's part of a snapshot to the next node's memory.

    Args:
        peers: where to.
        work: the part, whole and in memory.
        pace: called before so many bytes go.
        call: by which it can be broken off.

    Raises:
        PeerError: it did not arrive.
    """
    problems = []
    for address in peers.addresses:
        try:
            with socket.create_connection((address, peers.port), _CONNECT_SECONDS) as connection:
                if call is not None:
                    call.over(connection)
                _send(connection, peers, work, pace)
                return
        except Refused:
            raise
        except (OSError, ValueError) as error:
            problems.append(f"{address}: {error}")
            if call is not None and call.broken_off:
                break
    raise PeerError(f"the next node's keeper can't be reached: {'; '.join(problems) or 'it has no address'}")


def _send(connection: socket.socket, peers: Peers, work: NodeWork, pace: Callable[[int], None]) -> None:
    connection.settimeout(_SECONDS)
    nonce = _exactly(connection, _NONCE)
    header = json.dumps([each.to_json() for each in work.seals]).encode()
    # Signed for the one that it is meant for: an address may be another machine's, or this one's, too.
    connection.sendall(len(header).to_bytes(8, "little") + header + _sign(peers, peers.target, nonce, header))
    _require_ok(connection)
    for file in _order(work.seals):
        path, record = work.sealed[file]
        with contextlib.closing(_Mapped(path, record.size)) as mapped:
            for piece in mapped.pieces():
                pace(len(piece))
                connection.sendall(piece)
    _require_ok(connection)


def _require_ok(connection: socket.socket) -> None:
    answer = json.loads(_line(connection))
    if answer != "ok":
        raise Refused(f"the next node did not take it: {answer}")


def receive(connection: socket.socket, peers: Peers, copies: Tier, run_id: str) -> AttemptName:
    """Take a copy.

    Args:
        connection: on which it comes.
        peers: what proves that it comes from this run.
        copies: the tier for copies.
        run_id: identity of the run.

    Returns:
        The attempt, of which another node's part is here now.

    Raises:
        PeerError: it was refused, or isn't what it was said to be.
        OSError: the connection broke, or memory is full.
    """
    connection.settimeout(_SECONDS)
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce)
    length = int.from_bytes(_exactly(connection, 8), "little")
    if length > _MOST_HEADER:
        raise PeerError("whoever calls doesn't speak this language")
    header = _exactly(connection, length)
    if not hmac.compare_digest(_exactly(connection, _SIGNATURE), _sign(peers, peers.own, nonce, header)):
        raise PeerError("whoever calls means another node, or doesn't belong to this round of the run")
    try:
        work = _part_of(header, run_id)
        slots = _slots_for(work, copies)
        connection.sendall(_OK)
        _take(connection, work, slots)
        _drop_old(copies)
    except (PeerError, OSError) as error:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(str(error)).encode() + b"\n")
        raise
    connection.sendall(_OK)
    return work.name


def _part_of(header: bytes, run_id: str) -> NodeWork:
    try:
        seals = [Seal.from_json(each) for each in json.loads(header)]
        (work,) = works((), seals).values()
    except (ValueError, TypeError, AttributeError) as error:
        raise PeerError("its header is no node's part of a snapshot") from error
    if work.first.run_id != run_id or work.missing or len(work.seals) != len(seals):
        raise PeerError("it isn't a node's whole part of a snapshot of this run")
    if any(file not in (rank_json(each.rank), rank_shard(each.rank)) for each in seals for file in each.files):
        raise PeerError("it names a file that isn't its rank's")
    return work


def _slots_for(work: NodeWork, copies: Tier) -> dict[int, Slot]:
    if (copies.path / "keeper.json").exists():
        raise PeerError("what this node has for another one is being drained")
    copies.create()
    slots = {each.rank: _slot_for(copies, each.rank, str(work.name)) for each in work.seals}
    _require_room(copies, work, slots)
    return slots


def _take(connection: socket.socket, work: NodeWork, slots: Mapping[int, Slot]) -> None:
    seals = {each.rank: each for each in work.seals}
    for file in _order(work.seals):
        rank = int(file[1:6])
        target = slots[rank].record if file == rank_json(rank) else slots[rank].payload
        _, record = work.sealed[file]
        if _receive_file(connection, target, record.size) != record:
            raise PeerError(f"{file} has changed on its way")
        seals[rank] = replace(seals[rank], files=seals[rank].files | {file: (str(target), record)})
    for rank, each in seals.items():
        put(slots[rank].seal, each.to_bytes())


def _slot_for(copies: Tier, rank: int, attempt: str) -> Slot:
    """The slot of a rank that doesn't hold its newest copy, emptied."""
    slots = copies.slots(rank)
    slots[0].directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {slot.number: each for slot in slots if (each := slot.read_seal()) is not None and each.attempt != attempt}
    newest = max(found, key=lambda number: AttemptName.of(found[number].attempt), default=1)
    chosen = slots[1 - newest]
    for path in (chosen.seal, chosen.draining, chosen.drained):
        remove(path)
    return chosen


def _require_room(copies: Tier, work: NodeWork, slots: dict[int, Slot]) -> None:
    there = sum(_size(slot.payload) for slot in slots.values())
    status = os.statvfs(copies.path)
    lacking = work.size - there - status.f_bavail * status.f_frsize
    if lacking > 0:
        raise PeerError(f"its memory for copies, {copies.path.parent.parent}, lacks {lacking} bytes")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _receive_file(connection: socket.socket, target: Path, size: int) -> object:
    """Write a file as it comes; what its bytes were."""
    sums, left = Checksums(), size
    buffer = memoryview(bytearray(_PIECE))
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size)
        while left:
            count = connection.recv_into(buffer[: min(left, _PIECE)])
            if not count:
                raise PeerError("its sender has hung up")
            sums.update(buffer[:count])
            os.pwrite(descriptor, buffer[:count], size - left)
            left -= count
    finally:
        os.close(descriptor)
    return sums.record()


def _drop_old(copies: Tier) -> None:
    """Keep the newest snapshots alone, whichever node they are of."""
    sealed = copies.sealed()
    kept = sorted({AttemptName.of(seal.attempt) for _, seal in sealed}, reverse=True)[:_KEPT]
    for slot, seal in sealed:
        if AttemptName.of(seal.attempt) not in kept:
            for path in (slot.seal, slot.payload, slot.record):
                remove(path)


def _order(seals: tuple[Seal, ...]) -> list[str]:
    return sorted(file for each in seals for file in each.files)


def _sign(peers: Peers, target: str, nonce: bytes, header: bytes) -> bytes:
    return hmac.digest(peers.key, target.encode() + b"\0" + nonce + header, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(min(left, _PIECE))
        if not part:
            raise PeerError("the other side has hung up")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < 4096:
        part = connection.recv(4096)
        if not part:
            raise PeerError("the next node's keeper has hung up")
        found += part
    return found


class _Mapped:
    """A file's bytes in memory, as they are read."""

    def __init__(self, path: str, size: int) -> None:
        self._mapping: mmap.mmap | None = None
        self._size = size
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < size:
                raise PeerError(f"{path} is shorter than it was")
            if size:
                self._mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def pieces(self) -> Iterator[Any]:
        """One after the other."""
        if self._mapping is not None:
            with memoryview(self._mapping) as view:
                for start in range(0, self._size, _PIECE):
                    with view[start : start + _PIECE] as piece:
                        yield piece

    def close(self) -> None:
        """Let go of it."""
        if self._mapping is not None:
            self._mapping.close()
