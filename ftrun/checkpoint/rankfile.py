"""What ranks and nodes write beside the tensors: ``r00003.json`` and ``done/n0001.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftrun.checkpoint.checksums import FileRecord, from_hex, to_hex
from ftrun.checkpoint.manifest import is_count, is_file_name, is_object, is_text
from ftrun.checkpoint.sealed import UnsealedError, seal, unseal


@dataclass(frozen=True)
class TensorEntry:
    """Where a rank's tensor lies.

    Attributes:
        file: name of the shard; that of rank 0 where the content is the same there.
        dtype: true dtype, ``float32``.
        shape: true shape.
        digest: BLAKE2b-128 of its bytes in hexadecimal; None where nobody compares (one rank only).
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    digest: str | None


@dataclass(frozen=True)
class RankRecord:
    """One rank's part of a checkpoint.

    Attributes:
        attempt: name of the attempt.
        rank: global rank that wrote it.
        step: number of finished steps in the state.
        total: number of steps that the run asked for.
        data: data position.
        tree: non-tensor state; the order of its keys carries meaning.
        tensors: where each tensor of the tree lies.
        files: the shards that this rank wrote.
    """

    attempt: str
    rank: int
    step: int
    total: int | None
    data: dict[str, Any] | None
    tree: Any
    tensors: dict[str, TensorEntry]
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        """The file's content.

        Raises:
            ValueError: the data position holds an infinite float or NaN.
            TypeError: the data position holds something that is no JSON.
        """
        document = dict(self.__dict__)
        document["tensors"] = {name: dict(entry.__dict__) for name, entry in self.tensors.items()}
        document["files"] = {name: record.to_json() for name, record in self.files.items()}
        return seal(document, sort=False)

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
        objects = (document["data"] or {}, document["tensors"], document["files"])
        if not all(map(is_count, numbers)) or not all(map(is_object, objects)):
            raise UnsealedError("has fields of the wrong type")
        tensors = {name: _entry(entry) for name, entry in document["tensors"].items()}
        return cls(**(document | {"tensors": tensors, "files": _records(document["files"])}))


@dataclass(frozen=True)
class DoneRecord:
    """A node's word that the files of its ranks are written and have their sizes.

    Attributes:
        node: number of the node.
        ranks: global ranks that run there.
        files: size in bytes and CRC32C of each file.
    """

    node: int
    ranks: tuple[int, ...]
    files: dict[str, tuple[int, int]]

    def to_bytes(self) -> bytes:
        """The file's content."""
        files = {name: {"size": size, "crc32c": to_hex(crc)} for name, (size, crc) in self.files.items()}
        return seal({"node": self.node, "ranks": list(self.ranks), "files": files})

    @classmethod
    def from_bytes(cls, content: bytes) -> DoneRecord:
        """Read it back.

        Raises:
            ValueError: it isn't whole, or no node's record.
        """
        document = unseal(content)
        try:
            files = {name: (item["size"], from_hex(item["crc32c"])) for name, item in document["files"].items()}
            return cls(document["node"], tuple(document["ranks"]), files)
        except (KeyError, TypeError, AttributeError) as error:
            raise UnsealedError("is no node's record") from error


def _records(document: dict[str, Any]) -> dict[str, FileRecord]:
    if not all(map(is_file_name, document)):
        raise UnsealedError("lists something that is no file of a checkpoint")
    return {name: FileRecord.from_json(record) for name, record in document.items()}


def _entry(document: object) -> TensorEntry:
    if not isinstance(document, dict) or set(document) != {"file", "dtype", "shape", "digest"}:
        raise UnsealedError("has a malformed tensor")
    shape, digest = document["shape"], document["digest"]
    sound = is_file_name(document["file"]) and is_text(document["dtype"]) and (digest is None or is_text(digest))
    if not sound or not isinstance(shape, list) or not all(map(is_count, shape)):
        raise UnsealedError("has a malformed tensor")
    return TensorEntry(document["file"], document["dtype"], tuple(shape), digest)
