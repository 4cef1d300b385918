"""Everything of torch's (and Python's) that ftrun relies on, public or private, each with what depends on it.

A failure here says what a new version has changed and what of ftrun must follow. Nothing of ftrun is under test.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import runpy
import signal
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import launcher, run
from torch.distributed.elastic import multiprocessing, rendezvous
from torch.distributed.elastic.agent.server import api as agents
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import api as contexts
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.rendezvous import dynamic_rendezvous, registry, static_tcp_rendezvous
from torch.distributed.launcher import api as launchers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LocalElasticAgent = local_elastic_agent.LocalElasticAgent
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def need(condition: object, what: str, where: str) -> None:
    assert condition, f"torch {torch.__version__}: {what} is gone or has changed; {where} relies on it"


def takes(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def required(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default, ``self``, ``*args`` and ``**kwargs`` left out."""
    return [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name != "self"
    ]


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def body(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


# --- the command line: launch/options.py, launch/torch_config.py


def test_the_launchers_parser_can_be_had_and_extended() -> None:
    where = "launch/options.py, which adds ftrun's options to torch's parser,"
    parser = run.get_args_parser()
    need(isinstance(parser, argparse.ArgumentParser), "run.get_args_parser() -> ArgumentParser", where)
    need(takes(run.get_args_parser) == [], "run.get_args_parser without arguments", where)
    names = {action.dest for action in parser._actions}
    used = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"}
    used |= {"max_restarts", "module", "no_python", "run_path", "log_dir", "redirects", "tee", "local_ranks_filter"}
    used |= {"master_port", "logs_specs", "training_script", "training_script_args"}
    need(used <= names, f"the destinations {sorted(used - names)}", where + " and launch/plan.py")
    need(
        not names & {"config", "name", "run_dir", "fresh", "dry_run", "json", "set"}, "room for ftrun's options", where
    )
    taken = {text for action in parser._actions for text in action.option_strings}
    own = {"-c", "--config", "--name", "--run-dir", "--fresh", "--dry-run", "--json", "--set", "--allow-new-total"}
    need(not taken & {*own, "--nproc"}, f"that torch has none of {sorted(taken & own)} itself", where)


def test_variables_become_defaults_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "launch/options.py, which tells variables from defaults,"
    monkeypatch.setenv("PET_NNODES", "1:4")
    monkeypatch.setenv("PET_MODULE", "1")
    defaults = {action.dest: action.default for action in run.get_args_parser()._actions}
    need(defaults["nnodes"] == "1:4", "PET_NNODES as the default of --nnodes", where)
    need(defaults["module"] is True, "PET_MODULE=1 as the default of --module", where)
    monkeypatch.setenv("PET_MODULE", "yes")
    with pytest.raises(ValueError, match="yes"):
        run.get_args_parser()


def test_options_become_a_configuration_and_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "launch/torch_config.py"
    need(takes(run.config_from_args) == ["args"], "run.config_from_args(args)", where)
    line = ["--nproc-per-node", "2", "--log-dir", os.devnull, "--role", "r", "train.py", "--lr", "1"]
    arguments = run.get_args_parser().parse_args(line)
    arguments.master_port = arguments.master_port or 29500
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, command, rest = run.config_from_args(arguments)
    need(command == os.getenv("PYTHON_EXEC", command), "the interpreter as a worker's command", where)
    need(
        rest == ["-u", "train.py", "--lr", "1"],
        "the arguments -u, script, rest",
        where + ", which puts its bootstrap between",
    )
    read = {
        "nproc_per_node",
        "min_nodes",
        "max_nodes",
        "run_id",
        "role",
        "rdzv_endpoint",
        "rdzv_backend",
        "rdzv_configs",
    }
    read |= {"max_restarts", "monitor_interval", "start_method", "log_line_prefix_template", "local_addr", "logs_specs"}
    need(
        read <= fields(launchers.LaunchConfig), f"LaunchConfig's {sorted(read - fields(launchers.LaunchConfig))}", where
    )
    need(config.logs_specs.root_log_dir == os.devnull, "that a log directory of /dev/null makes no directory", where)
    known = read | {"metrics_cfg", "event_log_handler", "numa_options", "signals_to_handle", "shutdown_timeout"}
    known |= {"rdzv_timeout", "duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank"}
    new = fields(launchers.LaunchConfig) - known
    need(
        not new,
        f"that LaunchConfig has no more fields ({sorted(new)}): they must reach the agent,",
        "launch/execute.py",
    )


def test_a_module_is_run_with_the_m_flag_and_a_path_by_a_function() -> None:
    where = "launch/torch_config.py"

    def settled(*line: str) -> tuple[Any, list[str]]:
        arguments = run.get_args_parser().parse_args(["--log-dir", os.devnull, *line])
        arguments.master_port = arguments.master_port or 29500
        return run.config_from_args(arguments)[1:]

    need(settled("-m", "pkg", "x")[1] == ["-u", "-m", "pkg", "x"], "-u -m module", where)
    need(settled("--no-python", "ls", "-l") == ("ls", ["-l"]), "the bare command of --no-python", where)
    need(settled("--run-path", "/t.py", "x") == (run.run_script_path, ["/t.py", "x"]), "run.run_script_path", where)
    need(takes(run.determine_local_world_size) == ["nproc_per_node"], "run.determine_local_world_size(nproc)", where)
    with pytest.raises(ValueError, match="some"):
        run.determine_local_world_size("some")


def test_logs_specs_are_found_by_entry_point() -> None:
    where = "launch/plugin.py, which is such an entry point,"
    source = body(run)
    need('"torchrun.logs_specs"' in source, "the entry-point group torchrun.logs_specs", where)
    for name in ("log_dir", "redirects", "tee", "local_ranks_filter"):
        need(f"{name}=" in body(run.config_from_args), f"the argument {name} of a LogsSpecs class", where)


# --- the agent: launch/agent.py, launch/execute.py


OVERRIDDEN = {
    "_rendezvous": ["worker_group"],
    "_start_workers": ["worker_group"],
    "_monitor_workers": ["worker_group"],
    "_stop_workers": ["worker_group"],
    "_initialize_workers": ["worker_group"],
    "_restart_workers": ["worker_group"],
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_methods_of_the_agent_that_may_be_overridden(name: str) -> None:
    method = getattr(LocalElasticAgent, name, None)
    need(method, f"LocalElasticAgent.{name}", "launch/agent.py")
    need(
        takes(method) == OVERRIDDEN[name], f"LocalElasticAgent.{name}({', '.join(OVERRIDDEN[name])})", "launch/agent.py"
    )


def test_the_agent_is_made_from_a_specification_and_logs() -> None:
    where = "launch/execute.py"
    need(required(LocalElasticAgent.__init__) == ["spec", "logs_specs"], "LocalElasticAgent(spec, logs_specs)", where)
    used = {"start_method", "log_line_prefix_template"}
    need(used <= set(takes(LocalElasticAgent.__init__)), f"LocalElasticAgent's {sorted(used)}", where)
    spec = takes(agents.WorkerSpec)
    used = {"role", "local_world_size", "entrypoint", "args", "rdzv_handler", "max_restarts", "monitor_interval"}
    used |= {"master_addr", "master_port", "local_addr"}
    need(used <= set(spec), f"WorkerSpec's {sorted(used - set(spec))}", where)
    need(takes(LocalElasticAgent.run) == ["role"], "agent.run(role=...)", where)
    for name in ("get_event_succeeded", "get_event_failed"):
        need(takes(getattr(LocalElasticAgent, name)) == [], f"agent.{name}()", where)


def test_the_agents_loop() -> None:
    where = "launch/agent.py, which decides about restarts and waits for workers in _monitor_workers,"
    loop = body(agents.SimpleElasticAgent._invoke_run)
    need("monitor_interval = spec.monitor_interval" in loop, "that the loop's pause is spec.monitor_interval", where)
    need("time.sleep(monitor_interval)" in loop, "that the loop sleeps for it", where)
    need(
        loop.index("time.sleep(") < loop.index("self._monitor_workers("),
        "sleep, then _monitor_workers, in each turn",
        where,
    )
    need("self._remaining_restarts > 0" in loop, "that no restarts left means the end", where)
    need("self._remaining_restarts -= 1" in loop, "that a restart costs one", where)
    need("self._stop_workers(self._worker_group)" in loop, "that workers are stopped at the end", where)
    need("rdzv_handler.num_nodes_waiting()" in loop, "num_nodes_waiting, asked while all are well", where)
    need("self._exit_barrier()" in loop, "_exit_barrier at success", where)
    restart = body(agents.SimpleElasticAgent._restart_workers)
    need(
        restart.index("_stop_workers") < restart.index("_initialize_workers"),
        "stop, then start, in _restart_workers",
        where,
    )
    begin = body(agents.SimpleElasticAgent._initialize_workers)
    need(begin.index("_rendezvous") < begin.index("_start_workers"), "rendezvous, then start", where)
    need("self._remaining_restarts" in body(agents.SimpleElasticAgent.__init__), "_remaining_restarts", where)
    end = body(agents.SimpleElasticAgent.run)
    need(
        "except SignalException as e" in end and "self._shutdown(e.sigval" in end,
        "_shutdown(signal) on a signal",
        where,
    )
    need(takes(LocalElasticAgent._shutdown)[:1] == ["death_sig"], "_shutdown(death_sig, ...)", where)


def test_workers_are_started_through_one_global_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is replaced, and the agent is made to call it: that is how another process context gets in."""
    where = "launch/agent.py, which puts its own process context in its place,"
    need(hasattr(local_elastic_agent, "start_processes"), "local_elastic_agent.start_processes", where)
    caught: dict[str, Any] = {}

    def start_processes(*arguments: Any, **named: Any) -> Any:
        assert arguments == (), "called with keyword arguments only"
        caught.update(named)
        return types.SimpleNamespace(pids=lambda: {0: 4321})

    monkeypatch.setattr(local_elastic_agent, "start_processes", start_processes)
    handler = types.SimpleNamespace(get_run_id=lambda: "id", use_agent_store=True, get_backend=lambda: "c10d")
    spec: Any = agents.WorkerSpec(
        role="r",
        local_world_size=1,
        entrypoint="python",
        args=("-u", "x-${local_rank}"),
        rdzv_handler=handler,
        max_restarts=3,
    )
    logs = multiprocessing.DefaultLogsSpecs(log_dir=str(tmp_path))
    agent = LocalElasticAgent(spec, logs, log_line_prefix_template="<${rank}>")
    group = agent._worker_group
    group.store, group.group_rank, group.group_world_size = object(), 0, 1
    group.master_addr, group.master_port = "host", 1
    group.workers = [agents.Worker(local_rank=0, global_rank=0, role_rank=0, world_size=1, role_world_size=1)]
    agent._remaining_restarts = 2
    pids = agent._start_workers(group)
    need(pids == {0: 4321} and agent._pcontext is not None, "that it goes on with what start_processes returns", where)
    used = {"name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes", "start_method", "numa_options"}
    need(used <= set(caught), f"its arguments {sorted(used - set(caught))}", where)
    new = set(caught) - used - {"duplicate_stdout_filters", "duplicate_stderr_filters"}
    need(not new, f"that it has no more arguments ({sorted(new)})", where)
    need(caught["args"] == {0: ("-u", "x-0")}, "the substituted arguments by local rank", where)
    need(caught["log_line_prefixes"] == {0: "<0>"}, "prefixes by local rank", where)
    need(caught["logs_specs"] is logs, "the LogsSpecs as given", where)
    environment = caught["envs"][0]
    need(environment["TORCHELASTIC_RESTART_COUNT"] == "1", "TORCHELASTIC_RESTART_COUNT = given - left", where)
    need(environment["TORCHELASTIC_MAX_RESTARTS"] == "3", "TORCHELASTIC_MAX_RESTARTS", where)
    read = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    read |= {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
    need(read <= set(environment), f"the variables {sorted(read - set(environment))}", "session/place.py")
    need(
        environment["TORCHELASTIC_USE_AGENT_STORE"] == "True", "the word True for an agent's store", "session/place.py"
    )


def test_what_the_agent_reads_of_a_process_context() -> None:
    where = "launch/processes.py, which stands in for it,"
    text = body(LocalElasticAgent)
    used = {line.split("self._pcontext.")[1].split("(")[0] for line in text.splitlines() if "self._pcontext." in line}
    need(used <= {"pids", "wait", "close"}, f"that no more of it is used ({sorted(used)})", where)
    monitor = body(LocalElasticAgent._monitor_workers)
    need("self._pcontext.wait(0)" in monitor, "wait(0) as the question whether anything has ended", where)
    need("result.is_failed()" in monitor and "result.failures" in monitor, "RunProcsResult in _monitor_workers", where)


def test_the_worker_group_and_results() -> None:
    where = "launch/agent.py"
    used = {"spec", "workers", "store", "group_rank", "group_world_size", "master_addr", "master_port", "state"}
    need(
        used <= set(agents.WorkerGroup.__slots__),
        f"WorkerGroup's {sorted(used - set(agents.WorkerGroup.__slots__))}",
        where,
    )
    used = {"id", "local_rank", "global_rank", "role_rank", "world_size", "role_world_size"}
    need(used <= set(agents.Worker.__slots__), f"Worker's {sorted(used - set(agents.Worker.__slots__))}", where)
    states = {"UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"}
    need(states <= set(agents.WorkerState.__members__), "the states of workers", where)
    result = agents.RunResult(state=agents.WorkerState.FAILED)
    need((result.is_failed(), result.failures, result.return_values) == (True, {}, {}), "RunResult", where)
    need(not agents.RunResult(state=agents.WorkerState.UNHEALTHY).is_failed(), "that UNHEALTHY isn't FAILED", where)


# --- processes and logs: launch/processes.py, launch/logs.py, launch/output/


def test_process_contexts() -> None:
    where = "launch/processes.py, which is one,"
    need(inspect.isabstract(contexts.PContext), "multiprocessing.api.PContext", where)
    need(contexts.PContext.__abstractmethods__ == {"_start", "_poll", "pids", "_close"}, "its abstract methods", where)
    need(takes(contexts.PContext.start) == [], "PContext.start()", where)
    need(takes(contexts.PContext.wait) == ["timeout", "period"], "PContext.wait(timeout, period)", where)
    need(takes(contexts.PContext.close) == ["death_sig", "timeout"], "PContext.close(death_sig, timeout)", where)
    need(takes(contexts.PContext._close) == ["death_sig", "timeout"], "PContext._close(death_sig, timeout)", where)
    start = body(contexts.PContext.start)
    need(
        start.index("signal.signal(") < start.index("self._start()"), "that start() handles signals, then starts", where
    )
    tails = ("self._tail_logs",) if VERSION >= (2, 10) else ("self._stdout_tail", "self._stderr_tail")
    need(
        all(name in start for name in tails),
        f"{tails} as all that start() touches, for which ours has stand-ins",
        where,
    )
    need(
        "if timeout == 0:\n            return self._poll()" in body(contexts.PContext.wait), "wait(0) -> _poll()", where
    )


@pytest.mark.skipif(VERSION < (2, 10), reason="the variable came with torch 2.10")
def test_signals_are_taken_from_the_environment_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "launch/torch_config.py, which sets TORCHELASTIC_SIGNALS_TO_HANDLE,"
    handled = []
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append((number, handler)))
    context = types.SimpleNamespace(_start=lambda: None, _tail_logs=[])
    contexts.PContext.start(context)  # type: ignore[arg-type]
    need([number for number, _ in handled] == [signal.SIGUSR1], "the list in the environment", where)
    with pytest.raises(contexts.SignalException) as caught:
        handled[0][1](signal.SIGUSR1, None)
    need(caught.value.sigval is signal.SIGUSR1, "SignalException.sigval", "launch/execute.py")
    assert threading.current_thread() is threading.main_thread()


def test_results_and_failures_of_processes(tmp_path: Path) -> None:
    where = "launch/processes.py, which makes them,"
    need(fields(contexts.RunProcsResult) >= {"return_values", "failures"}, "RunProcsResult's fields", where)
    result = contexts.RunProcsResult()
    need(not result.is_failed(), "RunProcsResult.is_failed()", where)
    missing = errors.ProcessFailure(0, 77, -9, str(tmp_path / "none.json"))
    need(
        (missing.local_rank, missing.pid, missing.exitcode) == (0, 77, -9),
        "ProcessFailure(rank, pid, code, file)",
        where,
    )
    need(missing.signal_name() == "SIGKILL", "ProcessFailure.signal_name()", where)
    need(missing.error_file == "<N/A>", "the name <N/A> for no error file", "the copy to the launcher's own error file")
    need(contexts.RunProcsResult(failures={0: missing}).is_failed(), "is_failed() with failures", where)
    table = str(errors.ChildFailedError("train.py", {0: missing}))
    for words in ("train.py FAILED", "Root Cause (first observed failure)", "exitcode  : -9 (pid: 77)", "SIGKILL"):
        need(words in table, f"{words!r} in the table of ChildFailedError", "whoever prints it for log readers")


def test_error_files_have_one_shape(tmp_path: Path) -> None:
    where = "error_file.py, which writes and reads the same,"
    path = tmp_path / "error.json"
    path.write_text('{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T", "timestamp": "12"}}}')
    failure = errors.ProcessFailure(0, 1, 1, str(path))
    need(failure.error_file == str(path) and failure.timestamp == 12, "extraInfo.timestamp, in seconds", where)
    need(failure.message["message"] == "ValueError: x", "message.message", where)
    need("TORCHELASTIC_ERROR_FILE" in inspect.getsource(errors.error_handler), "TORCHELASTIC_ERROR_FILE", where)
    handler = errors.get_error_handler()
    need(takes(handler.dump_error_file) == ["rootcause_error_file", "error_code"], "dump_error_file", "the copy")


def test_log_specifications(tmp_path: Path) -> None:
    where = "launch/logs.py and launch/plugin.py"
    need(contexts.LogsSpecs.__abstractmethods__ == {"reify", "root_log_dir"}, "LogsSpecs' abstract members", where)
    need(takes(contexts.LogsSpecs.reify) == ["envs"], "LogsSpecs.reify(envs)", where)
    init = ["log_dir", "redirects", "tee", "local_ranks_filter"]
    need(takes(contexts.LogsSpecs.__init__) == init, f"LogsSpecs({', '.join(init)})", where)
    streams = {"stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"}
    need(streams <= fields(contexts.LogsDest), f"LogsDest's {sorted(streams - fields(contexts.LogsDest))}", where)
    new = fields(contexts.LogsDest) - streams - {"filtered_stdout", "filtered_stderr"}
    need(not new, f"that LogsDest has no more fields ({sorted(new)})", "launch/output/attempt.py")
    logs = contexts.DefaultLogsSpecs(log_dir=str(tmp_path), tee={0: contexts.Std.ALL}, local_ranks_filter={1})
    need((logs._tee, logs._local_ranks_filter) == ({0: contexts.Std.ALL}, {1}), "_tee, _local_ranks_filter", where)
    environments: Any = [{"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": "2"} for _ in range(2)]
    named = logs.reify(dict(enumerate(environments)))
    need(named.error_files[1].endswith("attempt_2/1/error.json"), "the tree <id>_*/attempt_2/1/error.json", where)
    need(environments[1]["TORCHELASTIC_ERROR_FILE"] == named.error_files[1], "that reify completes environments", where)
    need(named.stdouts[1] == "", "an empty name for a stream that isn't redirected", "launch/output/attempt.py")
    need(named.stdouts[0].endswith("attempt_2/0/stdout.log") and not named.tee_stdouts, "files without tail", where)
    need(body(contexts.PContext.__init__).count("logs_specs.reify(envs)") == 1, "one reify for each start", where)


def test_numa_binding_is_a_wrapper_of_the_command() -> None:
    where = "launch/processes.py, which binds workers as torch does,"
    from torch.numa import binding

    if VERSION < (2, 10):
        bind = getattr(binding, "maybe_temporarily_apply_numa_binding_to_current_thread", None)
        need(
            bind and takes(bind) == ["gpu_index", "numa_options"],
            "torch 2.9's binding of the starting thread",
            where,
        )
        return
    name = "maybe_wrap_command_args_with_numa_binding"
    wrap = getattr(binding, name if VERSION < (2, 11) else f"_{name}", None)
    need(wrap, f"torch.numa.binding.{name} (from torch 2.11 on with _)", where)
    named = takes(wrap)
    need(named[:1] == ["command_args"] and named[-1] == "numa_options", f"its arguments (now {named})", where)
    rank = dict.fromkeys(named[1:-1], 0)
    need(
        wrap(("python", "x"), **rank, numa_options=None) == ("python", "x"),
        "that without options nothing is wrapped",
        where,
    )


# --- rendezvous: launch/rendezvous.py, launch/agent.py


def test_a_rendezvous_handler() -> None:
    where = "launch/rendezvous.py, which is one,"
    handler = rendezvous.RendezvousHandler
    wanted = {
        "get_backend",
        "next_rendezvous",
        "is_closed",
        "set_closed",
        "num_nodes_waiting",
        "get_run_id",
        "shutdown",
    }
    need(
        handler.__abstractmethods__ == wanted,
        f"its abstract methods (now {sorted(handler.__abstractmethods__)})",
        where,
    )
    need(isinstance(handler.use_agent_store, property), "RendezvousHandler.use_agent_store", where)
    info = takes(rendezvous.RendezvousInfo)
    need(info[:4] == ["store", "rank", "world_size", "bootstrap_store_info"], f"RendezvousInfo (now {info})", where)
    store_info = rendezvous.RendezvousStoreInfo
    need(fields(store_info) == {"master_addr", "master_port"}, "RendezvousStoreInfo's fields", where)
    build = takes(store_info.build)
    need(build == ["rank", "store", "local_addr", "server_port"], f"RendezvousStoreInfo.build (now {build})", where)


def test_a_store_that_takes_any_port() -> None:
    where = "launch/rendezvous.py"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    need(store.port > 0, "TCPStore.port of a store on any port", where)
    info = rendezvous.RendezvousStoreInfo.build(0, store, "localhost", server_port=store.port)
    need((info.master_addr, info.master_port) == ("localhost", store.port), "what build() gives", where)
    need(store.get("MASTER_ADDR") == b"localhost", "that build() publishes the address", where)


def test_rendezvous_by_name() -> None:
    where = "launch/execute.py"
    need(takes(registry.get_rendezvous_handler) == ["params"], "registry.get_rendezvous_handler(params)", where)
    parameters = rendezvous.RendezvousParameters("static", "localhost:29511", "id", 1, 1, None, rank=0)
    need(launchers._get_addr_and_port(parameters) == ("localhost", 29511), "launcher.api._get_addr_and_port", where)
    need(hasattr(rendezvous.api, "RendezvousError"), "rendezvous.api.RendezvousError", where)
    need(issubclass(rendezvous.RendezvousTimeoutError, rendezvous.api.RendezvousError), "its subclasses", where)
    need("torchrun.handlers" in inspect.getsource(registry), "the entry-point group torchrun.handlers", where)


def test_fields_that_hold_the_old_store() -> None:
    where = "fresh_store in launch/agent.py, which clears them before every round,"
    text = inspect.getsource(dynamic_rendezvous.DynamicRendezvousHandler)
    need(
        "if self._bootstrap_store_info is None" in text, "that a _bootstrap_store_info of None makes a new store", where
    )
    need("self._shared_tcp_store_server = self._create_tcp" in text, "_shared_tcp_store_server, made then", where)
    static = static_tcp_rendezvous.StaticTCPRendezvous("localhost", 0, 0, 1, "run", 1)
    need(hasattr(static, "_store"), "StaticTCPRendezvous._store", where)
    need("if not self._store" in inspect.getsource(type(static)), "that it makes a new store for None", where)
    need(static.get_backend() == "static", "the backend's name 'static'", where)
    need("self._store" in body(agents.SimpleElasticAgent._rendezvous), "the agent's own _store", where)


# --- events and lines of torch's own


def test_events_and_loggers() -> None:
    from torch.distributed.elastic import events

    need(takes(events.record) == ["event", "destination"], "events.record(event, destination)", "launch/execute.py")
    name = agents.logger.name
    need(name.startswith("torch.distributed.elastic"), f"the agent's logger under that name (now {name})", "execute.py")


# --- in the worker: session/*


def test_hooks_of_all_optimizers() -> None:
    where = "session/optimizer_steps.py, which counts the steps of plain scripts,"
    from torch.optim import optimizer

    heard: list[str] = []
    before = optimizer.register_optimizer_step_pre_hook(lambda *_: heard.append("before"))
    after = optimizer.register_optimizer_step_post_hook(lambda *_: heard.append("after"))
    try:
        weight = torch.nn.Parameter(torch.ones(1))
        (weight * 2).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
    finally:
        before.remove()
        after.remove()
    need(heard == ["before", "after"], "the hooks before and after every optimizer's step", where)
    need(optimizer.__name__ == "torch.optim.optimizer", "the module torch.optim.optimizer", where)


def test_how_a_process_learns_that_torchrun_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "session/alone.py, which finds the restarts of one torchrun by them,"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    need(dist.is_torchelastic_launched(), "TORCHELASTIC_RUN_ID as the sign of a launcher", where)


def test_pythons_own() -> None:
    where = "launch/options.py"
    parser = argparse.ArgumentParser()
    option = parser.add_argument("--some-option")
    need(parser._option_string_actions["--some-option"] is option, "ArgumentParser._option_string_actions", where)
    need(parser._get_option_tuples("--some")[0][:2] == (option, "--some-option"), "_get_option_tuples", where)
    module = getattr(runpy, "_run_module_as_main", None)
    need(module and takes(module) == ["mod_name", "alter_argv"], "runpy._run_module_as_main", "session/script.py")
    assert launcher.api is launchers
