"""Writes down everything a worker can see of how it was started; then behaves or misbehaves as its options say.

One JSON file per rank and attempt, in ``seen/`` of the working directory. Options after ``:::``, so that whatever
stands before it can be any argument at all: ``exit=3 rank=1`` and so on.
"""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

started_with = list(sys.argv)
options = dict(each.split("=", 1) for each in sys.argv[sys.argv.index(":::") + 1 :]) if ":::" in sys.argv else {}
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
now = options.get("attempt", attempt) == attempt
mine = now and options.get("rank", rank) == rank


def spec() -> object:
    return __spec__ and [__spec__.name, __spec__.origin, __spec__.parent, type(__spec__.loader).__name__]


def kind(descriptor: int) -> str:
    try:
        return stat.filemode(os.fstat(descriptor).st_mode)[0]
    except OSError:
        return "closed"


def heard(number: int, _frame: object) -> None:
    Path("seen", f"signal-{rank}-{signal.Signals(number).name}").touch()
    if "stubborn" not in options:
        sys.exit(0)


if "handle" in options:
    for name in options["handle"].split(","):
        signal.signal(getattr(signal, name), heard)
seen = {
    "environment": dict(os.environ),
    "argv": started_with,
    "path": sys.path,
    "cwd": os.getcwd(),
    "name": __name__,
    "file": globals().get("__file__", "none"),
    "package": globals().get("__package__", "none"),
    "spec": spec(),
    "main_names": sorted(each for each in vars(sys.modules["__main__"]) if each[:2] == "__"),
    "main_is_this": vars(sys.modules["__main__"]) is globals(),
    "flags": str(sys.flags),
    "executable": sys.executable,
    "unbuffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.write_through],
    "encodings": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.encoding, sys.stderr.errors],
    "stdin": kind(0),
    "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
    "torch": "torch" in sys.modules,
    "handlers": {}
    if "handle" in options
    else {each.name: str(signal.getsignal(each)).split(" at 0x")[0] for each in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "umask": os.umask(0o22),
    "read": sys.stdin.read() if "read" in options else None,
}
sys.stdout.write(f"out {rank} ünï apple\nout {rank} " + 5_000 * "long" + "\n")
sys.stderr.write(f"err {rank} orange\n")
sys.stdout.write(f"\tlast of {rank}" + ("\n" if "end" not in options else ""))

# Last: others take this file as a sign that everything has been written.
directory = Path("seen")
directory.mkdir(exist_ok=True)
temporary = directory / f".{rank}"
temporary.write_text(json.dumps(seen, default=str), encoding="utf-8", errors="surrogateescape")
temporary.replace(directory / f"{attempt}-{rank}.json")

while now and "together" in options and len(list(directory.glob(f"{attempt}-*.json"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
while "handle" in options:
    signal.pause()
if mine and "record" in options:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> None:
        raise ValueError(f"recorded by {rank}")

    main()
if mine and "raise" in options:
    raise ValueError(options["raise"])
if mine and "signal" in options:
    os.kill(os.getpid(), getattr(signal, options["signal"]))
if mine and "leave" in options:
    os._exit(int(options["leave"]))
if mine and "exit" in options:
    sys.exit(int(options["exit"]) if options["exit"].isdecimal() else options["exit"])
while now and not mine and "together" in options:
    time.sleep(0.1)  # until the launcher ends it
