"""How one rank ended, read by itself and put into words. Pure."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun.contract import ExitCode
from ftrun.launch.failures import fingerprint, symptoms
from ftrun.launch.failures.kinds import Kind
from ftrun.launch.failures.symptoms import Standing, Symptom

if TYPE_CHECKING:
    from ftrun.error_file import ErrorRecord
    from ftrun.launch.evidence.model import Evidence, RankEvidence
    from ftrun.launch.failures.host_signs import HostSigns

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


def read(each: RankEvidence, evidence: Evidence, signs: HostSigns) -> Symptom:
    """One rank by itself."""
    stepped = each.beat is not None and each.beat.made_a_step
    code = each.exit_code or 0
    if code == ExitCode.TRY_AGAIN:
        return Symptom(Kind.STOPPED, Standing.LEFT)
    if each.error is not None and each.error.kind in ("usage", "corrupt_checkpoint", "lost_snapshot"):
        return Symptom(Kind(each.error.kind.replace("_", " ")), Standing.ERROR)
    if code < 0:
        return _read_signal(each, evidence, signs)
    found = symptoms.of_exception(_last_words(each), stepped=stepped) if _last_words(each) else None
    if found is None and each.error is not None and not _is_system_exit(each.error):
        return Symptom(Kind.CODE_ERROR, Standing.ERROR)
    if found is None:
        return symptoms.of_exit(code, "\n".join(each.last_lines), stepped=stepped)
    return _with_memory(found, each, evidence, signs) if found.kind is Kind.KILLED else found


def _read_signal(each: RankEvidence, evidence: Evidence, signs: HostSigns) -> Symptom:
    number = -(each.exit_code or 0)
    if number == signal.SIGABRT:
        return symptoms.of_abort("\n".join(each.last_lines))
    if number in _CRASHES:
        return Symptom(Kind.SEGFAULT, Standing.SIGNAL)
    # Somebody asked for the end: less of a cause than a kill that nobody announces.
    standing = Standing.ERROR if number == signal.SIGTERM else Standing.SIGNAL
    if number == signal.SIGKILL:
        return _with_memory(Symptom(Kind.KILLED, standing), each, evidence, signs)
    preempted = any("PREEMPT" in line.upper() for line in each.last_lines)
    return Symptom(Kind.PREEMPTED if preempted else Kind.KILLED, standing)


def _with_memory(symptom: Symptom, each: RankEvidence, evidence: Evidence, signs: HostSigns) -> Symptom:
    """Tell the kernel's search for memory from any other kill."""
    if each.pid in signs.killed_for_memory:
        return replace(symptom, kind=Kind.HOST_OUT_OF_MEMORY, note=f"the kernel log says that it killed {each.pid}")
    words = symptom.cause.text if symptom.cause else ""
    if any(f"{pid})" in words for pid in signs.killed_for_memory):
        return replace(symptom, kind=Kind.HOST_OUT_OF_MEMORY, note="the kernel log says that it killed the worker")
    if evidence.oom_kills:
        count = f"{evidence.oom_kills} process" + ("es" if evidence.oom_kills > 1 else "")
        return replace(symptom, kind=Kind.HOST_OUT_OF_MEMORY, note=f"the kernel killed {count} for memory meanwhile")
    return symptom


def _last_words(each: RankEvidence) -> str:
    """The text that tells most: the error file's, or the end of stderr."""
    if each.error is not None and not _is_system_exit(each.error):
        return each.error.traceback or each.error.message
    return "\n".join(each.last_lines)


def everything(each: RankEvidence) -> str:
    """All that it said last."""
    return "\n".join((each.error.message if each.error else "", *each.last_lines))


def _is_system_exit(error: ErrorRecord) -> bool:
    return error.message.startswith("SystemExit") or not error.message


def why(each: RankEvidence, symptom: Symptom) -> tuple[str, ...]:
    """What speaks for the symptom, in lines for people."""
    lines = [message(each, symptom)]
    if symptom.note and symptom.note not in lines[0]:
        lines.append(symptom.note)
    if symptom.cause is not None:
        lines += [f"at {frame}" for frame in reversed(fingerprint.users_frames(symptom.cause.frames))]
    return tuple(lines)


def message(each: RankEvidence, symptom: Symptom) -> str:
    """How it ended, in one line for people."""
    code = each.exit_code or 0
    if code < 0:
        said = f": {symptom.cause.line}" if symptom.cause else f" ({symptom.note})" if symptom.note else ""
        return f"rank {each.rank} was ended by {signal_name(-code)}{said}"
    if each.error is not None and each.error.kind != "exception":
        # The names of ftrun's own errors mean nothing to the reader; their texts do.
        return f"rank {each.rank}: {each.error.message.partition(': ')[2]}"
    if symptom.cause is not None:
        note = f" ({symptom.note})" if symptom.note else ""
        return f"rank {each.rank}: {symptom.cause.line}{note}"
    if each.error is not None and each.error.message not in ("", f"SystemExit: {code}"):
        return f"rank {each.rank}: {each.error.message.removeprefix('SystemExit: ')}"
    return f"rank {each.rank} exited with code {code}" if each.fell else f"rank {each.rank} still ran"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
