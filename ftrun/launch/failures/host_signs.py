"""What the kernel log and the memory counter of a host tell of a failure. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.launch.failures import xid
from ftrun.launch.failures.xid import Xid, XidClass

if TYPE_CHECKING:
    from collections.abc import Iterable

_OOM = re.compile(
    r"Killed process (\d+)|oom-kill:.*\bpid=(\d+)|oom_reaper: reaped process (\d+)|Kill process (\d+) .*sacrifice"
)
# Corrected errors are not here: a machine corrects some every day.
_HARDWARE = [
    ("the processor or the memory", r"Machine check(?! events logged)|mce: .*(Uncorrected|Fatal|Processor context)"),
    ("the processor or the memory", r"\[Hardware Error\].*(Uncorrected|Fatal|Deferred|UE\b)"),
    ("the memory", r"EDAC .*\bUE\b|Memory failure: .*(Killing|hardware memory corruption)"),
    ("the PCIe bus", r"(AER|PCIe Bus Error).*(Uncorrect|Fatal)|pciehp.*(Link Down|Card not present)"),
    ("a GPU", r"NVRM: (?!Xid).*(fallen off the bus|GPU is lost)|GPU at PCI.*has been lost"),
    ("an NVLink switch", r"SXid .*(?<!Non-)(?<!Non)\bFatal\b"),
    ("a network adapter", r"mlx\w* .*(health compromised|Link down|fatal|hardware error|miss count|timeout)"),
    ("a network adapter", r"(NIC )?Link is Down|NETDEV WATCHDOG|\bib\d+: .*(link (down|failure)|port .*down)"),
    ("the processor or its cooling", r"temperature above threshold|thermal.*(critical|shutting down)"),
]
_STORAGE = re.compile(
    r"I/O error|critical (medium|target|space allocation) error|Remounting filesystem read-only|EXT4-fs error"
    r"|XFS .*(Corruption|shutdown|shutting down)|nvme\w*: .*(timeout|I/O|controller is down|reset)"
    r"|(nfs|ceph|lustre|beegfs)\S*:? .*(not responding|timed out|hung|lost)|LustreError|server \S+ not responding",
    re.IGNORECASE,
)
_HARDWARE_PATTERNS = [(what, re.compile(pattern, re.IGNORECASE)) for what, pattern in _HARDWARE]
# Where in the kernel a process sleeps that waits for storage.
_WAITS_FOR_STORAGE = re.compile(
    r"nfs|rpc_|ceph|lustre|ll_|cl_sync|fuse|gpfs|cxi|beegfs|blk_|bio_|io_schedule|folio_wait|wait_on_page|jbd2|xfs|ext4"
    r"|request_wait_answer|balance_dirty"
)


@dataclass(frozen=True)
class HostSigns:
    """What a host's log says.

    Attributes:
        killed_for_memory: pids that the kernel killed for memory; the host's numbers.
        xids: reports of the GPU driver, in order.
        hardware: each as what is at fault and the line that says so.
        storage: lines that speak of file systems and disks.
    """

    killed_for_memory: tuple[int, ...]
    xids: tuple[Xid, ...]
    hardware: tuple[tuple[str, str], ...]
    storage: tuple[str, ...]

    def blaming(self, pids: Iterable[int], *, on_gpu: bool) -> tuple[str, int | None] | None:
        """The first sign that a device is at fault: what it says, and the pid that it names, if it is one of ours.

        Args:
            pids: processes of this attempt.
            on_gpu: what happened is something that a faulty GPU does; only then ambiguous codes count.
        """
        own = set(pids)
        ranked = sorted(self.xids, key=lambda each: (each.pid not in own, each.family is not XidClass.HARDWARE))
        for each in ranked:
            pid = each.pid if each.pid in own else None
            # A device that serves another job is none of ours; but numbers differ in a container, so an error
            # of our own on a GPU makes it ours.
            ours = pid is not None or each.pid is None or on_gpu
            if ours and (each.family is XidClass.HARDWARE or (each.family is XidClass.AMBIGUOUS and on_gpu)):
                return str(each), pid
        for what, line in self.hardware:
            return f"the kernel reports trouble with {what}: {line}", None
        return None


def read(lines: Iterable[str]) -> HostSigns:
    """Read a kernel log."""
    lines = tuple(lines)
    killed = [int(next(group for group in match.groups() if group)) for match in map(_OOM.search, lines) if match]
    return HostSigns(
        killed_for_memory=tuple(dict.fromkeys(killed)),
        xids=tuple(xid.find(lines)),
        hardware=tuple((what, line) for line in lines if (what := _hardware(line))),
        storage=tuple(line for line in lines if _STORAGE.search(line)),
    )


def _hardware(line: str) -> str:
    return next((what for what, pattern in _HARDWARE_PATTERNS if pattern.search(line)), "")


def waits_for_storage(state: str, waits_in: str) -> bool:
    """Whether a process sleeps beyond the reach of signals, in the kernel's code for file systems and disks."""
    return state == "D" and _WAITS_FOR_STORAGE.search(waits_in) is not None
