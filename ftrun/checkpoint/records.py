"""What ranks and nodes say about a checkpoint besides its bytes: ``r00003.json``, ``done/n0001.json``, and the seal.

None of it needs torch: the keeper reads and writes it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.checksums import FileRecord
from ftrun.checkpoint.manifest import is_count, is_file_name, is_object, is_text
from ftrun.checkpoint.plan.pieces import Box, Piece, ranks_of
from ftrun.checkpoint.sealed import UnsealedError, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a rank's tree.

    Attributes:
        dtype: ``float32``.
        shape: of the whole tensor, however many ranks share it.
        ranks: ranks whose records hold the pieces that make it up, as :func:`ranks_text` writes them. This rank's
            own number alone means that the tensor is this rank's own, whatever others hold under the same name.
        digest: CRC32C of its bytes in hexadecimal where ranks hold the same content on trust; None elsewhere.
    """

    dtype: str
    shape: tuple[int, ...]
    ranks: str
    digest: str | None = None

    def to_json(self) -> list[Any]:
        """As JSON."""
        return [self.dtype, list(self.shape), self.ranks, self.digest]


@dataclass(frozen=True)
class RankRecord:
    """One rank's part of a checkpoint: ``r00003.json``.

    Attributes:
        attempt: name of the attempt.
        rank: global rank that wrote it.
        step: number of finished steps in the state.
        total: number of steps that the run asked for.
        data: data position.
        tree: non-tensor state, from :func:`ftrun.checkpoint.state.encode`; the order of its keys carries meaning.
        tensors: the tensors that the tree names.
        pieces: what this rank's file holds, in the order of their offsets.
    """

    attempt: str
    rank: int
    step: int
    total: int | None
    data: dict[str, Any] | None
    tree: Any
    tensors: Mapping[str, TensorEntry]
    pieces: tuple[Piece, ...]

    def to_bytes(self) -> bytes:
        """The file's content.

        Raises:
            ValueError: the data position holds an infinite float or NaN.
            TypeError: the data position holds something that is no JSON.
        """
        tensors = {name: entry.to_json() for name, entry in self.tensors.items()}
        pieces = [each.to_json() for each in self.pieces]
        return seal(self.head() | {"tree": self.tree, "tensors": tensors, "pieces": pieces}, sort=False)

    def head(self) -> dict[str, Any]:
        """What the file says first: all but the tree and the tensors."""
        names = ("attempt", "rank", "step", "total", "data")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_bytes(cls, content: bytes) -> RankRecord:
        """Read it back.

        Raises:
            ValueError: it isn't whole, or no rank's record; the text says why.
        """
        document = unseal(content)
        if set(document) != set(cls.__dataclass_fields__):
            raise UnsealedError("is no rank's record")
        numbers = (document["rank"], document["step"], document["total"] or 0)
        objects = (document["data"] or {}, document["tensors"])
        if not all(map(is_count, numbers)) or not all(map(is_object, objects)):
            raise UnsealedError("has fields of the wrong type")
        try:
            tensors = {name: _entry(*fields) for name, fields in document["tensors"].items()}
            pieces = tuple(_piece(*fields) for fields in document["pieces"])
        except (TypeError, ValueError) as error:
            raise UnsealedError(f"has a malformed tensor: {error}") from error
        return cls(**(document | {"tensors": tensors, "pieces": pieces}))


@dataclass(frozen=True)
class Word:
    """What a rank says in short, so that a commit can be refused when ranks don't fit together.

    Attributes:
        position: digest of step, total and data position; the same on all ranks.
        groups: for each set of ranks that shares tensors, by the text of its ranks, a digest of what they share
            (names, types, shapes, and contents where they are held on trust); the same on all ranks of the set.
    """

    position: str
    groups: dict[str, str]


@dataclass(frozen=True)
class Seal:
    """That a slot of the memory tier holds a rank's whole part of a snapshot.

    Attributes:
        attempt: name of the attempt to save.
        run_id: identity of the run.
        rank: global rank.
        world_size: number of ranks.
        node: number of the node.
        node_ranks: ranks of this node.
        step: number of finished steps in the state.
        total: number of steps that the run asked for.
        reason: why it was taken.
        data: data position.
        parent: the checkpoint that the attempt resumed from.
        torch: version of torch.
        run_attempt: number of the attempt to run, for events.
        files: absolute path of each file, and what its bytes are, by its name within the checkpoint.
        word: for the commit.
        sealed_at: seconds since 1970.
    """

    attempt: str
    run_id: str
    rank: int
    world_size: int
    node: int
    node_ranks: tuple[int, ...]
    step: int
    total: int | None
    reason: str
    data: dict[str, Any] | None
    parent: str | None
    torch: str
    run_attempt: int
    files: dict[str, tuple[str, FileRecord]]
    word: Word
    sealed_at: float

    def to_bytes(self) -> bytes:
        """The file's content."""
        return seal(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        files = {name: [path, record.to_json()] for name, (path, record) in self.files.items()}
        return dict(self.__dict__) | {"files": files, "word": dict(self.word.__dict__)}

    @classmethod
    def from_bytes(cls, content: bytes) -> Seal:
        """Read it back.

        Raises:
            ValueError: it isn't whole, or no seal.
        """
        return cls.from_json(unseal(content))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Seal:
        """Read it back.

        Raises:
            ValueError: it is no seal.
        """
        try:
            files = {file: (str(path), FileRecord.from_json(each)) for file, (path, each) in document["files"].items()}
            fields = {"files": files, "word": Word(**document["word"]), "node_ranks": tuple(document["node_ranks"])}
            return cls(**(document | fields))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnsealedError("is no seal") from error


@dataclass(frozen=True)
class About:
    """What a manifest says beside its files. Every node's record has it, so that any leader can commit.

    Attributes:
        run_id: identity of the run.
        world_size: number of ranks.
        step: number of finished steps in the state.
        total: number of steps that the run asked for.
        reason: why it was taken.
        data: data position.
        parent: the checkpoint that the attempt resumed from.
        torch: version of torch.
    """

    run_id: str
    world_size: int
    step: int
    total: int | None
    reason: str
    data: dict[str, Any] | None
    parent: str | None
    torch: str


@dataclass(frozen=True)
class DoneRecord:
    """A node's word that the files of its ranks are written and verified: ``done/n0001.json``.

    Attributes:
        node: number of the node.
        files: what each of its files is.
        words: what its ranks say, by rank.
        about: what the manifest will say.
    """

    node: int
    files: dict[str, FileRecord]
    words: dict[int, Word]
    about: About | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        files = {name: record.to_json() for name, record in self.files.items()}
        words = {str(rank): dict(word.__dict__) for rank, word in self.words.items()}
        about = self.about and dict(self.about.__dict__)
        return seal({"node": self.node, "files": files, "words": words, "about": about})

    @classmethod
    def from_bytes(cls, content: bytes) -> DoneRecord:
        """Read it back.

        Raises:
            ValueError: it isn't whole, or no node's record.
        """
        document = unseal(content)
        try:
            if not all(map(is_file_name, document["files"])):
                raise UnsealedError("lists something that is no file of a checkpoint")
            files = {name: FileRecord.from_json(record) for name, record in document["files"].items()}
            words = {int(rank): Word(**word) for rank, word in document["words"].items()}
            about = document.get("about")
            return cls(document["node"], files, words, None if about is None else About(**about))
        except (KeyError, TypeError, AttributeError) as error:
            raise UnsealedError("is no node's record") from error


def _entry(dtype: str, shape: list[int], ranks: str, digest: str | None) -> TensorEntry:
    if not is_text(dtype) or not _are_counts(shape) or not (digest is None or is_text(digest)):
        raise ValueError("type, shape or digest")
    ranks_of(ranks)
    return TensorEntry(dtype, tuple(shape), ranks, digest)


def _piece(tensor: str, offset: list[int], shape: list[int], start: int, stop: int, file: str, byte: int) -> Piece:
    if not _are_counts([*offset, *shape, start, stop, byte]) or len(offset) != len(shape):
        raise ValueError("a piece's numbers")
    if not isinstance(tensor, str) or not _is_file_name(file):
        raise ValueError("a piece's names")
    return Piece(tensor, Box(tuple(offset), tuple(shape)), start, stop, file, byte)


def _are_counts(values: list[Any]) -> bool:
    """Whether all are whole numbers from 0; at once, for a record has ten thousands of them."""
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


@lru_cache(maxsize=64)
def _is_file_name(name: object) -> bool:
    return is_file_name(name)
