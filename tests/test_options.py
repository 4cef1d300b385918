"""The command line: what torchrun understands means the same here, and ftrun's own options are beside it."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import runpy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import get_args_parser

from ftrun.errors import ConfigError
from ftrun.launch import agent
from ftrun.launch.options import CommandLine, LaunchParser


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)


def parse(*argv: str) -> CommandLine:
    return LaunchParser().parse(argv)


def ours(argv: list[str]) -> dict[str, Any]:
    parser = LaunchParser()
    line = parser.parse(argv)
    values = parser.defaults() | line.launch
    return values | {"training_script": line.script, "training_script_args": line.script_args}


def torchs(argv: list[str]) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()):
        return vars(get_args_parser().parse_args(argv))


NEWER = ("--duplicate-stdout-filters", "--signals-to-handle")


def known(text: str) -> bool:
    """Whether the installed torch has the options in `text`, those that came with 2.10 among them."""
    options = get_args_parser().format_help()
    return all(each in options for each in NEWER if each in text)


COMMAND_LINES = [
    "train.py",
    "train.py --lr 3e-4 -c other.yaml --name x --fresh --json --set a=b --help",
    "train.py --nnodes 3 --max-restarts 5",
    "--nproc-per-node 4 train.py",
    "--nproc_per_node=gpu train.py",
    "--nnodes 1:4 --nproc-per-node auto --rdzv-backend c10d --rdzv-endpoint h:29400 --rdzv-id 0123 train.py a b",
    "--nnodes=2 --node-rank=1 --master-addr=10.0.0.1 --master-port=1234 train.py",
    "--standalone --max-restarts 3 --monitor-interval 5 train.py",
    "--rdzv-conf timeout=30,read_timeout=60 train.py",
    "-m pkg.train --lr 3",
    "--module pkg.train -m",
    "--no-python ./train.sh -x",
    "--run-path /abs/train.py",
    "-r 3 -t 1 train.py",
    "-r3 -t0:1,1:2 train.py",
    "-mr 3 pkg.train",
    "--log-dir logs --redirects 0:1 --tee 3 --local-ranks-filter 0,1 train.py",
    "--duplicate-stdout-filters a,b,,c --duplicate-stderr-filters x train.py",
    "--start-method fork --role trainer --event-log-handler null train.py",
    "--local-addr 127.0.0.1 --logs-specs mine --numa-binding node train.py",
    "--signals-to-handle SIGTERM,SIGUSR1 train.py",
    "--nproc-per-node 2 --nproc-per-node 3 train.py",
    "-- train.py --lr 3",
    "train.py -- --lr 3",
    # abbreviations that are unambiguous under torchrun
    "--nnode 2 train.py",
    "--nproc-per 2 train.py",
    "--redirect=3 train.py",
    "--max-r 2 train.py",
    "--stand train.py",
    "--mod pkg.train",
    "--ro trainer train.py",
    "--te 3 train.py",
]
COMMAND_LINES = [text for text in COMMAND_LINES if known(text)]


@pytest.mark.parametrize("text", COMMAND_LINES)
def test_what_torchrun_reads_means_the_same(text: str) -> None:
    argv = text.split()
    assert ours(argv) == torchs(argv)


def test_the_table_of_command_lines_reaches_every_option() -> None:
    used = set().union(*(LaunchParser().parse(text.split()).launch for text in COMMAND_LINES))
    # In torch 2.13; what newer ones add is read by the same parser.
    assert used >= set(LaunchParser().names) - {"shutdown_timeout", "virtual_local_rank"}


WORDS = ["--nnodes", "--nnodes=2", "--max-restarts", "--standalone", "-m", "-r", "-r3", "--tee=0:1", "--nope", "-x"]
WORDS += [
    "train.py",
    "2",
    "--",
    "-",
    "",
    "a b",
    "--lr=3",
    "-1",
    "--rdzv-conf=a=b,c=d",
    "--start-method",
    "fork",
    "=",
    "ü",
]


@given(st.lists(st.sampled_from(WORDS), max_size=7).map(lambda words: [*words, "train.py"]))
@settings(max_examples=200, deadline=None)
def test_any_line_means_the_same_or_is_refused_by_both(argv: list[str]) -> None:
    try:
        expected = torchs(argv)
    except SystemExit:
        # One thing may be missing here and not there: a job file can name the script.
        with contextlib.suppress(ConfigError):
            assert parse(*argv).script is None
    else:
        assert ours(argv) == expected


@pytest.mark.parametrize(
    ("text", "launch"),
    [
        ("--nproc 2", {"nproc_per_node": "2"}),
        ("--nproc=gpu", {"nproc_per_node": "gpu"}),
        ("--npro 2", {"nproc_per_node": "2"}),
        ("--max 2", {"max_restarts": 2}),
        ("--run", {"run_path": True}),
        ("--no-py", {"no_python": True}),
        ("--start fork", {"start_method": "fork"}),
        ("--rdzv-e h:1", {"rdzv_endpoint": "h:1"}),
        ("--mon 1", {"monitor_interval": 1.0}),
    ],
)
def test_two_spellings_of_one_option_are_one_match(text: str, launch: dict[str, object]) -> None:
    line = parse(*text.split(), "script")
    assert (line.launch, line.script) == (launch, "script")


OWN = {
    "-c job.yaml": {"job_file": "job.yaml"},
    "-cjob.yaml": {"job_file": "job.yaml"},
    "--config=job.yaml": {"job_file": "job.yaml"},
    "--name llama": {"name": "llama"},
    "--run-dir there": {"run_dir": "there"},
    "--fresh": {"fresh": True},
    "--dry-run --json": {"dry_run": True, "json": True},
    "--set a.b=c --set=d=e": {"sets": ["a.b=c", "d=e"]},
    "--allow-new-total": {"allow_new_total": True},
}


@pytest.mark.parametrize("text", OWN)
def test_own_options(text: str) -> None:
    expected = CommandLine({"max_restarts": 2}, "train.py", ["--name", "its own"], **OWN[text])
    assert parse(*text.split(), "--max-restarts", "2", "train.py", "--name", "its own") == expected
    assert parse("--max-restarts", "2", *text.split(), "train.py", "--name", "its own") == expected
    without = parse(*text.split())
    assert (without.script, without.script_args, without.launch) == (None, [], {})


def test_all_spellings_of_torchruns_options_are_there() -> None:
    spelled = {each.dest: each.option_strings for each in LaunchParser()._torch_actions}
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            assert set(action.option_strings) <= set(spelled[action.dest])


def test_own_options_add_no_ambiguity() -> None:
    """Whatever prefix names one option of torch's names the same one here."""
    reference = get_args_parser()
    options = {text: action.dest for text, action in reference._option_string_actions.items() if text[:2] == "--"}
    parser = LaunchParser()._parser
    checked = 0
    for text in options:
        for length in range(3, len(text) + 1):
            prefix = text[:length]
            dests = {dest for other, dest in options.items() if other.startswith(prefix)}
            if len(dests) != 1 or dests == {"help"}:
                continue
            found = parser._option_string_actions.get(prefix)
            got = {found.dest} if found else {each[0].dest for each in parser._get_option_tuples(prefix)}
            if prefix not in ("--nproc", "--run-dir", "--name"):
                assert got == dests, prefix
                checked += 1
    assert checked > 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--nprocs 2 train.py", "unknown option --nprocs; did you mean --nproc?"),
        ("--frsh train.py", "unknown option --frsh; did you mean --fresh?"),
        ("--max-restart-count=3 train.py", "unknown option --max-restart-count=3; did you mean --max-restarts?"),
        ("--wxyz train.py", "unknown option --wxyz\n"),
        ("--nam x train.py", "unknown option --nam; did you mean --name?"),
        ("-c job.yaml --lr 3", "unknown option --lr"),
        ("--nnodes", "argument --nnodes: expected one argument"),
        ("--max-restarts many train.py", "invalid int value: 'many'"),
        ("--start-method thread train.py", "'thread' (choose from"),
        ("--no x train.py", "ambiguous option: --no could match --no-python, --node-rank"),
        ("--nproc 2 --log train.py", "ambiguous option: --log could match --log-dir"),
        ("--role --log train.py --log", "ambiguous option: --log could match --log-dir"),
        ("-c", "argument -c/--config: expected one argument"),
        ("--standalone=1 train.py", "ignored explicit argument"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_next_step(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*text.split())
    assert said in str(caught.value) + "\n"
    assert caught.value.findings[0].startswith("ftrun: ")
    assert "ftrun run --help" in caught.value.findings[-1]


@pytest.mark.parametrize("line", ["train.py", "--nproc 2 -c job.yaml train.py a", "-m pkg.train --lr=3"])
@pytest.mark.parametrize("rest", ["--log f", "--no=x --log --nproc 3", "--rdzv=1 -- --log"])
def test_an_abbreviation_of_several_options_is_the_scripts_if_it_comes_after_it(line: str, rest: str) -> None:
    plain, longer = parse(*line.split()), parse(*line.split(), *rest.split())
    assert longer == replace(plain, script_args=[*plain.script_args, *rest.split()])


def test_help_lists_both_kinds_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse("--help")
    out = capsys.readouterr().out
    assert left.value.code == 0
    for option in ("--nproc-per-node", "--nproc ", "--rdzv-backend", "--config JOB.yaml", "--fresh", "usage: ftrun"):
        assert option in out
    assert "SUPPRESS" not in out


VARIABLES = {
    "PET_NNODES": ("1:4", "nnodes", "1:4"),
    "PET_NPROC_PER_NODE": ("gpu", "nproc_per_node", "gpu"),
    "PET_MAX_RESTARTS": ("3", "max_restarts", 3),
    "PET_MONITOR_INTERVAL": ("0.5", "monitor_interval", 0.5),
    "PET_STANDALONE": ("1", "standalone", True),
    "PET_NO_PYTHON": ("0", "no_python", False),
    "PET_RDZV_ID": ("", "rdzv_id", ""),
    "PET_DUPLICATE_STDOUT_FILTERS": ("a,b", "duplicate_stdout_filters", ["a", "b"]),
    "PET_MASTER_PORT": ("1234", "master_port", 1234),
}
if not known("--duplicate-stdout-filters"):
    del VARIABLES["PET_DUPLICATE_STDOUT_FILTERS"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_of_torchrun(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, name, value = VARIABLES[variable]
    monkeypatch.setenv(variable, text)
    parser = LaunchParser()
    assert parser.defaults() == {k: v for k, v in torchs(["train.py"]).items() if not k.startswith("training_script")}
    assert parser.defaults()[name] == value
    assert parser.from_environment(os.environ) == {name}
    assert parser.parse(["train.py"]).launch == {}  # nothing of it was typed
    assert parser.parse(["--nnodes", "7", "train.py"]).launch == {"nnodes": "7"}


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("PET_MAX_RESTARTS", "many", "PET_MAX_RESTARTS takes int, not 'many'"),
        ("PET_MAX_RESTARTS", "", "PET_MAX_RESTARTS takes int, not ''"),
        ("PET_START_METHOD", "thread", "PET_START_METHOD is one of spawn, fork, forkserver, not 'thread'"),
        ("PET_STANDALONE", "yes", "PET_* variable of a flag holds neither 0 nor 1"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=r"unset|env \| grep") as caught:
        LaunchParser().defaults()
    assert said in str(caught.value)


CONVERTED = [
    ("nnodes", 4, "4"),
    ("nnodes", "1:4", "1:4"),
    ("max_restarts", 3, 3),
    ("max_restarts", "3", 3),
    ("monitor_interval", 1, 1.0),
    ("standalone", True, True),
    ("master_port", None, None),
    ("duplicate_stdout_filters", "a,b", ["a", "b"]),
    ("duplicate_stdout_filters", ["a", 2], ["a", "2"]),
    ("numa_binding", "node", "node"),
]
CONVERTED = [each for each in CONVERTED if known(f"--{each[0]}".replace("_", "-"))]
REFUSED = [
    ("nnodes", True, "takes a value, not true or false"),
    ("nnodes", [1, 4], "takes one value, not a list"),
    ("standalone", "yes", "takes true or false"),
    ("standalone", 1, "takes true or false"),
    ("max_restarts", 2.5, "takes int, not '2.5'"),
    ("start_method", "thread", "is one of spawn, fork, forkserver, not 'thread'"),
]


@pytest.mark.parametrize(("name", "value", "expected"), CONVERTED)
def test_values_of_a_job_file_get_torchs_types(name: str, value: object, expected: object) -> None:
    converted = LaunchParser().convert(name, value)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_values_that_an_option_does_not_take(name: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        LaunchParser().convert(name, value)
    assert str(caught.value) == said


# --- what we rely on and nobody promised: each of these has a use in ftrun/, named beside it

GONE = "{what} is gone or changed in this {whose}: {where} relies on it"


def need(condition: object, what: str, where: str, whose: str = "torch") -> None:
    assert condition, GONE.format(what=what, where=where, whose=whose)


def test_private_names_of_pythons_that_we_rely_on() -> None:
    where = "ftrun/launch/options.py"
    parser = argparse.ArgumentParser()
    option = parser.add_argument("--some-option")
    parser.add_argument("-c", "--config")
    need(getattr(parser, "_actions", None), "ArgumentParser._actions", where, "Python")
    known = getattr(parser, "_option_string_actions", {})
    need(known.get("--some-option") is option, "ArgumentParser._option_string_actions", where, "Python")
    find = getattr(parser, "_get_option_tuples", None)
    need(find, "ArgumentParser._get_option_tuples", where, "Python")
    need(find("--some")[0][:2] == (option, "--some-option"), "the shape of _get_option_tuples", where, "Python")
    need(find("-cx")[0][1] == "-c", "the second field of _get_option_tuples", where, "Python")
    calls = []
    parser._get_option_tuples = lambda text: calls.append(text) or find(text)  # type: ignore[method-assign]
    parser.parse_args(["--some", "x"])
    need(calls == ["--some"], "that argparse asks _get_option_tuples for abbreviations", where, "Python")
    run = getattr(runpy, "_run_module_as_main", None)
    need(run, "runpy._run_module_as_main", "ftrun/session/script.py", "Python")
    need(list(inspect.signature(run).parameters) == ["mod_name", "alter_argv"], "its signature", "script.py", "Python")


def test_a_fresh_store_is_made_for_each_round() -> None:
    class Dynamic:
        _bootstrap_store_info = _shared_tcp_store_server = "held"

        def get_backend(self) -> str:
            return "c10d"

    handler: Any = Dynamic()
    agent.fresh_store(handler)
    assert (handler._bootstrap_store_info, handler._shared_tcp_store_server) == (None, None)
    static: Any = StaticTCPRendezvous("localhost", 0, 0, 1, "run", 1)
    static._store = "held"
    agent.fresh_store(static)
    assert static._store is None
