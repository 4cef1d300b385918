"""One save, as one rank goes through it: drain its files, have its node vouch for them, commit.

No collective and no network of its own: ranks meet in the attempt's directory, and every wait has a deadline.

===========  =======================================================================================
every rank   writes its tensors, then ``rNNNNN.json``; ranks other than 0 write only what differs from rank 0
local rank 0  checks presence and size of its node's files, then writes ``done/nNNNN.json``
rank 0       once all ranks are vouched for and agree: ``MANIFEST.json``, exclusively; ``LATEST``; retention
others       wait for ``MANIFEST.json``
===========  =======================================================================================

A rank that can't do its part leaves ``rNNNNN.failed.json``, so that the others give up at once. That file is
a promise: the attempt will never be committed, and each rank may remove what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from typing import TYPE_CHECKING

import torch

from ftrun import __version__
from ftrun.checkpoint import epochs, retention, shard
from ftrun.checkpoint.checksums import FileRecord, record_of
from ftrun.checkpoint.layout import (
    LATEST,
    MANIFEST,
    AttemptName,
    Root,
    attempt_key,
    done_json,
    rank_failure,
    rank_json,
    rank_shard,
)
from ftrun.checkpoint.manifest import FORMAT, BadManifestError, Manifest
from ftrun.checkpoint.rankfile import DoneRecord, RankRecord, TensorEntry
from ftrun.checkpoint.sealed import canonical
from ftrun.checkpoint.words import dtype_name
from ftrun.errors import AgreementTimeout, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ftrun.checkpoint.snapshot import Owner, Place, Snapshot

_FIRST_DELAY, _LAST_DELAY = 0.005, 0.2


class Save:
    """One rank's way through one save. One thread uses it, and an instance only once."""

    def __init__(self, root: Root, place: Place, owner: Owner, snapshot: Snapshot, timeout: float) -> None:
        self.name = AttemptName(owner.epoch, snapshot.step, snapshot.suffix)
        self._root, self._place, self._owner, self._snapshot = root, place, owner, snapshot
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._written: list[str] = []
        self._ranks: dict[int, tuple[RankRecord, FileRecord]] = {}

    def drain(self) -> int:
        """Write this rank's files; the number of bytes.

        Raises:
            AgreementTimeout: rank 0's file did not appear.
            CheckpointError: another rank gave up.
            OSError: the filesystem said no.
        """
        self._root.make_attempt(self.name)
        snapshot, rank = self._snapshot, self._place.rank
        tensors, files = self._write_tensors()
        record = RankRecord(
            attempt=str(self.name),
            rank=rank,
            step=snapshot.step,
            total=snapshot.total,
            data=snapshot.data,
            tree=snapshot.tree,
            tensors=tensors,
            files=files,
        )
        content = record.to_bytes()
        self._create(rank_json(rank), content)
        return len(content) + sum(file.size for file in files.values())

    def commit(self) -> Manifest:
        """Do this rank's part of the commit and wait for the whole; the manifest.

        Raises:
            AgreementTimeout: some rank's or node's files did not appear; the message names them.
            CheckpointError: a rank gave up, the ranks disagree, or a file isn't what it should be.
            OSError: the filesystem said no.
        """
        if self._place.local_rank == 0:
            self._vouch()
        return self._commit() if self._place.rank == 0 else self._await_manifest()

    def tidy(self, keep_last: int) -> list[str]:
        """After the commit, on rank 0: ``LATEST`` and retention, unless a newer epoch owns the root.

        Returns:
            What went wrong. The checkpoint stands either way.
        """
        if self._place.rank != 0:
            return []
        problems = []
        try:
            if epochs.newest(self._root) > self._owner.epoch:
                return ["a newer start owns the checkpoint root: LATEST and old checkpoints are left to it"]
            self._root.write(LATEST, f"{self.name}\n".encode("ascii"))
        except OSError as error:
            problems.append(f"LATEST was not updated: {error}")
        try:
            owner = self._owner
            retention.apply(
                self._root, run_id=owner.run_id, since=owner.since, parent=owner.parent, keep_last=keep_last
            )
        except (OSError, ValueError) as error:
            problems.append(f"old checkpoints were not deleted: {error}")
        return problems

    def give_up(self, reason: str) -> None:
        """After a failure: tell the others and remove this rank's files, where that can't hurt a commit."""
        # Rank 0 can take everything back until the manifest is there, another rank until its record is.
        last_word = MANIFEST if self._place.rank == 0 else rank_json(self._place.rank)
        with contextlib.suppress(OSError):
            if self._root.size(self._key(last_word)) is None:
                # Files first: on a full disk they make room for the note.
                self._remove_written()
                self._leave_note(json.dumps({"rank": self._place.rank, "reason": reason}).encode())
            elif last_word != MANIFEST and self._failures():
                self._remove_written()

    def _leave_note(self, content: bytes) -> None:
        key = self._key(rank_failure(self._place.rank))
        try:
            self._root.create(key, content)
        except FileExistsError:
            return
        except OSError:
            # An empty note says the same, and needs no block of a full disk: without it the others wait in vain.
            self._root.create(key, b"")

    def _remove_written(self) -> None:
        # Last written, first removed: what vouches for a file never outlives it.
        for file in reversed(self._written):
            with contextlib.suppress(OSError):
                self._root.delete(self._key(file))

    def _write_tensors(self) -> tuple[dict[str, TensorEntry], dict[str, FileRecord]]:
        file = rank_shard(self._place.rank)
        entries = {name: self._describe(tensor, file) for name, tensor in self._snapshot.tensors.items()}
        shared = self._shared_with_leader(entries) if self._place.rank else {}
        own = {name: tensor for name, tensor in self._snapshot.tensors.items() if name not in shared}
        if not own:
            return entries | shared, {}
        with self._root.writing(self._key(file)) as stream:
            record = shard.write(stream, own)
        self._written.append(file)
        return entries | shared, {file: record}

    def _describe(self, tensor: torch.Tensor, file: str) -> TensorEntry:
        digest = shard.digest(tensor) if self._place.world_size > 1 else None
        return TensorEntry(file, dtype_name(tensor.dtype), tuple(tensor.shape), digest)

    def _shared_with_leader(self, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Those of rank 0's entries that hold the same content under the same name."""
        record, _ = self._collect([0])[0]
        shared = {}
        for name, entry in entries.items():
            other = record.tensors.get(name)
            if other and (other.dtype, other.shape, other.digest) == (entry.dtype, entry.shape, entry.digest):
                shared[name] = other
        return shared

    def _vouch(self) -> None:
        """Check the node's files from outside and say so."""
        ranks = self._place.node_ranks
        files = _files_of(self._collect(ranks))
        for file, record in files.items():
            size = self._root.size(self._key(file))
            if size != record.size:
                raise CheckpointError(
                    f"{file} has {size or 'no'} bytes instead of the {record.size} written: "
                    f"check the storage under {self._root.path}"
                )
        done = DoneRecord(
            self._place.node,
            tuple(ranks),
            {file: (record.size, record.crc32c) for file, record in files.items()},
        )
        self._create(done_json(self._place.node), done.to_bytes())

    def _commit(self) -> Manifest:
        records = self._collect(range(self._place.world_size))
        nodes = self._await_nodes(_files_of(records))
        _check_agreement({rank: record for rank, (record, _) in records.items()}, self._snapshot)
        manifest = self._manifest(_files_of(records), nodes)
        # The directory's own name must be durable before anything in it counts as committed.
        self._root.sync_attempts()
        self._root.create(self._key(MANIFEST), manifest.to_bytes())
        return manifest

    def _manifest(self, files: dict[str, FileRecord], nodes: int) -> Manifest:
        owner, snapshot = self._owner, self._snapshot
        return Manifest(
            format=FORMAT,
            ftrun=__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            run_id=owner.run_id,
            epoch=owner.epoch,
            attempt=str(self.name),
            parent=owner.parent,
            step=snapshot.step,
            total=snapshot.total,
            world_size=self._place.world_size,
            nodes=nodes,
            reason=snapshot.reason,
            data=snapshot.data,
            files=files,
            written_at=epochs.now(),
        )

    def _await_manifest(self) -> Manifest:
        found: list[Manifest] = []

        def missing() -> list[str]:
            with contextlib.suppress(FileNotFoundError, BadManifestError):
                found.append(Manifest.from_bytes(self._root.read(self._key(MANIFEST))))
            return [] if found else [f"{MANIFEST} from rank 0"]

        self._poll(missing)
        return found[0]

    def _await_nodes(self, files: dict[str, FileRecord]) -> int:
        """Wait until every rank is vouched for, by identity; the number of nodes."""
        done: dict[str, DoneRecord] = {}

        def missing() -> list[str]:
            for file in self._root.files(self.name):
                if file.startswith("done/n") and file not in done:
                    with contextlib.suppress(ValueError, FileNotFoundError):
                        done[file] = DoneRecord.from_bytes(self._root.read(self._key(file)))
            vouched = {rank for record in done.values() for rank in record.ranks}
            ranks = sorted(set(range(self._place.world_size)) - vouched)
            return [f"done record for the node of rank {rank}" for rank in ranks]

        self._poll(missing)
        vouched = {file: word for record in done.values() for file, word in record.files.items()}
        for file, record in files.items():
            if vouched.get(file) != (record.size, record.crc32c):
                raise CheckpointError(f"{file} is not the file that its node verified")
        return len(done)

    def _collect(self, ranks: Iterable[int]) -> dict[int, tuple[RankRecord, FileRecord]]:
        """Wait for the records of ranks; each with its file's own record."""
        wanted = list(ranks)

        def missing() -> list[str]:
            for rank in wanted:
                if rank not in self._ranks:
                    # Without links on the filesystem a file is visible while it grows: not whole, not there.
                    with contextlib.suppress(ValueError, FileNotFoundError):
                        content = self._root.read(self._key(rank_json(rank)))
                        self._ranks[rank] = (RankRecord.from_bytes(content), record_of(content))
            return [f"{rank_json(rank)} from rank {rank}" for rank in wanted if rank not in self._ranks]

        self._poll(missing)
        return {rank: self._ranks[rank] for rank in wanted}

    def _poll(self, missing: Callable[[], list[str]]) -> None:
        delay = _FIRST_DELAY
        while waiting := missing():
            failures = self._failures()
            if failures:
                raise CheckpointError("; ".join(failures))
            if time.monotonic() > self._deadline:
                more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
                raise AgreementTimeout(
                    f"after {self._timeout:g} s there is still no {', '.join(waiting[:8])}{more}: "
                    "look into the logs of those ranks"
                )
            time.sleep(delay)
            delay = min(_LAST_DELAY, delay * 1.5)

    def _failures(self) -> list[str]:
        found = []
        for file in sorted(self._root.files(self.name)):
            if file.startswith("r") and file.endswith(".failed.json"):
                try:
                    document = json.loads(self._root.read(self._key(file)))
                    found.append(f"rank {document['rank']} gave up: {document['reason']}")
                except (OSError, ValueError, KeyError, TypeError):
                    found.append(f"a rank gave up ({file})")
        return found

    def _create(self, file: str, content: bytes) -> None:
        self._root.create(self._key(file), content)
        self._written.append(file)

    def _key(self, file: str) -> str:
        return attempt_key(self.name, file)


def _files_of(records: dict[int, tuple[RankRecord, FileRecord]]) -> dict[str, FileRecord]:
    files = {}
    for rank, (record, own) in records.items():
        files[rank_json(rank)] = own
        files.update(record.files)
    return files


def _check_agreement(records: dict[int, RankRecord], snapshot: Snapshot) -> None:
    """Ranks that don't stand at the same place have no common checkpoint."""
    for rank, record in records.items():
        if (record.step, record.total) != (snapshot.step, snapshot.total):
            raise CheckpointError(
                f"rank {rank} saved step {record.step} of {record.total}, rank 0 step {snapshot.step} of "
                f"{snapshot.total}: all ranks must ask for the same total and save at the same step"
            )
    positions: dict[bytes, list[int]] = {}
    for rank, record in records.items():
        positions.setdefault(canonical(record.data), []).append(rank)
    if len(positions) > 1:
        said = "; ".join(f"ranks {_some(ranks)} at {text.decode()[:200]}" for text, ranks in positions.items())
        raise CheckpointError(
            f"the ranks disagree on the data position ({said}): every rank must advance its loader in step"
        )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
