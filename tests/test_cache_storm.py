"""What the cache promises under kill -9, on a full disk, and with many who want the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cache_kit import Place, content
from conftest import eventually

TESTS = Path(__file__).parent
KILLS = int(os.environ.get("FTRUN_TEST_CACHE_KILLS", "25"))
FILES, LIMIT = 60, 400_000


class Storm:
    """Four processes that read, of which one is killed again and again."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.random = random.Random(seed)
        self.out = place.root.with_name("out.txt")
        self.seeds = iter(range(seed, seed + 10**6))
        self.alive: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with self.out.open("ab") as out:
            arguments = [str(self.place.remote), str(self.place.root), str(LIMIT), str(next(self.seeds)), str(FILES)]
            command = [sys.executable, str(TESTS / "scripts" / "cache_worker.py"), *arguments]
            self.alive.append(subprocess.Popen(command, stdout=out, stderr=out))

    def kill(self) -> None:
        victim = self.alive.pop(self.random.randrange(len(self.alive)))
        victim.kill()
        victim.wait(20)

    def close(self) -> None:
        for process in self.alive:
            process.kill()
            process.wait(20)


@pytest.mark.slow
@pytest.mark.timeout(120 + 3 * KILLS)
def test_kill_storm(place: Place) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}, {KILLS} kills")
    for number in range(FILES):
        (place.remote / f"{number}.bin").write_bytes(content(number, 2000 + 700 * number))
    storm = Storm(place, seed)
    try:
        for _ in range(4):
            storm.start()
        most = 0
        for number in range(KILLS):
            if number % 5 == 0:
                written = storm.out.stat().st_size
                eventually(lambda seen=written: storm.out.stat().st_size > seen + 30, 60, "progress after kills")
            until = time.monotonic() + storm.random.uniform(0, 0.4)
            while time.monotonic() < until:
                most = max(most, place.size())
                time.sleep(0.05)
            storm.kill()
            storm.start()
    finally:
        storm.close()
    lines = storm.out.read_text().split("\n")
    assert [line for line in lines if line not in ("", "ok")] == []
    assert lines.count("ok") > KILLS
    assert most <= 1.05 * LIMIT
    files = place.files(limit=LIMIT)  # the next start
    files.sweep()
    assert place.debris() == []
    assert place.sum() == place.size()
    assert len(os.listdir(place.home / "p")) == 2  # the total, and ours
    files.make_room(1 << 62)
    assert place.size() == 0  # nobody's lease is left
    names = {str(place.root)}
    assert not [each for each in psutil.process_iter(["cmdline"]) if names & set(each.info["cmdline"] or [])]


_READ_ALL = """
import sys, threading
from cache_kit import *
files = CachedFiles(sys.argv[1], reserve_free=0, patience=QUICK)
urls = sys.argv[2:]
def read(shift):
    for url in urls[shift:] + urls[:shift]:
        with files.open(url) as path:
            assert path.read_bytes()[:8] == b"%08d" % int(url.rpartition("/")[2]), url
threads = [threading.Thread(target=read, args=(shift,)) for shift in (0, 1)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(files.counters())
"""


def _read_all(place: Place, urls: list[str], processes: int) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", _READ_ALL, str(place.root), *urls], cwd=TESTS, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert b"bypasses=0" in out, out


@pytest.mark.slow
def test_four_processes_of_two_threads_fetch_everything_once(place: Place) -> None:
    urls = [place.put(f"{number}", content(number, 5000)) for number in range(40)]
    place.faults(latency=0.01)
    _read_all(place, urls, 4)
    assert sorted(place.requests()) == sorted(f"{number}" for number in range(40))
    _read_all(place, urls[:3], 1)  # the next run: still there
    assert len(place.requests()) == 40
    assert place.files().counters(node=True).bytes == 40 * 5000


_FULL = """
import sys, warnings
from cache_kit import *
from pathlib import Path
warnings.simplefilter("ignore")
files = CachedFiles(sys.argv[1], reserve_free=0, patience=QUICK)
if sys.argv[2] == "foreign":  # somebody else has filled the disk
    ballast = os.open(f"{sys.argv[1]}/ballast", os.O_WRONLY | os.O_CREAT)
    try:
        while True: os.write(ballast, bytes(4096))
    except OSError: pass
steps = 0
for url in sys.argv[3:] * 2:
    with files.open(url) as path:
        steps += path.read_bytes() == content(int(url.rpartition("/")[2]), 600_000)
counted = files.counters()
print(steps, counted.bypasses, counted.evictions)
"""


def _in_a_small_disk(place: Place, options: str, *arguments: str) -> list[int]:
    script = f'mount -t tmpfs -o {options} none {place.root} && exec {sys.executable} -c "$0" {place.root} "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, _FULL, *arguments], cwd=TESTS, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    return [int(word) for word in done.stdout.split()]


def _needs_mounts() -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root and `unshare -m` to mount a small tmpfs")


@pytest.mark.parametrize(
    ("options", "who", "bypassed"),
    [
        ("size=8m", "ours", False),
        ("size=8m", "foreign", True),
        ("size=64m,nr_inodes=30", "ours", None),
        ("ro", "ours", True),
    ],
)
def test_a_full_or_read_only_disk_never_stops_a_step(
    place: Place, options: str, who: str, bypassed: bool | None
) -> None:
    _needs_mounts()
    place.root.mkdir()
    urls = [place.put(f"{number}", content(number, 600_000)) for number in range(20)]
    steps, past, evicted = _in_a_small_disk(place, options, who, *urls)
    assert steps == 40
    if bypassed is not None:
        assert (past > 0) == bypassed
        assert (evicted > 0) != bypassed


@pytest.mark.slow
def test_the_limit_is_never_overshot(place: Place) -> None:
    urls = [place.put(f"{number}", content(number, 20_000 + number)) for number in range(80)]
    limit = 300_000
    script = (
        "import sys; from cache_kit import *\n"
        "files = CachedFiles(sys.argv[1], reserve_free=0, limit=int(sys.argv[2]), patience=QUICK)\n"
        "for url in sys.argv[3:] * 3:\n"
        "    files.get(url).release()"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(place.root), str(limit), *urls[at:], *urls[:at]], cwd=TESTS)
        for at in (0, 20, 40)
    ]
    most = 0
    while any(process.poll() is None for process in started):
        most = max(most, place.size() if (place.home / "gc.lock").exists() else 0)
        time.sleep(0.05)
    assert [process.returncode for process in started] == [0, 0, 0]
    most = max(most, place.size())  # they may have been too quick to be seen
    assert limit / 2 < most <= limit * 1.05
    assert place.sum() == place.size()


def test_a_lock_that_nobody_gives_back_is_no_reason_to_wait(place: Place) -> None:
    url = str(place.remote / "a")
    place.put("a", b"x")
    place.files().fetch(url)
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+b'); fcntl.flock(file, 2)\n"
        "print('held', flush=True); time.sleep(99)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, place.home / "gc.lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        from ftrun.data.cache.records import Patience

        files = place.files(patience=Patience(lock=0.2), trust=600)
        place.put("b", b"y")
        with files.open(url) as path:
            assert path.read_bytes() == b"x"
        with pytest.warns(RuntimeWarning, match="past the cache"), files.open(str(place.remote / "b")) as path:
            assert path.read_bytes() == b"y"
        assert files.counters().bypasses == 1
    finally:
        holder.kill()
        holder.wait(60)
        holder.stdout.close()
