"""One command line, two launchers: torchrun's and ftrun's workers must not be able to tell which one started them.

What may differ is listed in ``ON_PURPOSE`` and in the README's section of the same meaning, and nowhere else.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import held_port, kill_tree
from parity_kit import LAUNCHERS, Case, Outcome, both, environment, known, options, refused, spellings, without_standbys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conftest import Runner

README = Path(__file__).parent.parent / "README.md"

ON_PURPOSE: Mapping[str, str] = {
    "FTRUN_WORKER": "what the launcher tells a worker; torchrun has none",
    "TORCHELASTIC_ERROR_FILE": "lies in the run directory, unless one of torchrun's log options is given",
    "error.json": "is written for every worker that fails, not only for functions decorated with @record",
    "sys.modules": "holds ftrun's bootstrap, and what a standby has imported ahead of the script",
    "--run-path": "starts sessions of their own, without the launcher's signal handlers, so that they end whole",
    "TORCHELASTIC_MAX_RESTARTS": "the given --max-restarts; without one there is no limit, which reads 1000000",
}
"""Variables and files of workers that differ.

Everything else that a worker, a reader of logs or a shell can see is the same, but for exit codes and for standard
error: torch's own words on one side, and on the other what ftrun says in lines that begin with its name."""

STARTED_AHEAD = frozenset({"module", "restarted", "tee", "SIGTERM"})
"""Cases in which workers are standbys, too."""

LOG_OPTIONS = ("-r", "--redirects", "-t", "--tee", "--log-dir", "--log_dir", "--logs-specs", "--logs_specs",
    "--local-ranks-filter", "--local_ranks_filter", "PET_LOG_DIR", "PET_TEE")  # fmt: skip

TRICKY = (
    "--nproc-per-node", "7", "--help", "-m", "--name", "x", "--", "", "a b", "q'\"\\", "new\nline", "$HOME *",
    "${local_rank}", "rank-${local_rank}.pt", "{rank}", "%s", "ünï", "-c", "--fresh", "\udcff",
)  # fmt: skip


def probe(*options: str, script: str = "probe.py", arguments: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (script, *arguments, ":::", *options)


RANK_1_FAILS = ("together=1", "rank=1")
C10D = "--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id job7"
PET = {
    "PET_NNODES": "1:1",
    "PET_NPROC_PER_NODE": "2",
    "PET_LOG_DIR": "logs",
    "PET_TEE": "1",
    "PET_REDIRECTS": "2",
    "PET_ROLE": "trainer",
    "PET_MAX_RESTARTS": "1",
    "PET_MONITOR_INTERVAL": "0.2",
    "PET_START_METHOD": "fork",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:0",
    "PET_RDZV_ID": "petjob",
    "PET_RDZV_CONF": "timeout=60",
    "PET_LOCAL_RANKS_FILTER": "1",
    "PET_DUPLICATE_STDOUT_FILTERS": "apple,pear",
    "PET_DUPLICATE_STDERR_FILTERS": "orange",
    "PET_NODE_RANK": "0",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "PET_EVENT_LOG_HANDLER": "null",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM",
    "PET_SHUTDOWN_TIMEOUT": "5",
    "PET_VIRTUAL_LOCAL_RANK": "1",
    "PET_MODULE": "1",
    "PET_STANDALONE": "0",
    "PET_NO_PYTHON": "0",
    "PET_RUN_PATH": "0",
}

STARTS = {
    "plain": Case("--nproc-per-node 2", probe(arguments=TRICKY)),
    "one worker": Case(target=probe("read=1"), stdin="first line\nsecond ünï\n", workers=1),
    "module": Case("-m --nproc_per_node=2 --role ''", probe(script="pkg.probe"), {"OMP_NUM_THREADS": "3"}),
    "folder": Case("--nproc-per-node 2", probe(script="folder"), {"PYTHONPATH": "plugins:pkg"}),
    "odd name": Case("", probe("end=no", script="a 'b\"\n$c.py"), {"PYTHONSAFEPATH": "1"}, workers=1),
    "no python": Case("--no-python --nproc-per-node 2", (sys.executable, "-B", *probe())),
    "run path": Case("--run-path --start-method spawn --nproc-per-node 2", probe(script="{home}/probe.py")),
    "abbreviated": Case("--nnod 1 --stand --rol trainer --mod", probe(script="pkg"), workers=1),
    "other interpreter": Case(target=probe(), env={"PYTHON_EXEC": sys._base_executable}, workers=1),
}
MEETINGS = {
    "standalone": Case("--standalone --nproc-per-node 2 --monitor-interval 0.3 --rdzv-conf join_timeout=60", probe()),
    "static, package, plug-in": Case(
        "--module --nnodes=1 --master-addr 127.0.0.1 --master-port {port} --node-rank 0 --rdzv-id s9 "
        "--logs-specs parity -r 1 --log-dir logs",
        probe(script="pkg", arguments=("-m", "x")),
        {"PYTHONPATH": "{home}/plugins"},
        workers=1,
    ),
    "static endpoint, redirects without a directory": Case(
        "--rdzv-backend=static --rdzv-endpoint=localhost:{port} --redirects=1 --local_ranks_filter 0 "
        "--nproc-per-node 2",
        probe(),
    ),
    "c10d": Case(
        "--rdzv_backend c10d --rdzv_endpoint localhost:{port} --rdzv_id '' --rdzv_conf timeout=30,is_host=1 "
        "--local_addr 127.0.0.1 --monitor_interval 0.2",
        probe(),
        workers=1,
    ),
}
LOGS = {
    "redirects by rank": Case(f"{C10D} --log-dir logs -r 0:1,1:2 --nproc-per-node 2", probe()),
    "redirects, wrapped interpreter": Case(
        "--log-dir logs --redirects 3 --tee 0:1 --role trainer --nproc-per-node 2",
        probe(),
        {"PYTHON_EXEC": "{home}/wrapper"},
    ),
    "tee": Case(
        "--log_dir logs -t 3 --duplicate-stdout-filters apple,pear --duplicate_stderr_filters orange "
        "--local-ranks-filter 1 --nproc-per-node 2",
        probe(),
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}/${local_rank}/${role_name}> "},
    ),
    "tee without a directory, virtual": Case(
        "--tee 3 --role '' --duplicate_stdout_filters=x,,y --duplicate-stderr-filters err --nproc-per-node 2 "
        "--virtual-local-rank",
        probe(),
        {"CUDA_VISIBLE_DEVICES": "5,7"},
    ),
    "prefix": Case(
        "-t 3 --log-line-prefix-template ${{hostname}}:${{rank}}> --nproc-per-node 2",
        probe(),
        {"PET_LOG_LINE_PREFIX_TEMPLATE": "not this"},
    ),
    "restarted": Case(
        f"{C10D} --max-restarts 1 --log-dir logs -t 3 --nproc-per-node 2",
        probe(*RANK_1_FAILS, "exit=3", "attempt=0"),
        attempts=2,
    ),
    "recorded": Case(
        "--log-dir logs --max-restarts 0 --nproc-per-node 2",
        probe(*RANK_1_FAILS, "record=1"),
        {"TORCHELASTIC_ERROR_FILE": "{home}/launcher.json"},
        fails=True,
    ),
    "recorded, no log options": Case(
        "--max-restarts 0",
        probe("record=1"),
        {"TORCHELASTIC_ERROR_FILE": "{home}/launcher.json"},
        fails=True,
        workers=1,
    ),
}
VARIABLES = {
    "variables": Case(target=probe(script="pkg.probe"), env=PET),
    "more variables": Case(
        target=(sys.executable, *probe()),
        env={"PET_NO_PYTHON": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "{port}"},
        workers=1,
    ),
    "variables and options": Case(
        "--role b --nproc-per-node 1", probe(), {"PET_STANDALONE": "1", **PET} | {"PET_MODULE": "0"}, workers=1
    ),
}
ENDS = {
    "a rank fails": Case("--nproc_per_node 2 --max_restarts 0", probe(*RANK_1_FAILS, "exit=3"), fails=True),
    "raises": Case("--max-restarts 0", probe("raise=no data"), fails=True, workers=1),
    "segfault": Case("--max-restarts 0 --nproc-per-node 2", probe(*RANK_1_FAILS, "signal=SIGSEGV"), fails=True),
    "leaves hard": Case("--max-restarts 0 -m", probe("leave=75", script="pkg"), fails=True, workers=1),
    "SIGTERM": Case("--nproc-per-node 2", probe("handle=SIGTERM"), fails=True, signal=signal.SIGTERM),
    "SIGINT": Case("", probe("handle=SIGTERM,SIGINT"), fails=True, signal=signal.SIGINT, workers=1),
    "SIGHUP": Case("", probe("handle=SIGHUP"), fails=True, signal=signal.SIGHUP, workers=1),
    "SIGUSR1 passed on": Case(
        "--signals-to-handle SIGUSR1,SIGTERM --shutdown-timeout 20 --nproc-per-node 2",
        probe("handle=SIGUSR1,SIGTERM"),
        fails=True,
        signal=signal.SIGUSR1,
    ),
    "stubborn": Case(
        "--signals_to_handle SIGTERM --shutdown_timeout 1 --nproc-per-node 2",
        probe("handle=SIGTERM", "stubborn=1"),
        fails=True,
        signal=signal.SIGTERM,
    ),
}
REFUSALS = {
    "no script": Case("--nproc-per-node 2", (), fails=True, workers=0),
    "missing script": Case("", ("missing.py",), fails=True, workers=0),
    "bad number": Case("--nproc-per-node some", fails=True, workers=0),
    "no nodes": Case("--nnodes 0", fails=True, workers=0),
    "bad redirects": Case("--redirects 7", fails=True, workers=0),
    "no such plug-in": Case("--logs-specs missing", fails=True, workers=0),
    "no such events": Case("--event-log-handler missing", fails=True, workers=0),
    "no GPU to bind to": Case("--numa-binding node", fails=True, workers=0),
    "no such shell": Case("--print-completion fish", fails=True, workers=0),
    "contradiction": Case("--no-python -m", fails=True, workers=0),
}
CASES = {**STARTS, **MEETINGS, **LOGS, **VARIABLES, **ENDS}


def test_every_option_and_variable_of_the_installed_torch_is_in_the_table() -> None:
    """In one of its spellings: tests/test_options.py sees to it that all spellings of an option mean the same."""
    used = set().union(*map(spellings, [*CASES.values(), *REFUSALS.values(), EVENTS, TALKS]))
    missing = ["/".join(each.option_strings) for each in options() if not used & set(each.option_strings)]
    variables = {f"PET_{each.dest.upper()}" for each in options() if type(each).__name__ in ("env", "check_env")}
    assert len(variables) > 20
    assert not missing, missing
    assert variables <= used, "without a case: " + ", ".join(sorted(variables - used))


def test_the_readme_names_what_differs_on_purpose() -> None:
    text = README.read_text()
    assert [name for name in ON_PURPOSE if f"`{name}`" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_alike(name: str, tmp_path: Path) -> None:
    if not known(CASES[name]):
        pytest.skip("this torch hasn't got these options")
    case = CASES[name]
    for attempt in range(3):
        theirs, ours = both(case, tmp_path / str(attempt), standbys=name in STARTED_AHEAD)
        # A stubborn worker has a second to hear what it was told. One that gets no processor in it is told once more.
        if name != "stubborn" or len(ours.signals) == len(theirs.signals) == case.workers:
            break
    alike(case, theirs, ours)


@pytest.mark.parametrize("name", REFUSALS)
def test_both_refuse(name: str, tmp_path: Path) -> None:
    if not known(REFUSALS[name]):
        pytest.skip("this torch hasn't got these options")
    theirs, ours = refused(REFUSALS[name], tmp_path)
    assert theirs.code != 0, theirs
    assert ours.code != 0, ours
    assert "Traceback" not in ours.err, ours.err
    assert not (tmp_path / "seen").exists()


def alike(case: Case, theirs: Outcome, ours: Outcome) -> None:
    told = f"--- torchrun: {theirs.code}\n{theirs.err}\n--- ftrun: {ours.code}\n{ours.err}"
    assert (theirs.code != 0, ours.code != 0) == (case.fails, case.fails), told
    assert len(theirs.seen) == case.attempts * case.workers, told
    assert sorted(ours.seen) == sorted(theirs.seen), told
    for worker, seen in theirs.seen.items():
        same(ours.seen[worker], seen, case, worker)
    order = list if case.workers == 1 else sorted
    assert order(ours.out.splitlines(keepends=True)) == order(theirs.out.splitlines(keepends=True))
    if case.workers:
        assert order(ours.talk("ours")) == order(theirs.talk("theirs")), told
    assert ours.signals == theirs.signals
    more = {name for name in ours.logs if Path(name).name in ON_PURPOSE} - set(theirs.logs)
    assert {name: text for name, text in ours.logs.items() if name not in more} == theirs.logs


def same(ours: dict[str, Any], theirs: dict[str, Any], case: Case, worker: str) -> None:
    run_path = case.line.startswith("--run")
    differs = {"torch", "leads", "handlers"} if run_path else {"torch"}
    mine, yours = ({name: value for name, value in seen.items() if name not in differs} for seen in (ours, theirs))
    ignored = set(ON_PURPOSE)
    if any(f"{option}=" in f"{word}=" for option in LOG_OPTIONS for word in (*case.line.split(), *case.env)):
        ignored.discard("TORCHELASTIC_ERROR_FILE")
    if "--max" in case.line or "PET_MAX_RESTARTS" in case.env:
        ignored.discard("TORCHELASTIC_MAX_RESTARTS")
    assert run_path or not theirs["torch"]
    assert environment_of(mine, ignored, case) == environment_of(yours, ignored, case), worker
    assert mine == yours, worker


def environment_of(seen: dict[str, Any], ignored: set[str], case: Case) -> dict[str, str]:
    """A worker's variables, without those that may differ; a random port becomes the word for one."""
    found: dict[str, str] = {name: value for name, value in seen.pop("environment").items() if name not in ignored}
    if found.get("MASTER_PORT", "").isdecimal():
        found["MASTER_PORT"] = "a free port"
    if "TORCHELASTIC_ERROR_FILE" in found:
        # <temporary>/<id>_<random>/attempt_0/0/error.json
        found["TORCHELASTIC_ERROR_FILE"] = "/".join(Path(found["TORCHELASTIC_ERROR_FILE"]).parts[-3:])
    if "--rdzv_id ''" in case.line:
        assert found["TORCHELASTIC_RUN_ID"].isdecimal()
        found["TORCHELASTIC_RUN_ID"] = "a random number"
    return found


EVENTS = Case(
    "--event-log-handler console --nproc-per-node 2 --max-restarts 0", probe(*RANK_1_FAILS, "exit=3"), fails=True
)


@pytest.mark.slow
def test_event_log_handlers_hear_the_same_events(tmp_path: Path) -> None:
    theirs, ours = both(EVENTS, tmp_path, standbys=False)
    heard = [sorted(event_names(each.err)) for each in (theirs, ours)]
    assert heard[0] == heard[1]
    assert "torchelastic.worker.status.FAILED AGENT" not in heard[0]
    assert "torchelastic.worker.status.SUCCEEDED AGENT" in heard[0]  # torch: the agent ran, whatever became of workers


def event_names(text: str) -> list[str]:
    events = [json.loads(line) for line in text.splitlines() if line.startswith('{"name": "torchelastic')]
    return [f"{each['name']} {each['source']}" for each in events]


TALKS = Case("--event_log_handler null", probe(), {"LOGLEVEL": "INFO"}, workers=1)


@pytest.mark.slow
def test_torchs_own_log_lines_can_be_had(tmp_path: Path) -> None:
    theirs, ours = both(TALKS, tmp_path, standbys=False)
    alike(TALKS, theirs, ours)
    for words in (
        "starting workers for entrypoint",
        "Rendezvous'ing worker group",
        "worker group successfully finished",
    ):
        for outcome in (theirs, ours):
            assert any(words in line for line in outcome.torchs_lines()), (words, outcome.err)


@pytest.mark.slow
def test_torchruns_exit_codes_come_back(runner: Runner) -> None:
    (runner.cwd / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    result = runner.run("--set", "exit_codes=torchrun", "--max-restarts", "0", "leaves.py")
    assert result.code == 1, result


@pytest.mark.slow
def test_two_nodes_meet_over_c10d(tmp_path: Path) -> None:
    """Two launchers on one host, each in a directory of its own, as two nodes without shared storage."""
    reports = {}
    for who in LAUNCHERS:
        with held_port() as port:
            reports[who] = two_nodes(who, tmp_path / who, port)
    assert len(reports["theirs"]) == 4
    assert reports["ours"] == reports["theirs"]


def two_nodes(who: str, directory: Path, port: int) -> dict[str, dict[str, str]]:
    running = []
    probe_text = (Path(__file__).parent / "scripts" / "parity_probe.py").read_text()
    try:
        for node in range(2):
            home = directory / f"node{node}"
            home.mkdir(parents=True)
            (home / "probe.py").write_text(probe_text)
            line = f"--nnodes 2 --nproc-per-node 2 {C10D} --local-addr localhost".format(port=port)
            with (home / "said").open("w") as said:
                process = subprocess.Popen(
                    [sys.executable, "-m", LAUNCHERS[who], *without_standbys(who), *line.split(), "probe.py"],
                    cwd=home,
                    env=environment(home, {}),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            running.append(process)
        codes = [process.wait(120) for process in running]
    finally:
        for process in running:
            kill_tree(process.pid)
            process.wait(10)
    assert codes == [0, 0], "\n".join(path.read_text() for path in directory.glob("node*/said"))
    found = {path.stem: json.loads(path.read_text()) for path in directory.glob("node*/seen/*.json")}
    wanted = ("RANK", "WORLD", "MASTER_ADDR", "ROLE", "GROUP", "LOCAL", "TORCHELASTIC_R", "TORCHELASTIC_U")
    return {
        worker: {k: v for k, v in seen["environment"].items() if k.startswith(wanted)} for worker, seen in found.items()
    }
