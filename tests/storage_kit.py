"""A remote store for tests, behind fsspec: it caches listings, and fails as it is told. And small checkpoints."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from typing import Any

from fsspec.spec import AbstractFileSystem

from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.layout import AttemptName, Root, attempt_key, done_json, rank_json, rank_shard
from ftrun.checkpoint.manifest import FORMAT, Manifest
from ftrun.checkpoint.plan.pieces import Box, Piece
from ftrun.checkpoint.records import About, DoneRecord, RankRecord, TensorEntry, Word
from ftrun.checkpoint.storage.retry import Patience

QUICK = Patience(deadline=180.0, hang=60.0, first=0.001, last=0.01)


@dataclass
class Fault:
    """What goes wrong.

    Attributes:
        verb: request that it strikes: info, ls, find, cat, pipe, open, part, close or rm.
        key: part of the key.
        how: an exception to raise; ``hang``; ``short`` (keep half); ``lost`` (do it, and lose the answer).
        times: how often.
    """

    verb: str
    key: str = ""
    how: Any = "hang"
    times: int = 1


@dataclass
class Store:
    """What a store holds, and what happens to those who ask it."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    listings: dict[str, Any] = field(default_factory=dict)
    knows_create: bool = True
    free: threading.Event = field(default_factory=threading.Event)
    lock: Any = field(default_factory=threading.Lock)

    def ask(self, verb: str, path: str) -> Any:
        """Note a request and let a fault strike; how it strikes when the request is to go on all the same."""
        self.asked.append((verb, path))
        for fault in self.faults:
            if fault.verb == verb and fault.key in path and fault.times > 0:
                fault.times -= 1
                if isinstance(fault.how, BaseException):
                    raise fault.how
                if fault.how == "hang":
                    self.free.wait(30)
                    return None
                return fault.how
        return None

    def keep(self, path: str, data: bytes, how: Any) -> None:
        self.files[path] = data[: len(data) // 2] if how == "short" else data
        if how == "lost":
            raise ConnectionError("the answer was lost")


class DoubleFileSystem(AbstractFileSystem):
    """``double://name/key``: the store of that name."""

    protocol = "double"
    cachable = False
    stores: dict[str, Store] = {}  # noqa: RUF012 - shared by all instances, as a real store is

    def _at(self, path: str) -> tuple[Store, str]:
        path = self._strip_protocol(path)
        return self.stores[path.partition("/")[0]], path

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        store, path = self._at(path)
        store.ask("info", path)
        if path in store.files:
            return {"name": path, "size": len(store.files[path]), "type": "file"}
        if any(name.startswith(path + "/") for name in store.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        store, path = self._at(path)
        store.ask("ls", path)
        if path not in store.listings:
            below = {name[len(path) + 1 :].partition("/")[0] for name in store.files if name.startswith(path + "/")}
            store.listings[path] = sorted(f"{path}/{name}" for name in below)
        if not store.listings[path]:
            raise FileNotFoundError(path)
        return [self.info(name) for name in store.listings[path]] if detail else list(store.listings[path])

    def find(self, path: str, detail: bool = False, **options: Any) -> Any:
        store, path = self._at(path)
        store.ask("find", path)
        key = f"{path}//"
        if key not in store.listings:
            store.listings[key] = {
                name: {"name": name, "size": len(data), "type": "file"}
                for name, data in store.files.items()
                if name.startswith(path + "/")
            }
        return dict(store.listings[key]) if detail else list(store.listings[key])

    def invalidate_cache(self, path: str | None = None) -> None:
        for store in self.stores.values():
            store.listings.clear()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        store, path = self._at(path)
        store.ask("cat", path)
        if path not in store.files:
            raise FileNotFoundError(path)
        if start is not None and start >= len(store.files[path]):
            raise OSError(errno.EINVAL, "range not satisfiable")
        return store.files[path][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        store, path = self._at(path)
        how = store.ask("pipe", path)
        if mode == "create" and not store.knows_create:
            raise OSError(errno.ENOSYS, "a header that you provided is not implemented")
        with store.lock:
            if mode == "create" and path in store.files:
                raise FileExistsError(path)
            store.keep(path, bytes(value), how)

    def rm_file(self, path: str) -> None:
        store, path = self._at(path)
        store.ask("rm", path)
        if path not in store.files:
            raise FileNotFoundError(path)
        del store.files[path]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no directories."""

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        store, path = self._at(path)
        store.ask("open", path)
        assert mode == "wb"
        return Upload(store, path)


class Upload:
    """A file that appears when it is closed, whole or not, unless it was discarded."""

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path, self.parts, self.closed = store, path, bytearray(), False

    def write(self, data: memoryview) -> int:
        self.store.ask("part", self.path)
        self.parts += data
        return len(data)

    def discard(self) -> None:
        self.parts.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            how = self.store.ask("close", self.path)
            self.store.keep(self.path, bytes(self.parts), how)

    def __del__(self) -> None:
        self.close()


def write_attempt(
    root: Root,
    step: int,
    *,
    epoch: int = 1,
    run_id: str = "run",
    suffix: str = "00000000",
    world_size: int = 2,
    parent: str | None = None,
    payload: int = 1000,
    commit: bool = True,
    done: bool = True,
) -> AttemptName:
    """A checkpoint of little substance with every kind of file, one node for each rank."""
    name = AttemptName(epoch, step, suffix)
    about = About(run_id, world_size, step, 100, "interval", {"samples": step}, parent, "2.13")
    files = {}
    root.make_attempt(name)
    for rank in range(world_size):
        shard = bytes([step % 256, rank]) * (payload // 2)
        tensor = TensorEntry("float32", (payload // 4,), f"0-{world_size - 1}")
        piece = Piece("model/w", Box.whole((payload // 4,)), 0, payload // 4, rank_shard(rank), 0)
        record = RankRecord(str(name), rank, step, 100, about.data, {}, {"model/w": tensor}, (piece,)).to_bytes()
        mine = {rank_shard(rank): shard, rank_json(rank): record}
        for file, content in mine.items():
            root.put(attempt_key(name, file), lambda content=content: iter([memoryview(content)]), len(content))
        records = {file: record_of(content) for file, content in mine.items()}
        files |= records
        if done:
            word = DoneRecord(rank, records, {rank: Word("p", {})}, about)
            root.create(attempt_key(name, done_json(rank)), word.to_bytes())
    if commit:
        manifest = Manifest(
            format=FORMAT,
            ftrun="0.1",
            torch="2.13",
            python="3.11",
            run_id=run_id,
            epoch=epoch,
            attempt=str(name),
            parent=parent,
            step=step,
            total=100,
            world_size=world_size,
            nodes=world_size,
            reason="interval",
            data=about.data,
            files=files,
            written_at="2026-01-01T00:00:00+00:00",
        )
        root.create(attempt_key(name, "MANIFEST.json"), manifest.to_bytes())
    return name
