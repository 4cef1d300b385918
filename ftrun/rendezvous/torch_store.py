"""A store of torch's, served such that it answers where the name server doesn't.

The server looks up the name of whoever connects, in the thread that serves everybody, and waits for the name server as
long as the system does: five seconds and more for each connection. On a socket for both families an IPv4 client has an
address of IPv6 (``::ffff:10.0.0.1``), which ``/etc/hosts`` never knows. On one for IPv4 alone the file is enough.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket

from torch.distributed import TCPStore

_BACKLOG = 1024


def serve(address: str, seconds: float) -> TCPStore:
    """Serve a store at a port of the system's choice, on all of this machine's addresses.

    Args:
        address: how others reach this machine.
        seconds: within which it has to be up, and within which each call is answered.

    Raises:
        OSError, RuntimeError: it can't.
    """
    timeout = dt.timedelta(seconds=seconds)
    if not _is_ipv4(address):
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    with socket.socket(socket.AF_INET) as listener:
        listener.bind(("", 0))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # it is the store's from here on
        )


def _is_ipv4(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 4
    except ValueError:
        return False  # a name may mean anything
