"""Four ranks in step, one of which falls in the way that ``--case`` names; the others fall with it, or wait.

Nothing here is a Session's: what ends a rank, and what its peers say, is what a plain training gives. Where a device or
the host is at fault, the kernel's line goes to the file that ``--kernel-log`` names, as the kernel would have written
it to its log, and the process then ends as such a process does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import stamps
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

STEPS = 60


class Fault:
    """What the faulty rank does: says something in the kernel log, perhaps lets go of its peers first, and falls."""

    def __init__(self, kernel_log: str, written: stamps.Stamps) -> None:
        self._kernel_log = Path(kernel_log)
        self._written = written

    def kernel(self, text: str, priority: int = 3) -> None:
        """A line as it stands in /dev/kmsg."""
        text = text.format(pid=os.getpid())
        with self._kernel_log.open("a") as file:
            file.write(f"{priority},{time.monotonic_ns() % 100_000},{time.monotonic_ns() // 1000},-;{text}\n")

    def cut(self) -> None:
        """Close every connection: the peers see it go, long before this process has ended."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    each.shutdown(socket.SHUT_RDWR)

    def die(self, number: signal.Signals) -> None:
        os.kill(os.getpid(), number)

    # One method for each class of Meta's table; see CLASSES in cause.py for what is nearest about it.

    def faulty_gpu(self) -> None:
        self.kernel("NVRM: Xid (PCI:0000:5d:00): 79, pid={pid}, name=python, GPU has fallen off the bus.")
        raise RuntimeError("CUDA error: unspecified launch failure")

    def hbm3(self) -> None:
        self.kernel("NVRM: Xid (PCI:0000:5d:00): 48, pid={pid}, name=python, An uncorrectable double bit error (DBE)")
        self.kernel("NVRM: Xid (PCI:0000:5d:00): 94, pid={pid}, name=python, Contained ECC error")
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def software_bug(self) -> None:
        [][len(os.environ)]

    def network(self) -> None:
        self.kernel("mlx5_core 0000:0c:00.0 ib0: Link is Down", 4)
        self.cut()
        raise RuntimeError(
            "NCCL error: remote process exited or there was a network error. NET/IB: Got completion with "
            "status=IBV_WC_RETRY_EXC_ERR(12) opcode=0 len=0 vendor err 129 (transport retry counter exceeded)"
        )

    def maintenance(self) -> None:
        self.die(signal.SIGTERM)

    def sram(self) -> None:
        self.kernel("NVRM: Xid (PCI:0000:5d:00): 95, pid={pid}, name=python, Uncontained ECC error, SRAM")
        self.cut()
        time.sleep(0.3)  # its core is being written while the peers fall
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def gsp(self) -> None:
        self.kernel("NVRM: Xid (PCI:0000:5d:00): 119, pid={pid}, name=python, Timeout waiting for RPC from GSP0!")
        self.die(signal.SIGABRT)

    def nic(self) -> None:
        self.kernel("mlx5_core 0000:0c:00.0: poll_health:835: Fatal error 1 detected")
        raise RuntimeError("ncclSystemError: ibv_reg_mr_iova2 failed with error Input/output error")

    def watchdog(self) -> None:
        threading.Event().wait()  # its peers' collective times out, and they fall

    def corruption(self) -> None:
        raise FloatingPointError("loss is nan at step 60")

    def thermal(self) -> None:
        self.kernel("NVRM: GPU at PCI:0000:5d:00: temperature above threshold, clocks throttled", 4)
        time.sleep(1.0)
        self.kernel("NVRM: Xid (PCI:0000:5d:00): 79, pid={pid}, name=python, GPU has fallen off the bus.")
        self.die(signal.SIGKILL)

    def ssd(self) -> None:
        self.kernel("nvme nvme0: I/O 12 QID 3 timeout, aborting")
        self.kernel("blk_update_request: critical medium error, dev nvme0n1, sector 6234")
        raise OSError(5, "Input/output error", "/data/shard-00017.tar")

    def power(self) -> None:
        self.die(signal.SIGKILL)

    def chassis(self) -> None:
        self.die(signal.SIGSTOP)

    def io_board(self) -> None:
        self.kernel("pcieport 0000:64:00.0: AER: Uncorrected (Fatal) error received: 0000:64:00.0")
        self.kernel("pcieport 0000:64:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer")
        self.die(signal.SIGBUS)

    def dependency(self) -> None:
        ctypes.CDLL("libcudnn_of_another_version.so.9")

    def cpu(self) -> None:
        self.kernel("mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 0: b200000000000175", 0)
        self.die(signal.SIGILL)

    def system_memory(self) -> None:
        self.kernel("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", 0)
        self.kernel("Memory failure: 0x3f7c2: Killing python:{pid} due to hardware memory corruption", 0)
        self.die(signal.SIGBUS)


@record
def main(options: argparse.Namespace) -> None:
    written = stamps.Stamps(options.out)
    # The peers of a rank that says nothing more give up as NCCL's watchdog does, though not after ten minutes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=3 if options.case == "watchdog" else 1800))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fault = Fault(options.kernel_log, written)
    for step in range(1, 1_000_000):
        if step == STEPS and written.rank == options.rank:
            written.write("fault", step)
            getattr(fault, options.case)()
        time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        written.write("step", step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--kernel-log", required=True)
    main(parser.parse_args())
