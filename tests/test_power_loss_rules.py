"""The rules of the power-loss tests: what may be left of small programs that sync too little, or enough."""

from __future__ import annotations

import pytest
from power_loss.folder import folder
from power_loss.log import CREATE, EXTEND, FSYNC, LINK, MKDIR, RENAME, SYNC, TRUNCATE, UNLINK, WRITE, Op
from power_loss.states import Survey, survey
from power_loss.torn import Change, contents

ROOT, FILE, OTHER, SUB = 1, 2, 3, 4
START = [Op(MKDIR, path="marks"), Op(MKDIR, inode=ROOT, path="root")]
DURABLE = [Op(MKDIR, path="marks/start")]
NEW = [Op(CREATE, inode=FILE, path="root/a"), Op(WRITE, inode=FILE, data=b"new")]
OLD = [Op(CREATE, inode=OTHER, path="root/b"), Op(WRITE, inode=OTHER, data=b"old")]


def mark(name: str) -> Op:
    return Op(MKDIR, path=f"marks/{name}")


def seen(*ops: Op) -> set[str]:
    """The states of a program as short texts: ``a=new b/``."""
    return {look(state.files) for state in survey([*START, *DURABLE, *ops]).states}


def look(files: dict[str, bytes | None]) -> str:
    inner = {path.removeprefix("root/"): data for path, data in sorted(files.items()) if path != "root"}
    return " ".join(f"{path}/" if data is None else f"{path}={data.decode()}" for path, data in inner.items())


ZEROS = "\0\0\0"
PARTS = {"a=", "a=n", "a=n\0\0", "a=\0ew", f"a={ZEROS}", "a=new"}

CASES = {
    "nothing synced: no name, or any part of the bytes": (
        NEW,
        {"", *PARTS},
    ),
    "an overwritten file may be anything between": (
        [Op(CREATE, inode=FILE, path="root/a"), Op(FSYNC, inode=ROOT), Op(TRUNCATE, inode=FILE, offset=2)],
        {"", "a=", f"a={ZEROS[:2]}"},
    ),
    "room that was asked for holds zeros": (
        [Op(CREATE, inode=FILE, path="root/a"), Op(FSYNC, inode=ROOT), Op(EXTEND, inode=FILE, offset=3)],
        {"", "a=", f"a={ZEROS}"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_power_loss_rules_of_one_file(case: str) -> None:
    ops, expected = CASES[case]
    assert seen(*ops) == expected


def test_power_loss_rules_of_the_two_syncs() -> None:
    assert after("done", *NEW, Op(FSYNC, inode=FILE), mark("done")) == {"b=old", "a=new b=old"}, "bytes, not the name"
    assert after("done", *NEW, Op(FSYNC, inode=ROOT), mark("done")) == {f"{part} b=old" for part in PARTS}
    assert after("done", *NEW, Op(FSYNC, inode=FILE), Op(FSYNC, inode=ROOT), mark("done")) == {"a=new b=old"}


REPLACED = [*NEW, Op(FSYNC, inode=FILE), Op(RENAME, path="root/a", target="root/b")]
LINKED = [*NEW, Op(FSYNC, inode=FILE), Op(LINK, inode=FILE, path="root/c"), Op(UNLINK, path="root/a")]
APART = [Op(MKDIR, inode=SUB, path="root/s"), Op(CREATE, inode=FILE, path="root/s/a")]


def after(mark_name: str, *ops: Op) -> set[str]:
    """States that are possible once a mark was set."""
    found = survey([*START, *OLD, *DURABLE, *ops])
    return {look(state.files) for state in found.states if mark_name in state.since}


def test_power_loss_rules_of_a_rename() -> None:
    either = {"b=old", "b=new", "a=new b=old", "a=new b=new"}
    assert after("done", *REPLACED, mark("done")) == either, "the old name may linger, and b is never missing"
    assert after("done", *REPLACED, Op(FSYNC, inode=ROOT), mark("done")) == {"b=new"}


def test_power_loss_rules_of_a_rename_into_another_directory() -> None:
    there = [Op(MKDIR, inode=SUB, path="root/s"), Op(FSYNC, inode=ROOT), Op(RENAME, path="root/b", target="root/s/b")]
    assert after("done", *there, mark("done")) == {"b=old s/", "b=old s/ s/b=old", "s/ s/b=old"}
    assert after("done", *there, Op(FSYNC, inode=ROOT), mark("done")) == {"s/ s/b=old"}, "nothing is lost by it"
    assert after("done", *there, Op(FSYNC, inode=SUB), mark("done")) == {"b=old s/ s/b=old", "s/ s/b=old"}


def test_power_loss_rules_of_a_directory_that_moves_it_is_never_in_two_places() -> None:
    ops = [Op(MKDIR, inode=SUB, path="root/s"), Op(FSYNC, inode=ROOT), Op(RENAME, path="root/s", target="root/t")]
    assert after("done", *ops, mark("done")) == {"b=old s/", "b=old t/"}


def test_power_loss_rules_of_a_link_whose_old_name_goes() -> None:
    assert "b=old" in after("done", *LINKED, mark("done")), "both changes wait for the directory's sync, in any order"
    assert after("done", *LINKED, Op(FSYNC, inode=ROOT), mark("done")) == {"b=old c=new"}


def test_power_loss_rules_of_directories_each_name_is_kept_by_its_own_parent() -> None:
    assert after("done", *APART, Op(FSYNC, inode=SUB), mark("done")) == {"b=old", "b=old s/ s/a="}
    assert after("done", *APART, Op(FSYNC, inode=ROOT), mark("done")) == {"b=old s/", "b=old s/ s/a="}
    assert after("done", *APART, Op(SYNC), mark("done")) == {"b=old s/ s/a="}


def test_power_loss_rules_can_be_kind_to_names() -> None:
    kind = survey([*START, *OLD, *DURABLE, *REPLACED, mark("done")], lose_names=False)
    assert {look(state.files) for state in kind.states if "done" in state.since} == {"b=new"}
    assert {look(state.files) for state in kind.states if "start" in state.since} >= {"a=new b=old", "b=new"}


def test_power_loss_rules_make_each_state_once_and_sample_only_what_is_too_much() -> None:
    few = survey([*START, *DURABLE, *NEW])
    assert isinstance(few, Survey)
    assert (few.exhaustive, len(few.states)) == (True, 7)
    names = [Op(CREATE, inode=10 + number, path=f"root/{number}") for number in range(16)]
    many = survey([*START, *DURABLE, *names])
    assert not many.exhaustive
    assert 1000 < len(many.states) <= many.made
    assert many == survey([*START, *DURABLE, *names]), "the sample is always the same one"


def test_power_loss_rules_tear_at_sectors_and_lose_writes_out_of_order() -> None:
    old, new = b"o" * 2000, b"n" * 2000
    torn = contents(old, (Change(0, new),))
    assert torn[0] == old
    assert {new, new[:512] + old[512:], old[:1536] + new[1536:]} <= set(torn)
    assert {len(each) for each in contents(b"", (Change(0, new),))} == {0, 512, 1024, 1536, 2000}
    second_alone = contents(b"", (Change(0, new), Change(2000, b"end")))
    assert bytes(2000) + b"end" in second_alone
    pages = tuple(Change(at * 4096, bytes([65 + at]) * 4096) for at in range(5))
    without_the_middle = b"".join(bytes(4096) if at == 2 else page.data or b"" for at, page in enumerate(pages))
    found = contents(b"", pages)
    assert without_the_middle in found
    assert len(found) == len(set(found)) < 300


def test_power_loss_states_become_files() -> None:
    found = survey([*START, *OLD, *DURABLE, *APART, *REPLACED, *LINKED[3:]])
    assert len(found.states) > 20
    with folder() as laid_out:
        for state in found.states:
            top = laid_out.put(state)
            real = {str(each.relative_to(top)): None if each.is_dir() else each.read_bytes() for each in top.rglob("*")}
            assert real == state.files
