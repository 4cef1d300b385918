"""The kernel log: what the kernel said, since the attempt began, of killed and crashed processes and of devices.

Read from ``/dev/kmsg``, or from the file that ``FTRUN_KMSG`` names: containers that have no ``/dev/kmsg`` can be given
the host's log as a file. Where neither can be read there are no lines. In a container the log is the host's: its
pids are the host's too, and it may speak of processes of others.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.launch.evidence.tail import read_at, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE = "FTRUN_KMSG"

MOST_LINES = 50

_DEVICE = Path("/dev/kmsg")
_RECORD = 16 << 10  # the kernel's longest is about 8 KiB
_LARGEST = 1 << 20

# Lines that matter, by what they speak of. Each pattern is held against lines of kernels and drivers in the tests.
_MATTERS = {
    "out of memory": r"Kill(ed)? process \d+|oom-kill:constraint=|oom_reaper: reaped process",
    "crashes": r"\[\d+\]: segfault at |\btraps: |general protection fault|\[\d+\]: unhandled exception",
    "GPUs": r"NVRM: (Xid|GPU at PCI|.*fallen off the bus|.*GPU is lost)|SXid|NVLink.*(error|fatal)",
    "disks": r"I/O error|critical (medium|target|space allocation) error|nvme\w*: .*(timeout|reset|I/O|is down)",
    "file systems": r"Remounting filesystem read-only|EXT4-fs error|XFS .*(Corruption|error|shutdown|shutting down)",
    "remote storage": r"not responding|LustreError|GPFS.*(error|unmount)|(nfs|ceph|beegfs)\S*:.*(error|out|hung|lost)",
    "stuck processes": r"blocked for more than \d+ seconds|soft lockup|hard LOCKUP|rcu.*stall",
    "processors": r"mce: .*(Uncorrected|Fatal|Processor context|CPU \d+:)|\[Hardware Error\]|Machine check",
    "memory": r"EDAC .*(UE|CE)\b|Memory failure",
    "PCIe": r"PCIe Bus Error|AER: .*error|pcieport.*(Uncorrect|Fatal)|pciehp.*(Link Down|Card not present)",
    "networks": r"mlx\w*.*(error|fatal|timeout|health|miss count)|Link (is )?down\b|NETDEV WATCHDOG"
    r"|\bib\d+: .*(link failure|port .*down)",
    "heat": r"temperature above threshold|thermal.*(critical|shutting down)",
}
_PATTERN = re.compile("|".join(_MATTERS.values()), re.IGNORECASE)
# What stands before the text: a record of /dev/kmsg, dmesg's time, or that of a log file.
_PREFIX = re.compile(r"\d+,\d+,\d+,[^;]*;|<\d+>(?:\[[ \d.]+\] )?|\[[ \d.]+\] |.{0,80}? kernel: (?:\[[ \d.]+\] )?")


def matters(line: str) -> bool:
    """Whether a line speaks of a killed or crashed process, of storage, or of a device in trouble."""
    return _PATTERN.search(line) is not None


def text_of(line: str) -> str:
    """A line without the number, the time and the priority before it."""
    return shown(_PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line)


class KernelLog:
    """Follows the log from a position on. Nothing here blocks, raises, or needs a right that the agent hasn't.

    Args:
        path: a device like ``/dev/kmsg``, or a plain file that grows.
    """

    def __init__(self, path: Path = _DEVICE) -> None:
        self._path = path
        self._device = -1
        self._position = 0
        self._found: deque[str] = deque(maxlen=MOST_LINES)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> KernelLog:
        """The one that ``FTRUN_KMSG`` names, or the kernel's."""
        return cls(Path(environment.get(VARIABLE) or _DEVICE))

    def mark(self) -> None:
        """Forget what has been said until now."""
        self.close()
        self._found.clear()
        try:
            status = self._path.stat()
            if stat.S_ISCHR(status.st_mode):
                self._device = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._device, 0, os.SEEK_END)
            self._position = status.st_size
        except OSError:
            self._position = 0

    def lines(self, seconds: float = 0.05) -> tuple[str, ...]:
        """The last of the lines since the mark that matter, without repetitions, oldest first.

        Args:
            seconds: of this thread's own work that reading may take; what is left is read by the next call. (By the
                clock, a loaded machine would have no time left for the first line.)
        """
        deadline = time.thread_time() + seconds
        for line in self._records(deadline) if self._device >= 0 else self._new_lines():
            if matters(line) and (text := text_of(line)) not in self._found:
                self._found.append(text)
        return tuple(self._found)

    def close(self) -> None:
        """Close the device. Another :meth:`mark` opens it again."""
        if self._device >= 0:
            os.close(self._device)
            self._device = -1

    def _records(self, deadline: float) -> Iterator[str]:
        """Records of the device; each read gives one."""
        while time.thread_time() < deadline:
            try:
                record = os.read(self._device, _RECORD)
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EINVAL, errno.EINTR):
                    continue  # records were overwritten before we came, or one is too long: on with the next
                return
            if not record:
                return
            # Below the text there may be lines with what the kernel knows of the device.
            yield record.decode(errors="replace").partition("\n")[0]

    def _new_lines(self) -> Iterator[str]:
        try:
            size = self._path.stat().st_size
        except OSError:
            return
        start = self._position if size >= self._position else 0  # a shorter file is a new one
        self._position = size
        data = read_at(self._path, max(start, size - _LARGEST), min(size - start, _LARGEST))
        yield from data.decode(errors="replace").splitlines()
