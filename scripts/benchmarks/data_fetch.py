"""``data.fetch_factor``: bytes that a remote sends for the bytes that there are, to all ranks and workers of a node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import data_peers
import data_remote
import data_s3
from checkpoint_results import Case
from common import JOBS
from data_jobs import run, run_ours
from figures import Figure, Target
from peers import Absent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from checkpoint_results import Results
    from common import Settings

_RANKS, _WORKERS, _EPOCHS = 2, 2, 2
_SECONDS = 0.005
_QUIETLY = ("--max-restarts", "0", "--set", "standby.enabled=false", "--nproc-per-node", str(_RANKS))


def fetch_factor(settings: Settings) -> Iterator[Figure]:
    """Two ranks with two workers each, two epochs, from the mount and from S3; the larger of the two."""
    source = settings.folder("remote")
    count = settings.count(256, 64)
    names = data_remote.files(source, count)
    cases, plain = _from_mount(settings, source, names)
    cases += [] if settings.quick else [_from_s3(settings, [source / name for name in names])]
    measured = [each.value for each in cases if each.value is not None]
    yield Figure(
        "data.fetch_factor",
        max(measured) if measured else None,
        Target("<=", 1.0),
        control=cases[0].control,
        n=count * len(measured),
        reference={
            **{each.name: each.value for each in cases},
            "torch, no cache": plain,
            "a cache per process": "up to 4",
        },
        notes=[f"{_RANKS} ranks with {_WORKERS} workers, {_EPOCHS} epochs of {count} files", *_notes(cases)],
    )


def _notes(cases: Sequence[Case]) -> list[str]:
    return [f"{each.name}: {note}" for each in cases for note in each.notes]


def _from_mount(settings: Settings, source: Path, names: list[str]) -> tuple[list[Case], float | None]:
    unique = len(names) * data_remote.SIZE
    with data_remote.mounted(source, _SECONDS) as mount:
        if isinstance(mount, Absent):
            return [Case("mount", None, notes=(mount.why,))], None
        urls = [str(mount.path / name) for name in names]
        factors, notes = [], []
        for _ in range(2):
            before = mount.counts()
            results = _train(settings, data_peers.ours(), urls, {})
            seen = mount.counts() - before
            notes.append(
                results.problem or f"{seen.bytes:,} bytes in {seen.opens} opens, {_samples(results):.0f} samples"
            )
            factors.append(None if results.problem else seen.bytes / unique)
        before = mount.counts()
        plain = run_ours(settings, "data_plain.py", "--remote", mount.path)
        beside = None if plain.problem else (mount.counts() - before).bytes / unique
    return [Case("mount", factors[0], factors[1], len(names), tuple(notes))], beside


def _from_s3(settings: Settings, files: list[Path]) -> Case:
    with data_s3.served(settings.folder("s3"), files) as bucket:
        python = data_peers.python()
        if isinstance(bucket, Absent) or isinstance(python, Absent):
            return Case("S3", None, notes=(bucket.why if isinstance(bucket, Absent) else "no peers",))
        before = bucket.sent()
        results = _train(settings, python, bucket.urls, bucket.options)
        factor = (bucket.sent() - before) / (len(files) * data_remote.SIZE)
    note = results.problem or f"{bucket.sent() - before:,} bytes"
    return Case("S3", None if results.problem else factor, None, len(files), (note,))


def _train(settings: Settings, python: Path, urls: list[str], options: dict[str, Any]) -> Results:
    folder = settings.folder("fetch")
    (folder / "urls.txt").write_text("".join(f"{each}\n" for each in urls))
    where = ("--set", f"data.cache={folder / 'cache'}", "--set", "data.reserve_free=1%")
    command = [python, "-m", "ftrun", *_QUIETLY, *where, JOBS / "data_training.py"]
    arguments = ("--urls", folder / "urls.txt", "--options", json.dumps(options), "--workers", str(_WORKERS))
    return run(settings, command, *arguments, "--epochs", str(_EPOCHS), ranks=_RANKS)


def _samples(results: Results) -> float:
    return results.sum("samples")
