"""The slow things that a keeper does for an attempt, each one in a lane of its own. What came out is a value."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ftrun.checkpoint import epochs, retention
from ftrun.checkpoint.keeper import commit, scan
from ftrun.checkpoint.keeper.commit import Ballot, Verdict
from ftrun.checkpoint.keeper.copying import Copier, Source, SourceError
from ftrun.checkpoint.keeper.courtesy import Courtesy
from ftrun.checkpoint.keeper.decide import Stage
from ftrun.checkpoint.keeper.mappings import Mappings
from ftrun.checkpoint.keeper.pending import Pending
from ftrun.checkpoint.keeper.rate import Meter
from ftrun.checkpoint.keeper.results import Moved, Over, Skipped, Stale, Swept, Waits
from ftrun.checkpoint.keeper.vetting import vet
from ftrun.checkpoint.layout import LATEST, MANIFEST, Root, attempt_key, done_json, is_given_up
from ftrun.checkpoint.leftovers import Leftovers
from ftrun.checkpoint.records import DoneRecord
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftrun.checkpoint.checksums import FileRecord
    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.keeper.config import KeeperConfig
    from ftrun.checkpoint.keeper.decide import Known
    from ftrun.checkpoint.keeper.faults import Faults
    from ftrun.checkpoint.keeper.local import LocalTier
    from ftrun.checkpoint.keeper.rate import Limiter
    from ftrun.checkpoint.keeper.results import Result
    from ftrun.checkpoint.keeper.work import NodeWork
    from ftrun.checkpoint.memory.tier import Tier

_log = logging.getLogger(__name__)

_TAKEN = "its slot is being taken for another snapshot"
_LAST = ("stop", "last")
"""Reasons of saves after which nobody trains here: their commit is all that is waited for."""


@dataclass
class Jobs:
    """Does them. Each method runs on its lane's thread, for one attempt at a time.

    Attributes:
        tier: the memory tier.
        config: what the keeper was told.
        local: the local tier, where there is one.
        limiter: for all bytes of the node.
        faults: scripted ones.
        meters: bytes copied, by attempt.
        closing: nobody will seal anything any more: there is no training to give way to.
        node: number of this node in the epoch that runs now. What it says of an attempt bears the number that it had
            in that one's epoch: numbers change hands when nodes come and go, and within an epoch they don't.
    """

    tier: Tier
    config: KeeperConfig
    local: LocalTier | None
    limiter: Limiter
    faults: Faults
    meters: dict[str, Meter] = field(default_factory=dict)
    closing: bool = False
    node: int = field(init=False)
    _copied: dict[tuple[str, str], dict[str, FileRecord]] = field(default_factory=dict)
    _ballots: dict[str, Ballot] = field(default_factory=dict)
    _leftovers: tuple[int, Leftovers] | None = None
    _mappings: Mappings = field(default_factory=Mappings)

    def __post_init__(self) -> None:
        """Until it is told of an epoch, the number is that of the settings."""
        self.node = self.config.node

    @cached_property
    def root(self) -> Root:
        """The checkpoint root.

        Raises:
            UsageError: it is none.
        """
        return Root.open(self.config.root, self.config.storage_options)

    def forget(self, attempt: str) -> None:
        """An attempt is over."""
        self.meters.pop(attempt, None)
        self._ballots.pop(attempt, None)
        for stage in ("local", "root"):
            self._copied.pop((stage, attempt), None)

    def copy(self, known: Known) -> Result:
        """Memory to local tier."""
        assert self.local is not None
        work = known.work
        if not self._hold(work):
            return Waits(_TAKEN)
        try:
            self.local.record(work)
            with _from_memory(work):
                vet(work)
                files = self._transfer("local", work, _in_memory(work), str(work.name))
            work = replace(work, files=files)
            self.faults.hit("local.record")
            self.local.record(work)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.local.drop(work)
            return Skipped(str(error))
        self.faults.hit("local.recorded")
        self._free(work)
        return Moved(Stage.LOCAL, work)

    def upload(self, known: Known, record: EpochRecord | None = None) -> Result:
        """Memory or local tier to the root, and the node's word for it."""
        work = known.work
        files = self.root.files(work.name)
        if MANIFEST in files or any(map(is_given_up, files)):
            return Moved(Stage.DONE, work)  # the next step finds out the rest
        if done_json(work.first.node) not in files:
            self._require_our_root(record)
            if known.stage is Stage.SEALED and not self._hold(work):
                return Waits(_TAKEN)
            self.root.make_attempt(work.name)
            work = replace(work, files=self._upload(work, in_memory=known.stage is Stage.SEALED))
            self._require_our_root(record)  # it may have been set aside meanwhile, and another begun in its place
            self._vouch(work)
        self.faults.hit("done.written")
        if known.stage is Stage.SEALED:
            with _in_tier():
                Pending(self.tier).put(work)
            self.faults.hit("pending")
            self._free(work)
        return Moved(Stage.DONE, work)

    def _upload(self, work: NodeWork, *, in_memory: bool) -> dict[str, FileRecord]:
        directory = attempt_key(work.name, "").rstrip("/")
        if not in_memory:
            return self._transfer("root", work, self._local_sources(work), directory)
        with _from_memory(work):
            vet(work)
            return self._transfer("root", work, _in_memory(work), directory)

    def settle(self, known: Known, record: EpochRecord | None = None) -> Result:
        """Look whether it is committed; on the leading node, commit it when all nodes are done."""
        name, attempt = known.work.name, known.attempt
        ballot = self._ballots.setdefault(attempt, Ballot(self.root, name, self.faults))
        try:
            found = ballot.look(leads=known.work.leads, fence=lambda: self._require_current(record))
        except Stale as error:
            return Waits(str(error), stale=True)
        if isinstance(found, str):
            return self._removed(known) or Waits(found, others=True)
        if found.committed and known.work.leads:
            self._point_latest(known)
        return found

    def _require_current(self, record: EpochRecord | None) -> None:
        """A node that was cut off, or stood still, commits nothing: the others have gone on without it.

        Raises:
            Stale: a start has noted its epoch in the root of which nobody has told this node.
        """
        newest = epochs.newest(self.root) if record is not None else 0
        if record is not None and newest > record.epoch:
            raise Stale(
                f"epoch {newest} has begun without this node, whose own is {record.epoch}: what its workers saved is "
                "left to the others"
            )

    def _removed(self, known: Known) -> Verdict | None:
        """The end of an attempt whose files are gone from the root that had them: nobody will commit it any more."""
        work = known.work
        if MANIFEST in (files := self.root.files(work.name)) or done_json(work.first.node) in files:
            return None
        record = epochs.read(self.root, work.name.epoch)
        if record is None or record.run_id != self.config.run_id:
            return None  # the root itself isn't there
        return Verdict(False, "its files are not in the root any more: a newer checkpoint has replaced it")

    def tidy(self, known: Known, record: EpochRecord | None) -> Result:
        """Retention, unless a newer epoch owns the root."""
        name = known.work.name
        self.faults.hit("retention")
        if record is not None and self._is_newest(known):
            parent = record.parent if record.epoch == name.epoch else known.work.first.parent
            policy = retention.KeepPolicy(self.config.keep_last, self.config.keep_every)
            retention.apply(self.root, policy, run_id=record.run_id, since=record.since, parent=parent)
        return Over()

    def note(self, known: Known) -> Result:
        """After a failure: remove this node's files unless it has vouched for them, and tell the other nodes."""
        work, name = known.work, known.work.name
        files = self.root.files(name)
        if work.empty and not files:
            return Waits("no node has written anything")  # perhaps there is no other
        if done_json(work.first.node) not in files and MANIFEST not in files:
            # Files first: on a full disk they make room for the note.
            mine = tuple(f"r{rank:05d}." for rank in work.first.node_ranks)
            self.root.delete_files(name, [file for file in files if file.lstrip(".").startswith(mine)])
        self.faults.hit("failed")
        if known.stale and done_json(work.first.node) in files:
            return Over()  # its part is there: whoever leads now may find it whole, and commit it
        if not work.alone:
            commit.give_up(self.root, name, work.first.node, known.told)
        elif MANIFEST not in files:
            self.root.remove_attempt(name)
        return Over()

    def roll(self, record: EpochRecord) -> Result:
        """Commit what dead leaders left."""
        rolled = commit.roll_forward(
            self.root, self.config.run_id, since=record.since, before=record.epoch, faults=self.faults
        )
        for name in rolled:
            _log.info("checkpoint %s of an earlier start was whole: it is committed now", name)
        return Over()

    def _transfer(
        self, stage: str, work: NodeWork, sources: Mapping[str, Source], directory: str
    ) -> dict[str, FileRecord]:
        attempt = str(work.name)
        copied = self._copied.setdefault((stage, attempt), {})
        meter = self.meters[attempt] = Meter(work.size)
        meter.add(sum(record.size for record in copied.values()))
        storage = self.root.storage if stage == "root" or self.local is None else self.local.storage
        courtesy = Courtesy(lambda: self.closing or work.first.reason in _LAST)
        copier = Copier(self.limiter, meter, self.faults, stage, self._mappings, courtesy)
        copier.copy(storage, directory, sources, copied)
        return dict(copied)

    def _require_our_root(self, record: EpochRecord | None) -> None:
        """Whoever started the workers has noted their epoch in the root. What lacks the note is another place.

        Raises:
            CheckpointError: it lacks it.
        """
        if record is not None and not epochs.is_noted(self.root, record, launcher=self.node == 0):
            raise CheckpointError(
                f"{self.root.url} lacks the note of epoch {record.epoch} that this run has put there: is it mounted?"
            )

    def _local_sources(self, work: NodeWork) -> dict[str, Source]:
        assert self.local is not None
        return self.local.sources(work)

    def _vouch(self, work: NodeWork) -> None:
        key = attempt_key(work.name, done_json(work.first.node))
        self.faults.hit("done")
        try:
            self.root.create(key, work.done.to_bytes())
        except FileExistsError as error:
            # An earlier try may have arrived although its answer did not.
            if DoneRecord.from_bytes(self.root.read(key)).files != work.files:
                raise CheckpointError(
                    f"{key} is that of another keeper: do two launchers have the same node?"
                ) from error

    def _hold(self, work: NodeWork) -> bool:
        with _in_tier():
            held = scan.hold(work)
        self.faults.hit("draining")
        return held

    def _free(self, work: NodeWork) -> None:
        self.faults.hit("drained")
        with _in_tier():
            scan.free(work)
        self.faults.hit("freed")

    def sweep(self, record: EpochRecord) -> Result:
        """Look for what dead writers left: it goes when it was seen twice, long enough apart."""
        if self._leftovers is None or self._leftovers[0] != record.epoch:
            made = Leftovers(self.root, run_id=record.run_id, epoch=record.epoch, parent=record.parent)
            self._leftovers = record.epoch, made
        for name in self._leftovers[1].sweep():
            _log.info("%s, which was never committed, is deleted", name)
        return Swept()

    def _is_newest(self, known: Known) -> bool:
        return 0 < epochs.newest(self.root) <= known.work.name.epoch  # none at all: the root is away

    def _point_latest(self, known: Known) -> None:
        try:
            if not self._is_newest(known):
                return
            self.root.write(LATEST, f"{known.attempt}\n".encode("ascii"))
        except OSError as error:
            _log.warning("checkpoint %s is committed, but %s was not updated: %s", known.attempt, LATEST, error)
        self.faults.hit("latest.written")


@contextlib.contextmanager
def _in_tier() -> Iterator[None]:
    """Full shared memory is not full storage: it passes."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"the memory tier can't be written: {error}") from error


@contextlib.contextmanager
def _from_memory(work: NodeWork) -> Iterator[None]:
    """Bytes that are not those that were sealed have made way for another snapshot's, or else are damaged."""
    try:
        yield
    except SourceError as error:
        if scan.is_still_held(work):
            raise
        raise SourceError("its memory was taken for another snapshot while it was copied") from error


def _in_memory(work: NodeWork) -> dict[str, Source]:
    found = work.sealed.items()
    return {file: Source(path, record, slot=file.endswith(".safetensors")) for file, (path, record) in found}
