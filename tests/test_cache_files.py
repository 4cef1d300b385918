"""Remote files as local paths: hits, leases, eviction, other processes, other jobs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cache_kit import QUICK, Place, content, read
from conftest import eventually

from ftrun.data.cache import claims, filesystems, names, settings
from ftrun.data.cache.files import CachedFiles
from ftrun.data.cache.layout import Layout
from ftrun.data.cache.pages import Page, node_counters
from ftrun.data.cache.records import CachedObject, Listing, Patience
from ftrun.data.cache.room import Room
from ftrun.errors import UsageError


def test_a_file_is_fetched_once_and_then_read_from_the_disk(place: Place) -> None:
    url = place.put("a.jpg", b"picture")
    files = place.files()
    assert not files.has(url)
    assert [read(files, url) for _ in range(3)] == [b"picture"] * 3
    assert files.has(url)
    assert (place.requests(), place.requests("info")) == (["a.jpg"], ["a.jpg"])
    counted = files.counters()
    assert (counted.hits, counted.misses, counted.fills, counted.bytes) == (2, 1, 1, 7)
    assert (place.debris(), place.sum()) == ([], 7)


@pytest.mark.parametrize(
    "name", ["sp ace.txt", "quote'\".bin", "ünï.jpg", "new\nline.txt", "back\\nslash", "-rf", "a" * 200, "x.y.z%20?q"]
)
def test_names_may_hold_anything(place: Place, name: str) -> None:
    path = place.remote / name
    path.write_bytes(name.encode())
    files = place.files()
    for url in (str(path), f"kit://{path}", f"file://{path}"):
        assert read(files, url) == name.encode()
    assert {each.url for each in files.cached()} == {str(path), f"kit://{path}"}


def test_bytes_that_are_no_text_are_a_name_too(place: Place) -> None:
    path = os.fsdecode(os.fsencode(place.remote) + b"/\xff\xfe.bin")
    Path(path).write_bytes(b"odd")
    files = place.files()
    assert read(files, path) == b"odd"
    assert [each.url for each in files.cached()] == [path]


@pytest.mark.parametrize("url", ["", "a\0b", None, 7, "simplecache::kit:///x"])
def test_what_is_no_file_is_refused(place: Place, url: object) -> None:
    with pytest.raises(UsageError):
        place.files().get(url)  # type: ignore[arg-type]


def test_a_directory_is_refused_without_a_retry(place: Place) -> None:
    with pytest.raises(OSError, match="is a directory"):
        place.files().get(str(place.remote))


def test_an_empty_file_and_a_path_object(place: Place) -> None:
    place.put("empty", b"")
    files = place.files()
    assert read(files, place.remote / "empty") == b""  # type: ignore[arg-type]
    assert read(files, str(place.remote / "empty")) == b""
    assert files.counters().hits == 1


def test_a_changed_file_is_another_object_for_the_next_run(place: Place) -> None:
    url = place.put("a", b"old")
    this = place.files()
    assert read(this, url) == b"old"
    place.put("a", b"newer")
    assert read(this, url) == b"old"  # a run keeps what it saw, in every process of it
    assert read(pickle.loads(pickle.dumps(this)), url) == b"old"
    following = place.files()
    assert read(following, url) == b"newer"
    assert len(list(following.cached())) == 2


def test_the_next_run_asks_once_whether_a_file_is_the_same(place: Place) -> None:
    url = place.put("a", b"same")
    read(place.files(), url)
    following = place.files()
    assert [read(following, url) for _ in range(2)] == [b"same"] * 2
    assert (place.requests(), len(place.requests("info"))) == (["a"], 2)
    assert (following.counters().rechecks, following.counters().hits) == (1, 2)
    assert read(place.files(trust=60), url) == b"same"
    assert len(place.requests("info")) == 2


def test_many_files_are_asked_for_with_one_request(place: Place) -> None:
    urls = [place.put(f"{number:02}", content(number, 100)) for number in range(20)]
    first = place.files()
    for url in urls:
        read(first, url)
    place.put("03", b"changed")
    (place.remote / "04").unlink()
    following = place.files()
    asked = len(place.requests("info"))
    assert following.revalidate(urls) == 2
    assert (len(place.requests("ls")), len(place.requests("info"))) == (1, asked)
    assert [following.has(url) for url in urls].count(False) == 2
    assert read(following, urls[3]) == b"changed"
    with pytest.raises(FileNotFoundError, match="no such file"):
        read(following, urls[4])


def test_the_copy_of_an_earlier_run_is_used_when_the_remote_is_away(place: Place) -> None:
    url = place.put("a", b"here")
    read(place.files(), url)
    place.faults(hang="info")
    with pytest.warns(RuntimeWarning, match="unchecked"):
        assert read(place.files(patience=replace(QUICK, timeout=0.2)), url) == b"here"
    place.well()


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_local_copy_of_the_wrong_size_is_fetched_again(place: Place, damage: str) -> None:
    url = place.put("a", b"whole")
    files = place.files()
    read(files, url)
    path = Path(next(files.cached()).path)
    if damage == "gone":
        path.unlink()
    else:
        path.chmod(0o600)
        path.write_bytes(b"who")
    assert [read(files, url) for _ in range(2)] == [b"whole"] * 2
    assert place.requests() == ["a", "a"]
    assert place.size() == 5


def test_what_is_in_use_is_not_evicted(place: Place) -> None:
    urls = [place.put(f"{number}", content(number, 1000)) for number in range(6)]
    files = place.files(limit=3000)
    first = files.get(urls[0])
    for url in urls[1:]:
        read(files, url)
        assert place.size() <= 3000
    assert first.path.read_bytes() == content(0, 1000)
    first.release()
    first.release()
    assert {each.url for each in files.cached()} == {urls[0], urls[4], urls[5]}
    assert (files.counters().evictions, files.counters().bypasses) == (3, 0)


def test_what_does_not_fit_is_read_past_the_cache(place: Place) -> None:
    big, small = place.put("big.bin", content(1, 5000)), place.put("small", content(2, 900))
    files = place.files(limit=1000)
    held = files.get(small)
    with pytest.warns(RuntimeWarning, match="past the cache"):
        assert read(files, big) == content(1, 5000)
    assert read(files, str(place.remote / "big.bin")) == content(1, 5000)
    assert files.fetch(big).kind == "bypassed"
    other = place.put("other", content(3, 200))  # everything else is in use
    assert read(files, other) == content(3, 200)
    held.release()
    assert files.counters().bypasses == 3
    assert (place.debris(), place.size()) == ([], 900)


@pytest.mark.slow
def test_the_smallest_limit_of_the_running_jobs_holds(place: Place) -> None:
    urls = [place.put(f"{number}", content(number, 1000)) for number in range(10)]
    script = (
        "import sys; from cache_kit import *; files = CachedFiles(sys.argv[1], reserve_free=0, limit=3000)\n"
        "files.get(sys.argv[2]).release(); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, place.root, urls[0]],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin
    assert other.stdout
    try:
        other.stdout.readline()
        files = place.files(limit=8000)
        for url in urls:
            read(files, url)
        assert place.size() == 3000
    finally:
        other.stdin.close()
        other.wait(60)
        other.stdout.close()

    def fills_again() -> bool:
        for url in urls:
            read(files, url)
        return place.size() == 8000

    eventually(fills_again, 60)


def test_a_limit_holds_where_nobody_else_can_see_it(place: Place) -> None:
    layout = Layout(place.root)
    layout.make()
    page = Page(3000)
    (place.home / "p").rmdir()
    (place.home / "p").touch()  # the disk takes no page
    assert Room(layout, 0, page).limit() == 3000
    (place.home / "p").unlink()
    (place.home / "p").mkdir()
    other = Room(layout, 0, Page(None))
    assert Room(layout, 0, page).limit() == other.limit() == 3000  # it is shared as soon as that can be done
    page.add("hits", 7)
    shutil.rmtree(place.home / "p")
    (place.home / "p").mkdir()
    page.share(layout.pages)
    assert (page.counters().hits, node_counters(layout.pages).hits) == (7, 7)


def test_eviction_by_known_use(place: Place) -> None:
    urls = [place.put(f"{number}", content(number, 1000)) for number in range(10)]
    files = place.files(limit=10_000)
    for url in urls:
        files.fetch(url)
    plan = {url: float(number) for number, url in enumerate(reversed(urls))} | {urls[9]: float("-inf")}

    def next_use(objects: list[CachedObject]) -> list[float]:
        return [plan[each.url] for each in objects]

    assert files.make_room(3000, next_use) == 3000
    assert {each.url for each in files.cached()} == set(urls[3:])
    assert files.make_room(100) == 3000
    assert files.make_room(10_000, next_use) == 9000
    assert [each.url for each in files.cached()] == [urls[9]]


def test_threads_of_one_process_fetch_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place.put("a", content(1, 100_000))
    waits, wait = [], claims._wait
    monkeypatch.setattr(claims, "_wait", lambda *given: (waits.append(given), wait(*given))[1])
    place.faults(hang="read")
    files = place.files()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(read(files, url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(waits) == 7, 60, "all others to wait")  # whoever comes when it is there doesn't
    place.well()
    for thread in threads:
        thread.join(60)
    assert found == [content(1, 100_000)] * 8
    assert place.requests() == ["a"]
    assert files.counters().waits == 7


def _child(files: CachedFiles, url: str, answers: multiprocessing.Queue[bytes]) -> None:
    answers.put(read(files, url))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_use_the_same_object(place: Place, method: str) -> None:
    url = f"file://{place.remote / 'a'}"
    place.put("a", b"shared")
    files = place.files()
    lease = files.get(url)
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_child, args=(files, url, answers))
    child.start()
    assert answers.get(timeout=60) == b"shared"
    child.join(60)
    lease.release()
    total = files.counters(node=True)
    assert (total.fills, total.hits, files.counters().hits) == (1, 1, 0)
    files.make_room(1 << 62)
    assert not list(files.cached())  # nobody holds a lease any more


def test_a_forked_child_does_not_release_its_parents_lease(place: Place) -> None:
    url = place.put("a", b"held")
    files = place.files()
    lease = files.get(url)
    pid = os.fork()
    if pid == 0:
        lease.release()
        os._exit(0)
    os.waitpid(pid, 0)
    files.make_room(1 << 62)
    assert lease.path.read_bytes() == b"held"
    lease.release()
    files.make_room(1 << 62)
    assert not list(files.cached())


def test_fetching_ahead_stays_within_bounds_and_ends(place: Place) -> None:
    from ftrun.data.cache.ahead import FILES

    urls = [place.put(f"{number:03}", content(number, 50)) for number in range(100)]
    files = place.files()
    files.prefetch(url for url in urls)
    eventually(lambda: files.counters().fills >= FILES, 60)
    assert files.counters().fills == FILES
    for number, url in enumerate(urls):
        assert read(files, url) == content(number, 50)
    assert sorted(place.requests()) == [f"{number:03}" for number in range(100)]
    eventually(lambda: not any(each.name == "ftrun-ahead" for each in threading.enumerate()), 60)
    files.prefetch(["/no/such/file"])  # a hint: whoever reads it will be told


def test_what_is_fetched_ahead_is_known_by_all_its_names(place: Place) -> None:
    from ftrun.data.cache.ahead import FILES

    names = [f"file://{place.remote}/{number:03}" for number in range(FILES + 10)]
    for number in range(len(names)):
        place.put(f"{number:03}", content(number, 50))
    files = place.files()
    files.prefetch(["", *names])  # what is no name is left to whoever reads it
    eventually(lambda: files.counters().fills >= FILES, 60)
    for name in names[:10]:
        assert read(files, name)
    eventually(lambda: files.counters().fills == len(names), 60)


def test_files_that_are_never_read_do_not_stop_others_from_being_fetched_ahead(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftrun.data.cache import ahead

    monkeypatch.setattr(ahead, "_SKIPPED", 0.05)
    urls = [place.put(f"{number:03}", content(number, 50)) for number in range(3 * ahead.FILES)]
    files = place.files()
    files.prefetch(urls)
    # A batch of a failed step, say: of each four, three are never read.
    eventually(lambda: files.counters().fills >= ahead.FILES, 60)
    for url in urls[3 : ahead.FILES : 4]:
        read(files, url)
    eventually(lambda: read(files, urls[ahead.FILES + 3]) and files.counters().fills > ahead.FILES + 16, 60)
    for number in range(ahead.FILES + 7, len(urls), 4):
        eventually(lambda number=number: files.has(urls[number]), 60)  # type: ignore[misc] # bound now
        read(files, urls[number])


def test_a_hint_of_one_file_starts_few_threads(place: Place) -> None:
    place.faults(latency=0.2)
    files = place.files()
    before = set(threading.enumerate())
    files.prefetch([place.put("a", b"x")])
    assert sum(each.name == "ftrun-ahead" for each in set(threading.enumerate()) - before) <= 2
    eventually(lambda: files.counters().fills == 1, 60)


def test_a_read_only_or_unwritable_root_passes_through(place: Place, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere; the full disk is tried in a mount namespace")
    url = place.put("a", b"x")
    place.root.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="may not write"):
        read(place.files(), url)


@pytest.mark.parametrize("version", ["0", "2", "x"])
def test_another_version_is_refused_with_the_way_out(place: Place, version: str) -> None:
    read(place.files(), place.put("a", b"x"))
    (place.home / "VERSION").write_text(version)
    with pytest.raises(UsageError, match=r"ftrun cache clear --root"):
        place.files()


def test_a_directory_with_other_things_is_refused(place: Place) -> None:
    place.home.mkdir(parents=True, mode=0o700)
    (place.home / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"thesis.tex"):
        place.files()


def test_an_open_or_foreign_directory_is_refused(place: Place) -> None:
    read(place.files(), place.put("a", b"x"))
    place.home.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        place.files()
    if os.geteuid() == 0:
        place.home.chmod(0o700)
        os.chown(place.home, 12345, -1)
        with pytest.raises(UsageError, match="belongs to user 12345"):
            place.files()


def test_a_file_in_the_way_is_refused(place: Place) -> None:
    place.root.write_text("")
    with pytest.raises(UsageError, match="file in the way"):
        place.files()


def test_network_filesystems_are_refused_by_their_number() -> None:
    assert filesystems.refused(0x6969) == "NFS"
    assert filesystems.refused(0x65735546) == "FUSE"
    assert filesystems.refused(-11317950) == "CIFS"  # as a signed number: 0xFF534D42
    assert filesystems.refused(0xEF53) is None
    with pytest.raises(UsageError, match="lies on proc"):
        CachedFiles("/proc/self/cache")


def test_a_root_that_is_removed_under_us_is_made_again(place: Place) -> None:
    url = place.put("a", b"again")
    files = place.files()
    read(files, url)
    shutil.rmtree(place.root)
    assert [read(files, url) for _ in range(2)] == [b"again"] * 2
    assert files.counters().bypasses == 0


@pytest.mark.parametrize(
    ("text", "size"), [("200GB", 200 * 10**9), ("1.5TiB", 3 << 39), (5, 5), ("7", 7), ("1 kB", 1000), ("3 KiB", 3072)]
)
def test_sizes(text: int | str, size: int) -> None:
    assert settings.size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["much", "-1", -1, "1 XB", True, ""])
def test_what_is_no_size(text: int | str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        settings.size_in_bytes(text)


def test_the_job_says_where_the_cache_lies(tmp_path: Path) -> None:
    from ftrun.contract import WorkerContract

    contract = WorkerContract(str(tmp_path), "id", "root", 1, None, None, 0, "w", cache="/nvme/c", cache_limit=9)
    found = settings.read(contract.to_environment() | {"FTRUN_CACHE": "/other"})
    assert (str(found.root), found.limit, found.reserve) == ("/nvme/c", 9, "10%")
    assert str(settings.read({"FTRUN_CACHE": "/other"}).root) == "/other"
    assert settings.read({"XDG_CACHE_HOME": "/x"}).root == Path("/x/ftrun/data")


def test_a_pointer_survives_being_written() -> None:
    pointer = names.Pointer("ab" * 20, 2**47 - 1, 0xDEADBEEF, 1_796_020_642.5)
    text = pointer.encode()
    assert names.Pointer.decode(text) == pointer
    assert len(text) <= 59
    assert "/" not in text
    assert names.Pointer.decode("") is names.Pointer.decode("nonsense") is names.Pointer.decode("A" * 40 + "-1") is None


def test_the_key_depends_on_url_size_and_version() -> None:
    variants = [("a", Listing(1, "v")), ("b", Listing(1, "v")), ("a", Listing(2, "v")), ("a", Listing(1, "w"))]
    assert len({names.key_of(url, listing) for url, listing in variants}) == 4


@pytest.mark.parametrize(
    ("url", "suffix"), [("a/b.jpg", ".jpg"), ("s3://b/x.tar.gz?v=1", ".tar.gz"), ("b/.hidden", ""), ("a.b/c", "")]
)
def test_suffixes(url: str, suffix: str) -> None:
    assert names.suffix_of(url) == suffix


def test_a_spec_is_json_and_means_the_same(place: Place) -> None:
    import json

    url = place.put("a", b"x")
    files = place.files(limit="1MB")
    read(files, url)
    other = CachedFiles.from_spec(json.loads(json.dumps(files.spec())))
    assert other.has(url)
    assert (other.root, other.limit) == (files.root, files.limit)
    assert Layout(other.root).home == place.home


def test_what_was_written_before_the_machine_went_down_is_read_before_it_is_trusted(place: Place) -> None:
    from ftrun.data.cache.node import Plan, start
    from ftrun.data.cache.remote import Remote

    urls = [place.put("torn", b"good"), place.put("whole", b"fine")]
    files = place.files()
    for url in urls:
        read(files, url)
    node = start(Plan(place.root, None, 0, Patience()), Remote())
    for url in urls:
        pointer = node.filling.pointer(url)
        assert pointer
        with node.books.held():
            node.filling.point(url, pointer._replace(checked=node.boot - 100))
        if url.endswith("torn"):  # as a power loss does: the right size, and zeros
            path = Path(node.layout.object(pointer.key, ""))
            path.chmod(0o600)
            path.write_bytes(bytes(4))
    later = place.files(trust=10**9)
    assert [read(later, url) for url in urls] == [b"good", b"fine"]
    assert place.requests() == ["torn", "whole", "torn"]


def test_nothing_stays_open_when_the_cache_is_let_go(place: Place) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read(place.files(), place.put("a", b"x"))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
