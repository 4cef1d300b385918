"""A switch whose packets take their time, or are lost: what the kernel's bridge can't do everywhere.

    python slow_switch.py TUN PID/MAC/ADDRESS,ADDRESS ...    one node each: a process that holds it, its network card

TUN is the kernel's device for that, ``/dev/net/tun``.

Each node gets a card ``eth0`` whose frames come here. Standard input says what happens to them, at any time: a line
``DELAY LOSS``, milliseconds each way and a share from 0 to 1. ``ready`` is printed when all cards are there. The switch
ends when its input does.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 2**16


def card(tun: str, pid: int, mac: str, addresses: list[str]) -> int:
    """Put a card into a node. Returns the descriptor of what is plugged into it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/proc/{pid}/ns/net") as other:
        if libc.setns(other.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            plug = os.open(tun, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(plug, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP | _IFF_NO_PI))
            lines = [f"link set eth0 address {mac}", *(f"addr add {each} dev eth0" for each in addresses)]
            batch = "".join(f"{line}\n" for line in [*lines, "link set eth0 up"])
            subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True, timeout=20)
        finally:
            libc.setns(own.fileno(), 0)
    return plug


def main() -> None:
    """Switch."""
    tun, *cards = sys.argv[1:]
    nodes = [each.split("/", 2) for each in cards]
    plugs = {bytes.fromhex(mac.replace(":", "")): card(tun, int(pid), mac, ips.split(",")) for pid, mac, ips in nodes}
    print("ready", flush=True)
    delay, loss = 0.0, 0.0
    waiting: list[tuple[float, int, int, bytes]] = []
    chance, count = random.Random(1), 0
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for each in select.select([0, *plugs.values()], [], [], pause)[0]:
            if each == 0:
                line = os.read(0, 100).decode().split()
                if not line:
                    return
                delay, loss = float(line[-2]) / 1000, float(line[-1])
                continue
            frame = os.read(each, _FRAME)
            to = plugs.get(frame[:6])
            for plug in [to] if to is not None else [plug for plug in plugs.values() if plug != each]:
                if chance.random() >= loss:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay, count, plug, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, plug, frame = heapq.heappop(waiting)
            try:
                os.write(plug, frame)
            except OSError:  # its card's queue is full, or the node is off: a frame is lost
                continue


if __name__ == "__main__":
    main()
