"""MANIFEST.json: the file that makes an attempt a checkpoint. It names every file, its size and checksums."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ftrun.checkpoint.checksums import FileRecord
from ftrun.checkpoint.layout import MANIFEST
from ftrun.checkpoint.sealed import UnsealedError, seal, unseal
from ftrun.errors import UsageError

FORMAT = 2
"""Version of everything below a checkpoint root. A reader refuses newer ones."""

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SEAL = "manifest_crc"


class BadManifestError(ValueError):
    """The bytes are no usable manifest; the text is the reason, fit to follow ``MANIFEST.json``."""


class NewerFormatError(UsageError):
    """A checkpoint of a newer ftrun: skipping it would lose work without a word."""


@dataclass(frozen=True)
class Manifest:
    """What was committed.

    Attributes:
        format: version of the layout.
        ftrun: version of ftrun that wrote it.
        torch: version of torch that wrote it.
        python: version of Python that wrote it.
        run_id: identity of the run.
        epoch: fencing epoch of the writers.
        attempt: name of the directory.
        parent: the checkpoint that the writers resumed from.
        step: number of finished steps in the state.
        total: number of steps that the run asked for, where it did.
        world_size: number of ranks that wrote.
        nodes: number of nodes that wrote.
        reason: why it was taken.
        data: data position, the same on all ranks.
        files: every file of the checkpoint by its name within the attempt, the manifest apart.
        written_at: UTC time, for people.
    """

    format: int
    ftrun: str
    torch: str
    python: str
    run_id: str
    epoch: int
    attempt: str
    parent: str | None
    step: int
    total: int | None
    world_size: int
    nodes: int
    reason: str
    data: dict[str, Any] | None
    files: dict[str, FileRecord]
    written_at: str

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content: canonical JSON, with ``manifest_crc`` as its last line."""
        document = dict(self.__dict__)
        document["files"] = {name: record.to_json() for name, record in self.files.items()}
        return seal(document, _SEAL)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read it back.

        Raises:
            BadManifestError: torn, empty, changed or not a manifest; the text says which.
            NewerFormatError: written by a newer ftrun.
        """
        try:
            document = unseal(data, _SEAL)
        except UnsealedError as error:
            raise BadManifestError(str(error)) from error
        _check_format(document)
        for name, check in _CHECKS.items():
            if name not in document or not check(document[name]):
                raise BadManifestError(f"has no proper {name!r}: {document.get(name)!r:.80}")
        known = {field.name for field in fields(cls)}
        document = {name: value for name, value in document.items() if name in known}
        return cls(**(document | {"files": _files(document["files"])}))


def _check_format(document: dict[str, Any]) -> None:
    version = document.get("format")
    if type(version) is not int or version < 1:
        raise BadManifestError(f"has no proper 'format': {version!r:.80}")
    if version > FORMAT:
        raise NewerFormatError(
            f"checkpoint {document.get('attempt')} was written by a newer ftrun ({document.get('ftrun')}, "
            f"format {version}; this one reads up to {FORMAT}): install it, or start over with --fresh"
        )


def _files(document: dict[str, Any]) -> dict[str, FileRecord]:
    for name in document:
        if not is_file_name(name):
            raise BadManifestError(f"lists {name!r}, which is no file of a checkpoint")
    try:
        return {name: FileRecord.from_json(record) for name, record in document.items()}
    except ValueError as error:
        raise BadManifestError(f"lists a file that can't be: {error}") from error


def is_file_name(name: object) -> bool:
    """Whether it names a file inside an attempt's directory: relative, not hidden, not the manifest."""
    return isinstance(name, str) and name != MANIFEST and all(map(_PART.fullmatch, name.split("/")))


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0; True and False are not numbers here."""
    return type(value) is int and value >= 0


def is_text(value: object) -> bool:
    """Whether it is a text with something in it."""
    return isinstance(value, str) and value != ""


def is_object(value: object) -> bool:
    """Whether it is a JSON object."""
    return isinstance(value, dict)


_CHECKS = {
    "ftrun": is_text,
    "torch": is_text,
    "python": is_text,
    "run_id": is_text,
    "epoch": is_count,
    "attempt": is_text,
    "parent": lambda value: value is None or is_text(value),
    "step": is_count,
    "total": lambda value: value is None or is_count(value),
    "world_size": lambda value: is_count(value) and value > 0,
    "nodes": lambda value: is_count(value) and value > 0,
    "reason": lambda value: isinstance(value, str),
    "data": lambda value: value is None or is_object(value),
    "files": is_object,
    "written_at": is_text,
}
