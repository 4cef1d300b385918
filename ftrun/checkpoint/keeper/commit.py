"""The last steps of a save, on the node of rank 0: collect every node's word, compare, write the manifest.

The other nodes look for the manifest, or for a node's word that it gave up.
"""

from __future__ import annotations

import contextlib
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftrun import __version__
from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.keeper.disagreement import explain
from ftrun.checkpoint.keeper.votes import absent, some, splits
from ftrun.checkpoint.layout import MANIFEST, attempt_key, done_failed_json, is_done, is_given_up
from ftrun.checkpoint.manifest import FORMAT, BadManifestError, Manifest
from ftrun.checkpoint.records import DoneRecord
from ftrun.checkpoint.storage.base import IrregularError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ftrun.checkpoint.keeper.faults import Faults
    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.checkpoint.records import About, Word

_NUM_READERS = 16


@dataclass(frozen=True)
class Verdict:
    """What became of an attempt.

    Attributes:
        committed: it is a checkpoint; otherwise it will never be one.
        reason: why not.
        size: bytes of all its files.
        differ: tensors that differ between ranks.
        final: another save of the same state would be refused for the same reason.
        given_up: a node, or the leader in the place of one that is lost, has said that it won't be one.
    """

    committed: bool
    reason: str = ""
    size: int = 0
    differ: tuple[str, ...] = ()
    final: bool = False
    given_up: bool = False


@dataclass
class Ballot:
    """The nodes' words on one attempt that have been read so far. One thread uses it.

    Attributes:
        root: the checkpoint root.
        name: the attempt.
        faults: scripted ones.
        done: records by file.
    """

    root: Root
    name: AttemptName
    faults: Faults
    done: dict[str, DoneRecord] = field(default_factory=dict)

    def look(self, *, leads: bool, fence: Callable[[], None] = lambda: None) -> Verdict | str:
        """Look whether it is decided, and on the leading node decide it once every rank has spoken.

        Args:
            leads: this is the leading node.
            fence: called before anything is committed; what it raises keeps it from that.

        Returns:
            The verdict, or what is still missing.

        Raises:
            OSError: the storage failed.
        """
        files = self.root.files(self.name)
        if MANIFEST in files:
            # Whoever wrote it may have ended before its name was durable.
            self.root.sync_attempt(self.name)
            manifest = self._manifest()
            return f"{MANIFEST} is not whole" if manifest is None else Verdict(True, size=manifest.size)
        given_up = sorted(filter(is_given_up, files))
        if given_up:
            return Verdict(False, "; ".join(self._reason(file) for file in given_up[:8]), given_up=True)
        if not leads:
            return f"there is still no {MANIFEST} from the node of rank 0: look into its log"
        self.read(filter(is_done, files))
        return self._decide(fence)

    def _decide(self, fence: Callable[[], None]) -> Verdict | str:
        words = {rank: word for record in self.done.values() for rank, word in record.words.items()}
        about = next((record.about for record in self.done.values() if record.about is not None), None)
        if about is None:
            return "there is still no done record"
        waiting = absent(words, about.world_size)
        if waiting:
            return f"there is still no done record for the node of rank {some(waiting)}: look into the logs there"
        refused = self._refusal(words, about)
        if refused is not None:
            return refused
        fence()
        return self._commit(about)

    def _refusal(self, words: Mapping[int, Word], about: About) -> Verdict | None:
        foreign = sorted(set(words) - set(range(about.world_size)))
        if foreign:
            return Verdict(False, f"rank {some(foreign)} is none of its {about.world_size} ranks")
        found = splits(words)
        if not found:
            return None
        reason, differ = explain(self.root, self.name, found)
        # Of tensors that differ each rank stores its own the next time; ranks at different positions stay there.
        return Verdict(False, reason, differ=differ, final=any(not split.ranks for split in found))

    def _commit(self, about: About) -> Verdict:
        manifest = manifest_of(self.name, about, self.done.values())
        # The directory's own name must be durable before anything in it counts as committed.
        self.root.sync_attempts()
        self.faults.hit("manifest")
        try:
            self.root.create(attempt_key(self.name, MANIFEST), manifest.to_bytes())
        except FileExistsError:
            written = self._manifest()
            if written is None:
                raise
            manifest = written
        self.faults.hit("manifest.written")
        return Verdict(True, size=manifest.size)

    def _manifest(self) -> Manifest | None:
        """The manifest, None while it isn't whole: without links on the filesystem it is visible while it grows."""
        with contextlib.suppress(FileNotFoundError, BadManifestError):
            return Manifest.from_bytes(self.root.read(attempt_key(self.name, MANIFEST)))
        return None

    def read(self, files: Iterable[str]) -> None:
        """Read the nodes' words that aren't known yet; those that aren't whole yet are left for another time."""
        fresh = [file for file in files if file not in self.done]
        if len(fresh) < 8:
            records = list(map(self._record, fresh))
        else:
            with ThreadPoolExecutor(_NUM_READERS, "ftrun-done") as pool:
                records = list(pool.map(self._record, fresh))
        self.done.update({file: record for file, record in zip(fresh, records, strict=True) if record is not None})

    def _record(self, file: str) -> DoneRecord | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return DoneRecord.from_bytes(self.root.read(attempt_key(self.name, file)))
        return None

    def _reason(self, file: str) -> str:
        try:
            document = json.loads(self.root.read(attempt_key(self.name, file)))
            return f"node {document['node']} gave up: {document['reason']}"
        except (OSError, ValueError, KeyError, TypeError):
            return f"a node gave up ({file})"


def manifest_of(name: AttemptName, about: About, records: Collection[DoneRecord]) -> Manifest:
    """The manifest of an attempt for which every node has spoken."""
    return Manifest(
        format=FORMAT,
        ftrun=__version__,
        torch=about.torch,
        python=platform.python_version(),
        run_id=about.run_id,
        epoch=name.epoch,
        attempt=str(name),
        parent=about.parent,
        step=about.step,
        total=about.total,
        world_size=about.world_size,
        nodes=len(records),
        reason=about.reason,
        data=about.data,
        files={file: record for each in records for file, record in each.files.items()},
        written_at=epochs.now(),
    )


def give_up(root: Root, name: AttemptName, node: int, reason: str) -> None:
    """Promise that this node will never finish an attempt. Nothing where it is committed; again is no error.

    Raises:
        OSError: it can't be written.
    """
    if root.size(attempt_key(name, MANIFEST)) is not None:
        return
    key = attempt_key(name, done_failed_json(node))
    with contextlib.suppress(FileExistsError):
        try:
            root.create(key, json.dumps({"node": node, "reason": reason}).encode())
        except FileExistsError:
            raise
        except OSError:
            # An empty note says the same, and needs no block of a full disk: without it the others wait in vain.
            root.create(key, b"")


def roll_forward(root: Root, run_id: str, *, since: int, before: int, faults: Faults) -> list[AttemptName]:
    """Commit what a dead leader left: attempts of earlier epochs for which every node has spoken.

    Args:
        root: the checkpoint root.
        run_id: identity of the run; other runs' attempts are left alone.
        since: epoch at which the lineage began.
        before: epoch that runs now.
        faults: scripted ones.

    Returns:
        The attempts that are checkpoints now. Only those count that are newer than every commit of their lineage.

    Raises:
        OSError: the storage failed.
    """
    done = []
    bad = set(root.bad())
    for name in root.attempts():
        if name.epoch < since:
            break
        if name.epoch >= before or name in bad:
            continue
        # What can't be looked into, or has something odd in a file's place, is for the reader to explain.
        with contextlib.suppress(IrregularError, PermissionError):
            files = root.files(name)
            if MANIFEST in files:
                if reader.inspect(root, name).status == "committed":
                    break
            elif _is_rollable(root, name, files, run_id, faults):
                done.append(name)
    return done


def _is_rollable(root: Root, name: AttemptName, files: Mapping[str, int], run_id: str, faults: Faults) -> bool:
    if any(map(is_given_up, files)) or not any(map(is_done, files)):
        return False
    verdict = finish(Ballot(root, name, faults), files, run_id)
    return isinstance(verdict, Verdict) and verdict.committed


def finish(ballot: Ballot, files: Mapping[str, int], run_id: str) -> Verdict | str:
    """Commit an attempt in a leader's place, if every node has spoken and what they spoke of is still there.

    Args:
        ballot: of the attempt.
        files: what lies under its name.
        run_id: identity of the run.

    Returns:
        The verdict, or what is still missing.

    Raises:
        OSError: the storage failed.
    """
    ballot.read(filter(is_done, files))
    for record in ballot.done.values():
        if record.about is None or record.about.run_id != run_id:
            return Verdict(False, "a part of it belongs to another run")
        if any(files.get(file) != each.size for file, each in record.files.items()):
            return "files that a node has spoken of are missing"
    return ballot.look(leads=True)
