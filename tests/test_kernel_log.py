from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import eventually

from ftrun.launch.evidence import kernel_log
from ftrun.launch.evidence.kernel_log import KernelLog

MATTERS = """\
Memory cgroup out of memory: Killed process 4242 (python3) total-vm:99kB, anon-rss:9kB, UID:0 pgtables:1kB
Out of memory: Killed process 4242 (python3) total-vm:99kB, anon-rss:9kB, file-rss:0kB, shmem-rss:0kB
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,oom_memcg=/a,task_memcg=/a,task=python3,pid=4242,uid=0
python3[4242]: segfault at 0 ip 00007f1a sp 00007fff error 4 in libc.so.6[167ad8,7f1ad6051000+156000] likely on CPU 0
traps: python3[4242] general protection fault ip:7f0 sp:7ff error:0 in libtorch_cpu.so[7f0+1]
traps: python3[4242] trap invalid opcode ip:7f0 sp:7ff error:0 in libtorch_cpu.so[7f0+1]
NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:5d:00): 31, pid=4242, name=python3, Ch 00000008, intr 00000000. MMU Fault
NVRM: GPU at PCI:0000:5d:00: GPU-12345678-1234-1234-1234-123456789abc
nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 44 egress non-posted PRIV error
blk_update_request: I/O error, dev nvme0n1, sector 1234 op 0x0:(READ)
Buffer I/O error on dev dm-0, logical block 5, async page read
critical medium error, dev sda, sector 5
EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python3: reading directory lblock 0
EXT4-fs (sda1): Remounting filesystem read-only
XFS (dm-0): Corruption detected. Unmount and run xfs_repair
nvme nvme0: I/O 5 QID 1 timeout, aborting
INFO: task python3:4242 blocked for more than 120 seconds.
watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:4242]
nfs: server 10.0.0.1 not responding, still trying
LustreError: 11-0: lustre-OST0001-osc-ffff: operation ost_write to node 10.0.0.1@o2ib failed: rc = -107
mce: [Hardware Error]: Machine check events logged
mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 1: be00000000800400
EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0
Memory failure: 0x12345: Killing python3:4242 due to hardware memory corruption
pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0
nvidia 0000:5d:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer
mlx5_core 0000:9f:00.0: poll_health:825: Fatal error 1 detected
mlx5_core 0000:9f:00.0 ens1np0: Link down
NVRM: GPU 0000:5d:00.0: GPU is lost
NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 5 timed out
pcieport 0000:00:01.0: pciehp: Slot(1): Card not present
oom_reaper: reaped process 4242 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
CPU3: Core temperature above threshold, cpu clock throttled
""".splitlines()

DOES_NOT = """\
usb 1-1: new high-speed USB device number 2 using xhci_hcd
EXT4-fs (vda): mounted filesystem 00000000-0000-0000-0000-000000000000 r/w without journal.
nvidia-nvlink: Nvlink Core is being initialized, major device number 510
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15
mce: CPU supports 32 MCE banks
Code: e1 ff ff ff c3 66 2e 0f 1f 84 00 00 00 00 00
docker0: port 1(veth0) entered disabled state
nfs: server 10.0.0.1 OK
python3 (4242): drop_caches: 3
pcieport 0000:00:01.0: AER: enabled with IRQ 25
Kernel command line: console=ttyS0 panic=1
""".splitlines()


@pytest.mark.parametrize("line", MATTERS)
def test_what_matters(line: str) -> None:
    assert kernel_log.matters(line)
    for prefix in (
        "",
        "6,347,11670850986,-;",
        "[11670.850986] ",
        "<6>[   11.850986] ",
        "Jan  5 10:00:00 node kernel: ",
    ):
        assert kernel_log.matters(prefix + line)
        assert kernel_log.text_of(prefix + line) == line


@pytest.mark.parametrize("line", DOES_NOT)
def test_what_does_not_matter(line: str) -> None:
    assert not kernel_log.matters(line)


def test_a_file_is_read_from_the_mark_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("Killed process 1 (before)\n")
    log = KernelLog.from_environment({"FTRUN_KMSG": str(path)})
    log.mark()
    assert log.lines() == ()
    with path.open("a") as file:
        file.write("Killed process 2 (a)\nnothing\nKilled process 3 (b)\nKilled process 2 (a)\n")
    assert log.lines() == ("Killed process 2 (a)", "Killed process 3 (b)")
    with path.open("a") as file:
        file.write("Killed process 4 (c)\n")
    assert log.lines()[2:] == ("Killed process 4 (c)",)  # and what was seen before is still there
    log.mark()
    assert log.lines() == ()


def test_a_file_that_is_replaced_by_a_shorter_one_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("x" * 1000)
    log = KernelLog(path)
    log.mark()
    path.write_text("Killed process 2 (a)\n")
    assert log.lines() == ("Killed process 2 (a)",)


def test_a_file_that_appears_later(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "kmsg")
    log.mark()
    assert log.lines() == ()
    (tmp_path / "kmsg").write_text("Killed process 2 (a)\n")
    assert log.lines() == ("Killed process 2 (a)",)


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(path)
    log.mark()
    path.write_text("".join(f"Killed process {n} (a)\n" for n in range(200_000)))
    assert log.lines() == tuple(f"Killed process {n} (a)" for n in range(200_000 - kernel_log.MOST_LINES, 200_000))


def test_binary_and_endless_lines(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(path)
    log.mark()
    path.write_bytes(b"\xff\x00" * 1000 + b"\nKilled process 5 \x1b[31m" + b"y" * 10**5 + b"\n")
    (line,) = log.lines()
    assert line.startswith("Killed process 5 yyy")
    assert len(line) < 1000


@pytest.mark.parametrize("name", ["/nowhere/kmsg", "/", "/dev/null", "/dev/zero", "/proc/self/mem"])
def test_strange_places_give_nothing(name: str) -> None:
    log = KernelLog(Path(name))
    assert log.lines() == ()  # without a mark
    log.mark()
    assert log.lines() == ()
    log.close()
    log.close()


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kmsg")
    log = KernelLog(tmp_path / "kmsg")
    log.mark()
    assert log.lines() == ()


def test_a_log_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = tmp_path / "kmsg"
    path.touch(mode=0)
    log = KernelLog(path)
    log.mark()
    assert log.lines() == ()


def test_a_real_crash_is_in_the_real_log() -> None:
    """Without ftrun's own handler: a process that handles the signal is no news to the kernel."""
    if not can_read():
        pytest.skip("/dev/kmsg can't be read here")
    if Path("/proc/sys/debug/exception-trace").read_text().strip() != "1":
        pytest.skip("this kernel doesn't log crashes")
    log = KernelLog()
    log.mark()

    def seen() -> bool:
        process = subprocess.Popen(
            [sys.executable, "-c", "import ctypes; ctypes.string_at(0)"], stderr=subprocess.DEVNULL
        )
        assert process.wait(60) == -signal.SIGSEGV
        return any(f"[{process.pid}]: segfault at 0 " in line for line in log.lines(1.0))

    eventually(seen, what="a crash in the log")  # of many in a few seconds, whosesoever they are, it tells of some
    log.close()


def can_read() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
