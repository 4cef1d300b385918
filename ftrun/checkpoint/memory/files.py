"""Small files of the memory tier: replaced in one step, and on a disk where shared memory is full. No torch.

Where there is no room for one, its content goes into a file below the system's directory for temporary files, and a
link stands in the tier: that takes no room in shared memory. Readers follow it without noticing.

Something else that has the name of one of these files, a directory or a named pipe, can't be ours: nobody waits for it,
and whoever needs the name moves it aside and says so.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOREIGN = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def put(path: Path, content: bytes) -> None:
    """Write or replace a small file in one step. Nothing is made durable: it is memory.

    Raises:
        OSError: the directory is gone, or there is no room on the disk either.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    before = _elsewhere(path, _kind(path))
    try:
        after = _write(path, temporary, content)
        temporary.replace(path)
    except OSError:
        remove(temporary)
        raise
    if before is not None and before != after:
        _drop(before)


def read(path: Path) -> bytes:
    """All of a small file. Whatever else has its name is not waited for.

    Raises:
        FileNotFoundError: there is none.
        OSError: it can't be read, or is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file if it is there, and what it stands for elsewhere."""
    elsewhere = _elsewhere(path, _kind(path))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
    if elsewhere is not None:
        _drop(elsewhere)


def make_way(path: Path, *, link: bool = False) -> None:
    """Move aside what has a file's name and is none.

    Args:
        path: the name.
        link: a link is none either.

    Raises:
        OSError: it can't be moved.
    """
    if stat.S_ISLNK(_kind(path)) and link:
        _put_aside(path, "a link")


def make_directory(path: Path) -> None:
    """Make a directory for this user only; what else has its name is moved aside.

    Raises:
        OSError: it can't be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        _put_aside(path, "no directory")
        path.mkdir(mode=0o700)


def lies_elsewhere(path: Path) -> bool:
    """Whether a link stands for a file that :func:`put` has written elsewhere, for want of room."""
    return _elsewhere(path, stat.S_IFLNK) is not None


def drop_elsewhere(directory: Path) -> None:
    """Remove what lies elsewhere for links in a directory or below it, before that is removed itself."""
    for parent, _, names in os.walk(directory):
        for name in names:
            elsewhere = _elsewhere(Path(parent, name), stat.S_IFLNK)
            if elsewhere is not None:
                _drop(elsewhere)


def own(directory: Path) -> None:
    """Make a directory for this user only, or see that one is there which is no other user's; root may have made it.

    Raises:
        PermissionError: it is another user's, or no directory: what that one puts there would be taken for ours.
        OSError: it can't be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EPERM, "it is a link, and must be a directory: remove it", str(directory))
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            errno.EPERM,
            f"it belongs to user {status.st_uid}, not to user {os.geteuid()}: have that user remove it",
            str(directory),
        )


def _write(path: Path, temporary: Path, content: bytes) -> Path | None:
    """Write the temporary file, which may be a link; what it leads to then."""
    try:
        temporary.write_bytes(content)
    except OSError as error:
        if error.errno not in _FULL:
            raise
    else:
        return None
    temporary.unlink()
    spare = _spare_of(path)
    own(_spare_root().parent)
    own(_spare_root())
    own(spare.parent)
    new = spare.with_name(f".{spare.name}.{os.getpid()}.tmp")
    try:
        new.write_bytes(content)
        new.replace(spare)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    temporary.symlink_to(spare)
    return spare


def _kind(path: Path) -> int:
    """What has a file's name: a file, a link or a socket, or 0 for nothing; anything else is moved aside."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if kind not in _FOREIGN:
        return kind
    _put_aside(path, _FOREIGN[kind])
    return 0


def _put_aside(path: Path, what: str) -> None:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.foreign")
    with contextlib.suppress(FileNotFoundError):  # somebody else was faster
        path.rename(aside)
        said = "ftrun: %s is %s, which ftrun never puts there: it was moved to %s, and goes when the run ends"
        _log.warning(said, path, what, aside)


def _elsewhere(path: Path, kind: int) -> Path | None:
    """The file outside shared memory that one in it stands for; None for a plain one, or none."""
    if not stat.S_ISLNK(kind):
        return None
    try:
        target = Path(os.readlink(path))
    except OSError:
        return None
    return target if target.parent.parent.name == _SPARE else None


def _drop(spare: Path) -> None:
    with contextlib.suppress(OSError):  # others in its directory
        spare.unlink(missing_ok=True)
        spare.parent.rmdir()


def _spare_root() -> Path:
    return Path(tempfile.gettempdir()) / f"ftrun-{os.geteuid()}" / _SPARE


def _spare_of(path: Path) -> Path:
    # Short, for tmpfs keeps a link of up to 127 bytes where it needs no room.
    directory, name = (_digest(os.fsencode(each)) for each in (path.parent.absolute(), path.name))
    return _spare_root() / directory / name


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=6).hexdigest()


_SPARE = "spare"
