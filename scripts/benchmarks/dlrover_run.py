"""``dlrover-run --standalone``, with its master started here: its own way of starting one fails with newer torch.

Called with the Python of the peers' environment: ``python dlrover_run.py /path/to/dlrover-run OPTIONS``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

_DEADLINE = 60.0


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--node_num", "1", "--job_name", "bench", "--platform", "local"]
    subprocess.Popen([sys.executable, "-u", "-m", "dlrover.python.master.main", *options])
    deadline = time.monotonic() + _DEADLINE
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            break
        except OSError:
            time.sleep(0.1)
    environment = os.environ | {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}"}
    os.execve(sys.argv[1], sys.argv[1:], environment)


if __name__ == "__main__":
    main()
