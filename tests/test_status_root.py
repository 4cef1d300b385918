"""``ftrun status`` while the checkpoint root is away: that is when people ask for it."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]
import pytest
from storage_kit import DoubleFileSystem, Fault, Store, write_attempt
from typer.testing import CliRunner

from ftrun.checkpoint import epochs
from ftrun.checkpoint.layout import Root
from ftrun.cli import status_root
from ftrun.cli.app import app
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("how", ["hang", ConnectionError("no route to host"), PermissionError("not yours")], ids=repr)
def test_a_root_that_is_away_is_said_soon_and_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    fsspec.register_implementation("double", DoubleFileSystem, clobber=True)
    place = uuid.uuid4().hex
    store = DoubleFileSystem.stores[place] = Store()
    run = RunDir(tmp_path / "llama")
    run.create({"run_id": "run", "checkpoint_root": f"double://{place}/root"})
    root = Root.open(f"double://{place}/root")
    epochs.claim(root, "run", fresh=False, parent=None)
    name = write_attempt(root, 7)
    monkeypatch.setattr(status_root, "_SECONDS", 60.0)  # a root that is there may be slow
    assert look(run) == ({"step": 7, "name": str(name)}, None)
    monkeypatch.setattr(status_root, "_SECONDS", 0.3)  # too little, now and then, for a root that is there
    store.faults.append(Fault("ls", how=how, times=10**6))
    began = time.monotonic()
    commit, problem = look(run)
    assert time.monotonic() - began < 25, "not before the request that hangs was let go"
    assert commit is None
    assert f"double://{place}/root" in problem
    assert "  commit     not known, 0 so far: " in CliRunner().invoke(app, ["status", str(run.path)]).stdout
    store.free.set()


def look(run: RunDir) -> tuple[Any, Any]:
    result = CliRunner().invoke(app, ["status", str(run.path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    return document["last_commit"], document["root_problem"]
