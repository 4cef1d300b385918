"""Single requests of a driver: each either does the whole of what it is for, or raises."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any

from ftrun import credentials
from ftrun.errors import CheckpointError, FtrunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftrun.checkpoint.storage.base import Source
    from ftrun.checkpoint.storage.retry import Life

_PART = 32 * 2**20  # small enough to be through in time on a slow line
_MOST_PARTS = 9000  # S3 takes 10,000


def exists(files: Any, path: str) -> bool:
    """As the driver's own, which takes any error for a no."""
    try:
        files.info(path)
    except FileNotFoundError:
        return False
    return True


def create(files: Any, path: str, data: bytes) -> None:
    """Store a small file unless there is one, as far as the store can do both at once. Who won is not said."""
    try:
        files.pipe_file(path, data, mode="create")
    except (TypeError, NotImplementedError):
        files.pipe_file(path, data)
    except FileExistsError:
        return  # what lies there is compared next
    except OSError as error:
        # Stores that look like S3 needn't know conditional writes.
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP):
            raise
        files.pipe_file(path, data)


class SourceFailed(FtrunError):
    """What was to be stored can't be had: nothing that the store could mend. Its cause says why."""


def upload(files: Any, path: str, source: Source, size: int, life: Life) -> None:
    """Store a large file, or nothing of it where the store shows files when they are whole."""
    file = files.open(path, "wb", block_size=max(_PART, -(-size // _MOST_PARTS)))
    written = 0
    try:
        for view in _passed(source):
            life.beat()
            file.write(view)
            written += len(view)
        if written != size:
            raise ValueError(f"{path} is to have {size} bytes, and its source gave {written}")
        life.beat()
        file.close()
    except BaseException:
        _discard(file)
        raise


def _passed(source: Source) -> Iterator[memoryview]:
    try:
        yield from source()
    except Exception as error:  # the source's own, whatever it is
        raise SourceFailed(str(error)) from error


def _discard(file: Any) -> None:
    """Drop an upload. Merely closing the file would complete it with what it has."""
    with contextlib.suppress(Exception):  # the upload has failed already; what its remains say is of no use
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True


def translated(error: Exception, what: str) -> Exception:
    """The error as one that says what to do, where it is one of those that users cause."""
    if credentials.missing(error):
        return PermissionError(errno.EACCES, f"no valid credentials: {error}", what)
    if isinstance(error, PermissionError) and not isinstance(error, CheckpointError):
        return PermissionError(errno.EACCES, f"access was denied: {error}", what)
    if type(error).__name__ == "ParamValidationError":  # a bucket's name that can't be one
        return OSError(errno.EINVAL, str(error).replace("\n", " "), what)
    if isinstance(error, NotImplementedError):
        return OSError(errno.EROFS, f"this kind of storage can't do that ({error})", what)
    return error
