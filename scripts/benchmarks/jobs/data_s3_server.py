"""An S3 server that counts: ``data_s3_server.py PORT_FILE COUNTS_FILE``. It ends with the process that started it."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Counting:
    """Stands before the server, and keeps the bytes of objects that went out, by path."""

    def __init__(self, server: Any, file: Path) -> None:
        self._server, self._file = server, file
        self._counts: dict[str, int] = {}
        self._guard = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        body = b"".join(self._server(environ, start_response))
        is_object = environ["PATH_INFO"].strip("/").count("/") > 0
        if environ["REQUEST_METHOD"] == "GET" and is_object:
            with self._guard:
                path = environ["PATH_INFO"]
                self._counts[path] = self._counts.get(path, 0) + len(body)
                temporary = self._file.with_suffix(".tmp")
                temporary.write_text(json.dumps(self._counts))
                temporary.rename(self._file)
        return [body]


def main() -> None:
    port_file, counts_file = map(Path, sys.argv[1:])
    app = Counting(DomainDispatcherApplication(create_backend_app), counts_file)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    temporary = port_file.with_suffix(".tmp")
    temporary.write_text(str(server.server_port))
    temporary.rename(port_file)
    server.serve_forever()


def _end_with(parent: int) -> None:
    watched = os.pidfd_open(parent)

    select.select([watched], [], [])
    os._exit(0)


if __name__ == "__main__":
    main()
