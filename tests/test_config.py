from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ftrun.cli.config import app
from ftrun.config import units, yaml
from ftrun.config.job import JobConfig
from ftrun.config.load import JobFile, load_job, to_json
from ftrun.config.origins import Resolved, from_environment, merge
from ftrun.config.schema import job_schema, schema_text
from ftrun.config.units import Window
from ftrun.contract import AUTO, Every, Fault
from ftrun.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

FULL = """\
# yaml-language-server: $schema=./ftrun.schema.json
name: llama-debug
script: train.py
args: [--lr, 3e-4, 010, yes, True, ""]
launch:
  nnodes: 1:4
  nproc_per_node: gpu
  rdzv_id: 0123
  max_restarts: 3
  standalone: true
checkpoint:
  every: 500 steps
  keep: {last: 5}
restart:
  max_restarts: 20
  window: 5 in 1h30m
  backoff: {first: 1s, max: 1h30m, jitter: 0}
  budgets: {killed: 7, code_error: ~}
watch: {step: auto, save: 1h, eval: off, floor: 10s}
standby: {enabled: false, exclude: [my_pkg, other.part]}
exit_codes: torchrun
signals: {grace: 60s}
logs: {tee: [0]}
env: {NCCL_DEBUG: WARN, OMP_NUM_THREADS: 4}
callbacks: [my_pkg.hooks]
faults: [{at_step: 120, rank: 1, do: kill}]
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str | bytes, *sets: str) -> JobFile:
    Path("job.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return load_job("job.yaml", sets)


def findings(text: str | bytes, *sets: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *sets)
    return [finding.splitlines()[0] for finding in caught.value.findings]


# YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:4", "1:4"),
        ("10:00:00", "10:00:00"),
        ("2024-01-01", "2024-01-01"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("FALSE", False),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("0o17", 15),
        ("0x1F", 31),
        ("010", 10),
        ("-7", -7),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("[1, [a]]", (1, ("a",))),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
        (r'"\ud83d\ude00"', "\U0001f600"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    document = yaml.parse(f"key: {text}", "job.yaml")
    found = document.value["key"]
    assert (found, type(found)) == (value, type(value))
    assert not document.findings


def test_marks_are_one_based_and_follow_aliases_and_merges():
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: [p, *a]\n"
    document = yaml.parse(text, "job.yaml")
    assert document.value == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": ("p", {"x": 1, "y": 2})}
    assert document.marks["b", "y"].key == (4, 3)
    assert document.marks["b", "y"].value == (4, 6)
    assert document.marks["b", "x"].key == (1, 8)
    assert document.marks["c", 0].key == (5, 5)
    assert not document.findings


def test_a_list_of_merges_prefers_the_earlier():
    text = "a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}\n"
    assert yaml.parse(text, "job.yaml").value["c"] == {"x": 1, "y": 2}


NESTED = "[" * 5000
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", "job.yaml: the job file is empty; a job needs at least 'script: train.py'"),
        ("# later\n", "job.yaml: the job file is empty; a job needs at least 'script: train.py'"),
        ("- a\n", "job.yaml:1:1: expects keys such as 'script: train.py', not a list"),
        ("train.py\n", "job.yaml:1:1: expects keys such as 'script: train.py', not 'train.py'"),
        (
            "name: a\nargs: [1\n",
            (
                "job.yaml:3:1: expected ',' or ']', but got '<stream end>' "
                "(while parsing a flow sequence that begins on line 2)"
            ),
        ),
        (
            "name: a: b\n",
            (
                "job.yaml:1:8: mapping values are not allowed here; "
                "check the indentation, or quote a value that holds ': '"
            ),
        ),
        (
            "env:\n\tA: x\n",
            ("job.yaml:2:1: found character '\\t' that cannot start any token; indent with spaces, not with tabs"),
        ),
        (
            "name: @a\n",
            "job.yaml:1:7: found character '@' that cannot start any token; put the value in quotes",
        ),
        ("name: *a\n", "job.yaml:1:7: found undefined alias 'a'; put a value that begins with '*' in quotes"),
        ("name: a\n---\nname: b\n", "job.yaml:2:1: a second document begins here; keep one job in a file"),
        (b"name: a\nscript: caf\xe9\n", "job.yaml:2:12: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        (b"\xef\xbb\xbfname: \xe9\n", "job.yaml:1:7: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("name: a\x07b\n", "job.yaml:1:8: character #x0007 is not allowed in YAML; remove it"),
        (r'args: ["\0"]', "job.yaml:1:8: holds an escape that is no character of a text; remove it"),
        (r'args: ["\ud800"]', "job.yaml:1:8: holds an escape that is no character of a text; remove it"),
        ("name: !!binary abc\n", "job.yaml:1:7: tag '!!binary' is not supported; remove it"),
        ("env: !mine {A: b}\n", "job.yaml:1:6: tag '!mine' is not supported; remove it"),
        (
            "restart: {no_progress: !!int x}\n",
            "job.yaml:1:24: 'x' does not fit its tag '!!int'; remove the tag",
        ),
        ("args: &a [*a]\n", "job.yaml:1:7: args.0 holds itself; remove the alias"),
        ("? [a]\n: 1\n", "job.yaml:1:3: a key must be text; put it in quotes"),
        (
            "env: {<<: 3}\n",
            "job.yaml:1:11: '<<' takes a section or a list of sections, such as '<<: *defaults'",
        ),
        (NESTED, "job.yaml: nested too deeply; flatten the file"),
        (BOMB, "job.yaml: holds more than 20000 values; use fewer aliases"),
        (
            "checkpoint:\n  every: 10m\n  every: 20m\n",
            "job.yaml:3:3: duplicate key 'checkpoint.every' (first on line 2)",
        ),
    ],
)
def test_text_that_is_no_job(text, first):
    assert findings(text)[0] == first


def test_what_yaml_said_about_a_value_is_not_said_again():
    assert len(findings("restart: {no_progress: !!int x}\n")) == 1


def test_files_that_cannot_be_read():
    Path("job.yaml").write_text("script: train.py\n")
    Path("runs").mkdir()
    cases = {
        "jbo.yaml": "jbo.yaml: no such file; did you mean 'job.yaml'?",
        "other/x.yaml": "other/x.yaml: no such file; check the path of the job file",
        "runs": "runs: is a directory; give the job file, for example runs/job.yaml",
        "job.yaml/x": "job.yaml/x: can't be read (Not a directory); check the path",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_job(path)
        assert caught.value.findings == [message]


def test_a_byte_order_mark_and_windows_line_ends_are_fine():
    job = load(b"\xef\xbb\xbfname: a\r\nscript: b.py\r\n")
    assert job.config.name == "a"
    assert job.marks["script",].key == (2, 1)


# The job


def test_a_full_job():
    config = load(FULL).config
    assert config.args == ("--lr", "3e-4", "010", "yes", "True", "")
    assert config.launch["nnodes"] == "1:4"
    assert dict(config.launch) == {
        "nnodes": "1:4",
        "nproc_per_node": "gpu",
        "rdzv_id": "0123",
        "max_restarts": 3,
        "standalone": True,
    }
    assert config.checkpoint.every == Every(steps=500)
    assert config.checkpoint.keep.last == 5
    assert (config.restart.no_progress, config.restart.max_restarts) == (3, 20)
    assert config.restart.backoff.max == timedelta(minutes=90)
    assert config.restart.window == Window(5, timedelta(minutes=90))
    assert (config.restart.budgets.killed, config.restart.budgets.code_error) == (7, None)
    assert config.restart.backoff.jitter == 0
    watch = config.watch
    assert (watch.step, watch.save, watch.eval, watch.floor) == (
        "auto",
        timedelta(hours=1),
        "off",
        timedelta(seconds=10),
    )
    assert (config.standby.enabled, config.standby.exclude) == (False, ("my_pkg", "other.part"))
    assert config.exit_codes == "torchrun"
    assert config.signals.grace == timedelta(seconds=60)
    assert config.logs.tee == (0,)
    assert config.env == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}
    assert config.callbacks == ("my_pkg.hooks",)
    assert [fault.to_fault() for fault in config.faults] == [Fault(at_step=120, rank=1, do="kill")]


def test_defaults():
    config = load("script: train.py\n").config
    assert config.name is config.module is config.checkpoint.root is config.restart.max_restarts is None
    assert config.checkpoint.every == AUTO
    assert config.checkpoint.keep.last == config.restart.no_progress == 3
    assert config.restart.backoff.first == timedelta(seconds=1)
    assert config.restart.backoff.max == timedelta(minutes=5)
    assert config.restart.backoff.jitter == 0.1
    assert config.restart.window is config.restart.budgets.killed is None
    assert config.restart.budgets.code_error == 2
    assert (config.watch.enabled, config.watch.step, config.watch.start) == (True, "auto", timedelta(minutes=30))
    assert (config.standby.enabled, config.standby.exclude, config.exit_codes) == (True, (), "ftrun")
    assert config.signals.grace == timedelta(seconds=30)
    assert config.logs.tee == "all"
    assert (config.args, dict(config.launch), dict(config.env), config.faults) == ((), {}, {}, ())


def test_a_job_is_frozen():
    config = load(FULL).config
    with pytest.raises(ValueError, match="frozen"):
        config.name = "b"
    with pytest.raises(TypeError):
        config.env["A"] = "b"
    with pytest.raises(TypeError):
        load("script: a.py\n").config.launch["nnodes"] = 2


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            "restart:\n  max_restart: 5\n",
            "2:3: unknown key 'restart.max_restart'; did you mean 'max_restarts'?",
        ),
        ("max_restarts: 5\n", "1:1: unknown key 'max_restarts'; did you mean 'restart.max_restarts'?"),
        (
            "checkpoint:\n  keep_last: 5\n",
            "2:3: unknown key 'checkpoint.keep_last'; did you mean 'checkpoint.keep.last'?",
        ),
        (
            "faults: [{at_step: 1, rank: 0, do: kill, rnak: 1}]\n",
            "1:42: unknown key 'faults.0.rnak'; did you mean 'rank'?",
        ),
        (
            "nnodes: 2\n",
            (
                "1:1: unknown key 'nnodes'; the keys here are name, script, module, args, launch, "
                "run_dir, checkpoint, restart, watch, standby, health, data, signals, logs, exit_codes, "
                "env, callbacks, faults (options of torchrun go under 'launch')"
            ),
        ),
        ("weights: 3\n", "1:1: unknown key 'weights'; the keys here are name, script"),
        ("restart: {budgets: {kiled: 3}}\n", "1:21: unknown key 'restart.budgets.kiled'; did you mean 'killed'?"),
        (
            "restart: {budgets: {gpu-out-of-memory: 3}}\n",
            "1:21: unknown key 'restart.budgets.gpu-out-of-memory'; did you mean 'gpu_out_of_memory'?",
        ),
        ("restart: {budgets: {data: -1}}\n", "1:27: restart.budgets.data: must be 0 or more, not -1"),
        ("restart: {window: 5}\n", "1:19: restart.window: 5 says no time; write for example 5 in 1h"),
        ("restart: {backoff: {jitter: 2}}\n", "1:29: restart.backoff.jitter: must be 1 or less, not 2"),
        ("restart: {backoff: {jitter: a}}\n", "1:29: restart.backoff.jitter: expects a number such as 0.1, not 'a'"),
        ("watch: {step: 10}\n", "1:15: watch.step: 10 has no unit; write 10s, 10m or 10h"),
        ("watch: {save: 0s}\n", "1:15: watch.save: '0s' is no time at all; write off for no limit"),
        ("watch: {save: false}\n", "1:15: watch.save: expects auto, off or a duration; write off for no limit"),
        ("watch: {save: never}\n", "1:15: watch.save: 'never' is not auto, off or a duration; write for example"),
        ("watch: {enabled: 'yes'}\n", "1:18: watch.enabled: expects true or false, not 'yes'"),
        ("watch: {floor: off}\n", "1:16: watch.floor: 'off' is not a duration; write for example"),
        (
            "watch: {floor: 1h}\n",
            "1:8: watch: floor (1h) is longer than ceiling (30m); make ceiling 1h or more",
        ),
        (
            "standby: false\n",
            "1:10: standby: expects keys and values, not false; remove it or give it keys",
        ),
        (
            "standby: {exclude: [a-b]}\n",
            "1:21: standby.exclude.0: 'a-b' is not the dotted name of a module; write for example my_pkg.hooks",
        ),
        ("exit_codes: torch\n", "1:13: exit_codes: expects 'ftrun' or 'torchrun', not 'torch'"),
        ("name: a/b\n", "1:7: name: 'a/b' holds '/'; use letters, digits, '.', '_' and '-'"),
        ("name: é\n", "1:7: name: 'é' holds 'é'; use letters, digits, '.', '_' and '-'"),
        ("name: .a\n", "1:7: name: '.a' begins with '.'; begin with a letter or a digit"),
        ("name: -a\n", "1:7: name: '-a' begins with '-'; begin with a letter or a digit"),
        ("name: ''\n", "1:7: name: is empty; write a value or remove the key"),
        ("name: 2024\n", "1:7: name: expects text, not 2024; put it in quotes"),
        ("name: true\n", "1:7: name: expects text, not true; put it in quotes"),
        ("script: a.py\nmodule: a\n", "2:9: module: 'script' is given too; keep one of them"),
        (
            "module: a-b\n",
            "1:9: module: 'a-b' is not the dotted name of a module; write for example my_pkg.hooks",
        ),
        ("args: --lr 3\n", "1:7: args: expects a list, not '--lr 3'; write for example [--lr, 3]"),
        (
            "args: [a, ~]\n",
            "1:11: args.1: expects text, not nothing; write '' for an empty text, or remove it",
        ),
        ("args: [[a]]\n", "1:8: args.0: expects text, not a list"),
        ("launch: [a]\n", "1:9: launch: expects keys and values, not a list; remove it or give it keys"),
        (
            "launch: {nproc-per-node: 2}\n",
            "1:10: launch.nproc-per-node: options are written with underscores here; write 'nproc_per_node'",
        ),
        (
            "launch:\n  nnodes:\n",
            (
                "2:10: launch.nnodes: expects a value or a list of values, not nothing; "
                "remove the key to keep the default"
            ),
        ),
        (
            "checkpoint:\n",
            "1:12: checkpoint: expects keys and values, not nothing; remove it or give it keys",
        ),
        ("checkpoint: {every: 10}\n", "1:21: checkpoint.every: 10 has no unit; write '10 steps' or 10m"),
        (
            "checkpoint: {every: 10 minutes}\n",
            ("1:21: checkpoint.every: '10 minutes' is not an interval; write for example auto, 500 steps or 10m"),
        ),
        (
            "checkpoint: {every: 0s}\n",
            "1:21: checkpoint.every: '0s' is no time at all; write auto, 500 steps or 10m",
        ),
        ("checkpoint: {keep: {last: 1}}\n", "1:27: checkpoint.keep.last: must be 2 or more, not 1"),
        ("checkpoint: {root: ''}\n", "1:20: checkpoint.root: is empty; write a value or remove the key"),
        ("restart: {no_progress: 0}\n", "1:24: restart.no_progress: must be 1 or more, not 0"),
        (
            "restart: {max_restarts: '3'}\n",
            "1:25: restart.max_restarts: expects a whole number such as 3, not '3'",
        ),
        (
            "restart: {max_restarts: true}\n",
            "1:25: restart.max_restarts: expects a whole number such as 3, not true",
        ),
        (
            "restart:\n  backoff: {first: 10m}\n",
            "2:12: restart.backoff: first (10m) is longer than max (5m); make max 10m or more",
        ),
        ("signals: {grace: 30}\n", "1:18: signals.grace: 30 has no unit; write 30s, 30m or 30h"),
        (
            "signals: {grace: [1]}\n",
            "1:18: signals.grace: expects a duration such as 500ms, 90s, 10m, 1.5h or 2d",
        ),
        (
            "logs: {tee: {a: 1}}\n",
            "1:13: logs.tee: expects 'all' or a list of local ranks; write for example [0]",
        ),
        (
            "logs: {tee: [-1]}\n",
            "1:13: logs.tee: expects 'all' or a list of local ranks; write for example [0]",
        ),
        ("env: {A: [1]}\n", "1:10: env.A: expects text, not a list"),
        (
            "env: {a b: x}\n",
            "1:7: env.a b: 'a b' is not the name of an environment variable; use letters, digits and '_'",
        ),
        (
            "callbacks: [a/b.py]\n",
            "1:13: callbacks.0: 'a/b.py' is not the dotted name of a module; write for example my_pkg.hooks",
        ),
        ("faults: [{at_step: 0, rank: 0, do: kill}]\n", "1:20: faults.0.at_step: must be 1 or more, not 0"),
        ("faults: [{at_step: 1, rank: -1, do: kill}]\n", "1:29: faults.0.rank: must be 0 or more, not -1"),
        (
            "faults: [{at_step: 1, rank: 0, do: kil}]\n",
            "1:36: faults.0.do: expects 'kill', 'raise', 'exit', 'hang', 'spin', 'stop' or 'segv', not 'kil'",
        ),
        (
            "faults: [{at_step: 1, do: kill}]\n",
            "1:10: missing key 'faults.0.rank'; add it (Global rank that it happens to)",
        ),
    ],
)
def test_one_mistake_gives_one_finding(text, first):
    found = findings(text)
    assert len(found) == 1
    assert found[0].startswith(f"job.yaml:{first}")


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GROUP_RANK",
        "ROLE_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "FTRUN_WORKER",
    ],
)
def test_variables_of_the_launcher_are_refused(name):
    expected = f"job.yaml:1:7: env.{name}: the launcher sets this variable for every worker; remove it"
    assert findings(f"env: {{{name}: x}}\n") == [expected]


def test_all_findings_in_the_order_of_lines_with_excerpts():
    text = "checkpoint:\n  keep: {last: 1}\n  every: 10m\n  every: 5m\nnaem: x\nsignals: {grace: 3}\n"
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == (
        "job.yaml:2:16: checkpoint.keep.last: must be 2 or more, not 1\n"
        "    2 |   keep: {last: 1}\n"
        "      |                ^\n"
        "job.yaml:4:3: duplicate key 'checkpoint.every' (first on line 3)\n"
        "    4 |   every: 5m\n"
        "      |   ^\n"
        "job.yaml:5:1: unknown key 'naem'; did you mean 'name'?\n"
        "    5 | naem: x\n"
        "      | ^\n"
        "job.yaml:6:18: signals.grace: 3 has no unit; write 3s, 3m or 3h\n"
        "    6 | signals: {grace: 3}\n"
        "      |                  ^"
    )


def test_a_long_line_is_shown_around_the_mistake():
    with pytest.raises(ConfigError) as caught:
        load(f"args: [{'x, ' * 1000}[y]{', z' * 1000}]\n")
    _, line, caret = caught.value.findings[0].splitlines()
    assert len(line) < 180
    assert line[caret.index("^") :].startswith("[y]")


def test_torchruns_options_are_checked_by_a_function():
    Path("job.yaml").write_text("launch:\n  nnodes: 2\n  nproc: 4\n  Bad: 1\n")
    seen = []

    def check(options):
        seen.append(dict(options))
        return {name: "no such option; did you mean 'nproc_per_node'?" for name in options if name == "nproc"}

    with pytest.raises(ConfigError) as caught:
        load_job("job.yaml", check_launch=check)
    assert seen == [{"nnodes": 2, "nproc": 4}]
    assert [finding.splitlines()[0] for finding in caught.value.findings] == [
        "job.yaml:3:3: launch.nproc: no such option; did you mean 'nproc_per_node'?",
        "job.yaml:4:3: launch.Bad: options are written with underscores here; write 'bad'",
    ]


# --set


def test_set_wins_over_the_file_and_the_later_over_the_earlier():
    sets = [
        "checkpoint.every=5m",
        "checkpoint.every=1 step",
        "launch.nnodes=2:3",
        "args.1=1e-5",
        "restart={no_progress: 7}",
        "faults.0.rank=0",
        "env.X=",
        "name=a=b",
    ]
    config = load(FULL, *sets[:-1]).config
    assert config.checkpoint.every == Every(steps=1)
    assert config.launch["nnodes"] == "2:3"
    assert config.args[:3] == ("--lr", "1e-5", "010")
    assert (config.restart.no_progress, config.restart.max_restarts) == (7, None)
    assert config.faults[0].rank == 0
    assert config.env["X"] == ""
    assert findings(FULL, sets[-1]) == ["--set name=a=b: name: 'a=b' holds '='; use letters, digits, '.', '_' and '-'"]


def test_set_alone_makes_a_job():
    job = load_job(None, ["script=train.py", "checkpoint.keep.last=4"])
    assert (job.path, job.config.script, job.config.checkpoint.keep.last) == (None, "train.py", 4)


def test_set_can_mend_the_file():
    assert load("name: a/b\n", "name=ab").config.name == "ab"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("name", "has no value; write --set name=value"),
        ("=1", "names no key; write for example --set checkpoint.every=10m"),
        ("a..b=1", "names no key; write for example --set checkpoint.every=10m"),
        ("checkpoint.evry=5m", "unknown key 'checkpoint.evry'; did you mean 'every'?"),
        ("script.x=1", "'script' is a plain value and has no 'x'; check the path"),
        ("args.9=x", "'args' is a list of 6; count its items from 0"),
        ("args.x=x", "'args' is a list of 6; count its items from 0"),
        ("name=@x", "found character '@' that cannot start any token; put the value in quotes"),
        ("name=#x", "has no value; put a value that begins with '#' in quotes"),
        ("checkpoint.every=10", "checkpoint.every: 10 has no unit; write '10 steps' or 10m"),
        ("env={A: 1, A: 2}", "duplicate key 'A' (first on line 1)"),
        ("name=", "name: is empty; write a value or remove the key"),
    ],
)
def test_a_mistake_in_set_names_the_argument(argument, message):
    assert findings(FULL, argument) == [f"--set {argument}: {message}"]


def test_a_section_made_by_set_is_blamed_on_it():
    expected = "restart.backoff: first (10m) is longer than max (5m); make max 10m or more"
    with pytest.raises(ConfigError) as caught:
        load_job(None, ["restart.backoff.first=10m"])
    assert caught.value.findings == [f"--set restart.backoff.first=10m: {expected}"]


# Origins


def test_precedence_and_provenance():
    job = load("launch:\n  nnodes: 2\n  node_rank: 1\n  rdzv_id: a\n  role: b\n", "launch.rdzv_id=c")
    variables = {name: f"PET_{name.upper()}" for name in ("nnodes", "nproc_per_node", "node_rank", "rdzv_id")}
    environ = {"PET_NNODES": "3", "PET_NODE_RANK": "", "PET_RDZV_ID": "d", "OTHER": "x"}
    resolved = merge(
        {"nnodes": "4"},
        from_environment(environ, variables),
        job.launch_options(),
        {"nnodes": "1:1", "nproc_per_node": "1", "node_rank": 0, "rdzv_id": "none", "role": "default"},
    )
    assert resolved == {
        "nnodes": Resolved("4", "command line"),
        "nproc_per_node": Resolved("1", "default"),
        "node_rank": Resolved("", "environment PET_NODE_RANK"),
        "rdzv_id": Resolved("c", "--set"),
        "role": Resolved("b", "job.yaml:5"),
    }


def test_the_resolved_document_is_a_job_again():
    job = load(FULL, "checkpoint.root=/r/\U0001f600")
    document = to_json(job)
    assert document["schema_version"] == 1
    assert document["job"] == "job.yaml"
    origins = document["origins"]
    assert origins["launch.nnodes"] == "job.yaml:6"
    assert origins["checkpoint.keep.last"] == "job.yaml:13"
    assert origins["checkpoint.root"] == "--set"
    assert origins["restart.no_progress"] == "default"
    assert origins["faults.0.rank"] == "job.yaml:26"
    for ensure_ascii in (True, False):
        text = json.dumps(document["config"], ensure_ascii=ensure_ascii)
        assert load(text).config == job.config


def test_the_origin_of_a_section_replaced_by_set():
    job = load("restart: {no_progress: 5, max_restarts: 2}\n", "restart={no_progress: 7}")
    origins = {setting.name: setting.origin for setting in job.settings()}
    assert (origins["restart.no_progress"], origins["restart.max_restarts"]) == ("--set", "default")


# Units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("0.5ms", timedelta(microseconds=500)),
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("1.5h", timedelta(minutes=90)),
        ("2d", timedelta(days=2)),
        ("1h30m", timedelta(minutes=90)),
        ("4m12s", timedelta(seconds=252)),
        (" 0.31 s ", timedelta(milliseconds=310)),
        ("0s", timedelta(0)),
    ],
)
def test_durations(text, value):
    assert units.parse_duration(text) == value
    assert re.search(units.DURATION_PATTERN, text.strip())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10, "10 has no unit; write 10s, 10m or 10h"),
        ("10", "10 has no unit; write 10s, 10m or 10h"),
        (1.5, "1.5 has no unit; write 1.5s, 1.5m or 1.5h"),
        ("10 minutes", "'10 minutes' is not a duration; write for example 500ms, 90s, 10m, 1.5h or 2d"),
        ("-5s", "'-5s' is not a duration; write for example 500ms, 90s, 10m, 1.5h or 2d"),
        ("1m1h", "'1m1h' is not a duration; write for example 500ms, 90s, 10m, 1.5h or 2d"),
        ("", "'' is not a duration; write for example 500ms, 90s, 10m, 1.5h or 2d"),
        ("9999999999d", "'9999999999d' is too long; write 999999999d or less"),
        (True, "expects a duration such as 500ms, 90s, 10m, 1.5h or 2d"),
        (None, "expects a duration such as 500ms, 90s, 10m, 1.5h or 2d"),
    ],
)
def test_what_is_no_duration(value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        units.parse_duration(value)


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=10_000)))
def test_a_duration_is_read_back_exactly(value):
    text = units.duration_text(value)
    assert units.parse_duration(text) == value
    assert re.search(units.DURATION_PATTERN, text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0B", 0),
        ("1kB", 1000),
        ("200GB", 200 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("64 MiB", 2**26),
        ("1PB", 10**15),
    ],
)
def test_sizes(text, value):
    assert units.parse_size(text) == value
    assert re.search(units.SIZE_PATTERN, text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (200, "200 has no unit; write 200MB, 200GB or 200GiB"),
        ("200Gb", "'200Gb' is not a size; write for example 500MB, 200GB or 1.5TiB"),
    ],
)
def test_what_is_no_size(value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        units.parse_size(value)


def test_checkpoint_settings_beside_the_interval():
    job = load(
        "checkpoint:\n  root: s3://bucket/run\n  options: {anon: true}\n  local: /nvme\n  drain_limit: 200MB\n"
        "  keep: {every: 10000 steps}\n  when_busy: wait\n  overlap: false\n"
    )
    found = job.config.checkpoint
    assert (found.drain_limit, found.keep.every, found.when_busy, found.overlap) == (200_000_000, 10_000, "wait", False)
    assert dict(found.options) == {"anon": True}
    assert to_json(job)["config"]["checkpoint"]["drain_limit"] == "200MB"
    assert to_json(job)["config"]["checkpoint"]["keep"]["every"] == "10000 steps"


def test_the_data_cache():
    job = load("data: {cache: /nvme, limit: 200GB, reserve_free: 50GB}\n")
    assert to_json(job)["config"]["data"] == {"cache": "/nvme", "limit": "200GB", "reserve_free": "50GB"}
    assert load("data: {reserve_free: 5%}\n").config.data.reserve_free == "5%"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10, "10 has no unit; write 10% or 10GB"),
        ("101%", "'101%' is not a size or a share of the disk; write for example 10% or 200GB"),
        (True, "expects a size or a share of the disk such as 10% or 200GB"),
    ],
)
def test_what_is_no_reserve(value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        units.parse_reserve(value)


@pytest.mark.parametrize("size", [1, 999, 1024, 1536, 200_000_000, 3 * 2**40, 5 * 10**12])
def test_sizes_come_back(size: int):
    assert units.parse_size(units.size_text(size)) == size


@pytest.mark.parametrize(
    ("text", "value", "back"),
    [
        ("500 steps", Every(steps=500), "500 steps"),
        ("1 step", Every(steps=1), "1 step"),
        ("10m", Every(seconds=600.0), "10m"),
        ("auto", AUTO, "auto"),
        ("500ms", Every(seconds=0.5), "500ms"),
    ],
)
def test_intervals(text, value, back):
    assert units.parse_interval(text) == value
    assert units.interval_text(value) == back
    assert units.parse_interval(back) == value


@pytest.mark.parametrize(
    ("text", "value", "back"),
    [
        ("5 in 1h", Window(5, timedelta(hours=1)), "5 in 1h"),
        (" 12 in 1h 30m ", Window(12, timedelta(minutes=90)), "12 in 1h30m"),
        ("1 in 0.5d", Window(1, timedelta(hours=12)), "1 in 12h"),
    ],
)
def test_windows(text, value, back):
    assert units.parse_window(text) == value
    assert units.window_text(value) == back
    assert units.parse_window(back) == units.parse_window(value) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("5 in 60", "60 has no unit; write 5 in 60m or 5 in 60h"),
        ("5/60", "60 has no unit; write 5 in 60m or 5 in 60h"),
        (5, "5 says no time; write for example 5 in 1h"),
        (0, "0 says no time; write for example 1 in 1h"),
        ("5 in 0s", "'5 in 0s' is no time at all; write for example 5 in 1h"),
        ("0 in 1h", "'0 in 1h' is not a count and a duration; write for example 5 in 1h"),
        ("often", "'often' is not a count and a duration; write for example 5 in 1h"),
        (True, "expects a count and a duration such as 5 in 1h"),
        ((5, "1h"), "expects a count and a duration such as 5 in 1h"),
    ],
)
def test_what_is_no_window(value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        units.parse_window(value)


@pytest.mark.parametrize("value", ["0 steps", "steps", "1.5 steps", "-1 steps", "automatic", {}, True])
def test_what_is_no_interval(value):
    with pytest.raises(ValueError, match=r"auto, 500 steps or 10m"):
        units.parse_interval(value)


def test_steps():
    assert units.parse_steps("500 steps") == 500
    with pytest.raises(ValueError, match="500 has no unit; write '500 steps'"):
        units.parse_steps(500)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0031, "3.1 ms"),
        (0.31, "0.31 s"),
        (1, "1 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.99, "1m"),
        (252, "4m12s"),
        (242, "4m02s"),
        (3599.9, "1h"),
        (3900, "1h05m"),
        (86_399, "1d"),
        (2 * 86_400 + 3 * 3600, "2d03h"),
        (-252, "-4m12s"),
        (float("inf"), "inf s"),
    ],
)
def test_measured_durations(seconds, text):
    assert units.format_duration(seconds) == text


# Schema


def test_the_committed_schema_is_current():
    committed = (ROOT / "configs" / "ftrun.schema.json").read_text()
    assert committed == schema_text(), "write it anew: ftrun config schema > configs/ftrun.schema.json"


def test_every_field_is_described_in_the_schema():
    schema = job_schema()
    assert set(schema["properties"]) == set(JobConfig.model_fields)
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        for name, field in model["properties"].items():
            described = field.get("description") or schema["$defs"][field["$ref"].rpartition("/")[2]]["description"]
            assert described, name
    assert schema["$defs"]["Signals"]["properties"]["grace"]["default"] == "30s"
    assert schema["$defs"]["Checkpoint"]["properties"]["every"]["default"] == "auto"


# Commands


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_check_says_ok():
    load(FULL)
    result = run("check", "job.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "ok\n", "")


def test_check_lists_findings_on_stderr():
    Path("job.yaml").write_text("naem: x\nargs: 3\n")
    result = run("check", "job.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "job.yaml:1:1: unknown key 'naem'; did you mean 'name'?\n    1 | naem: x\n      | ^\n"
        "job.yaml:2:7: args: expects a list, not 3; write for example [3]\n    2 | args: 3\n      |       ^\n"
    )
    assert run("show", "nope.yaml").exit_code == 2


@pytest.mark.parametrize("command", ["check", "show"])
def test_options_under_launch_are_those_of_the_installed_torch(command):
    Path("job.yaml").write_text("script: train.py\nlaunch: {nnodes: 1:4, max_restart: 3, monitor_interval: soon}\n")
    result = run(command, "job.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "launch.max_restart: no such option of torchrun; did you mean 'max_restarts'?" in result.stderr
    assert "launch.monitor_interval: takes float, not 'soon'" in result.stderr
    assert "nnodes" not in result.stderr.splitlines()[0]


def test_options_of_the_rendezvous_are_checked_where_it_is_ftruns_own():
    text = "script: train.py\nlaunch:\n  nnodes: 1:4\n  rdzv_endpoint: h\n  rdzv_conf: quorum=maybe\n"
    Path("job.yaml").write_text(text)
    result = run("check", "job.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("job.yaml:5:3: launch.rdzv_conf: --rdzv-conf quorum=maybe: give 1 or 0.\n")
    assert run("check", "job.yaml", "--set", "launch.rdzv_conf=quorum=0").exit_code == 0
    assert run("check", "job.yaml", "--set", "launch.rdzv_backend=c10d").exit_code == 0


def test_show_is_an_aligned_table():
    load("name: a\nargs: [--x, '', 3e-4]\ncheckpoint:\n  every: 10m\n")
    sets = ("restart.no_progress=5", "restart.window=5 in 1h", "restart.budgets.killed=4", "watch.save=off", "env.A=b")
    result = run("show", "job.yaml", *(part for each in sets for part in ("--set", each)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "name                                  = a                 (job.yaml:1)",
        "script                                = null              (default)",
        "module                                = null              (default)",
        'args                                  = [--x, "", 3e-4]   (job.yaml:2)',
        "launch                                = {}                (default)",
        "run_dir.shared                        = true              (default)",
        "checkpoint.root                       = null              (default)",
        "checkpoint.options                    = {}                (default)",
        "checkpoint.local                      = null              (default)",
        "checkpoint.every                      = 10m               (job.yaml:4)",
        "checkpoint.overlap                    = true              (default)",
        "checkpoint.when_busy                  = skip              (default)",
        "checkpoint.drain_limit                = null              (default)",
        "checkpoint.peer_copies                = 0                 (default)",
        "checkpoint.keep.last                  = 3                 (default)",
        "checkpoint.keep.every                 = null              (default)",
        "restart.no_progress                   = 5                 (--set)",
        "restart.max_restarts                  = null              (default)",
        "restart.window                        = 5 in 1h           (--set)",
        "restart.refill_after                  = 1h                (default)",
        "restart.budgets.code_error            = 2                 (default)",
        "restart.budgets.import_error          = 1                 (default)",
        "restart.budgets.host_out_of_memory    = 2                 (default)",
        "restart.budgets.gpu_out_of_memory     = 1                 (default)",
        "restart.budgets.segfault              = 2                 (default)",
        "restart.budgets.killed                = 4                 (--set)",
        "restart.budgets.collective_timeout    = null              (default)",
        "restart.budgets.hang                  = 2                 (default)",
        "restart.budgets.left_early            = 1                 (default)",
        "restart.budgets.hardware              = null              (default)",
        "restart.budgets.storage               = null              (default)",
        "restart.budgets.data                  = 2                 (default)",
        "restart.budgets.preempted             = null              (default)",
        "restart.budgets.exit                  = 2                 (default)",
        "restart.budgets.unknown               = null              (default)",
        "restart.backoff.first                 = 1s                (default)",
        "restart.backoff.max                   = 5m                (default)",
        "restart.backoff.jitter                = 0.1               (default)",
        "watch.enabled                         = true              (default)",
        "watch.start                           = 30m               (default)",
        "watch.restore                         = 30m               (default)",
        "watch.first_step                      = 30m               (default)",
        "watch.step                            = auto              (default)",
        "watch.save                            = off               (--set)",
        "watch.eval                            = 30m               (default)",
        "watch.end                             = 30m               (default)",
        "watch.floor                           = 4s                (default)",
        "watch.ceiling                         = 30m               (default)",
        "standby.enabled                       = true              (default)",
        "standby.exclude                       = []                (default)",
        "health.nodes.exclude                  = true              (default)",
        "health.nodes.after.device             = 1                 (default)",
        "health.nodes.after.check              = 1                 (default)",
        "health.nodes.after.host               = 2                 (default)",
        "health.nodes.after.lost               = 2                 (default)",
        "health.nodes.after.contained_error    = 3                 (default)",
        "health.nodes.after.suspect_device     = 2                 (default)",
        "health.nodes.after.host_out_of_memory = 2                 (default)",
        "health.nodes.after.segfault           = 2                 (default)",
        "health.nodes.after.storage            = 3                 (default)",
        "health.nodes.after.killed             = 3                 (default)",
        "health.nodes.after.hang               = 3                 (default)",
        "health.nodes.window                   = 7d                (default)",
        "health.nodes.first                    = 4h                (default)",
        "health.nodes.max                      = 7d                (default)",
        "health.nodes.most                     = 1/3               (default)",
        "health.nodes.check                    = true              (default)",
        "health.nodes.probation                = 7d                (default)",
        "data.cache                            = null              (default)",
        "data.limit                            = null              (default)",
        "data.reserve_free                     = 10%               (default)",
        "signals.grace                         = 30s               (default)",
        "logs.tee                              = all               (default)",
        "exit_codes                            = ftrun             (default)",
        "env.A                                 = b                 (--set)",
        "callbacks                             = []                (default)",
        "faults                                = []                (default)",
    ]


def test_show_json_is_one_document():
    job = load(FULL)
    result = run("show", "job.yaml", "--json")
    assert json.loads(result.stdout) == to_json(job)
    assert "--no-json" not in run("show", "--help").stdout


def test_schema_prints_the_schema():
    assert run("schema").stdout == schema_text()


def test_nothing_here_imports_torch():
    code = "import sys, ftrun.cli.config; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert result.returncode == 0
