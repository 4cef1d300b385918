"""What the last words of one rank tell: an ordered table from texts to kinds. Pure.

The texts are those of Python, torch, gloo, NCCL, CUDA and the C library; ``tests/failure_texts`` holds real ones.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from ftrun.launch.failures import traces
from ftrun.launch.failures.kinds import Kind


class Standing(enum.IntEnum):
    """How near to the cause a rank's end is; the lower, the nearer."""

    SIGNAL = 0
    ERROR = 1
    LEFT = 2
    WAITED = 3
    LOST_A_CONNECTION = 4
    LOST_A_PEER = 5


@dataclass(frozen=True)
class Symptom:
    """What one rank's end looks like by itself.

    Attributes:
        kind: the kind, were it the only rank.
        standing: a cause, or a consequence of what happened elsewhere.
        cause: the exception that began it.
        note: what the text means, where that isn't plain.
        gpu: the text speaks of a GPU, so that a fault of the device may be behind it.
    """

    kind: Kind
    standing: Standing
    cause: traces.Raised | None = None
    note: str = ""
    gpu: bool = False


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    kind: Kind
    standing: Standing = Standing.ERROR
    note: str = ""


def _rule(kind: Kind, pattern: str, note: str = "", standing: Standing = Standing.ERROR) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE | re.DOTALL), kind, standing, note)


# Ranks that waited in vain: victims of the one that didn't come.
_WAITED = _rule(
    Kind.COLLECTIVE_TIMEOUT,
    r"watchdog caught collective operation timeout|watchdog got stuck for|heartbeat monitor timed out"
    r"|timed out waiting \d+ ?ms for (recv|send)|application timeout caused pair closure"
    r"|failed to pass monitoredbarrier|wait timeout after \d+ ?ms"
    r"|timed out after \d+ ?\w+ (waiting for clients|while trying to connect)|socket timeout|DistStoreError"
    r"|heard nothing from rank|RendezvousTimeoutError|storebarrier.*timed? ?out",
    standing=Standing.WAITED,
)
# How torch, gloo and NCCL report that another rank has gone.
_LOST_A_PEER = _rule(
    Kind.UNKNOWN,
    r"gloo[^ ]*[\\/]transport.*(connection (closed|reset|refused)|broken pipe|socket closed|no route to host)"
    r"|DistNetworkError(?!.*EADDRINUSE)|ncclRemoteError|remote process exited|NCCL.*aborted"
    r"|socketProgress.*closed|ncclSystemError.*(connection|socket|closed|reset|refused|unreachable)"
    r"|NCCL.*system error|connectFullMesh|RendezvousClosedError"
    r"|RendezvousConnectionError|lost the store of its group|recvValue failed|sendBytes failed"
    r"|Connection was likely closed|remote server shutdown or crash",
    "another rank was gone",
    Standing.LOST_A_PEER,
)
# The adapter of this rank gave up on another one: nearer to the cause than a peer whose connection was closed.
_ADAPTER_GAVE_UP = _rule(
    Kind.UNKNOWN,
    r"NET/IB ?:.*(completion|timeout)|IBV_WC_(RETRY_EXC|RNR_RETRY_EXC|WR_FLUSH|REM_OP)_ERR",
    "its network adapter gave up on another rank",
    Standing.LOST_A_CONNECTION,
)
_LOST_A_CONNECTION = _rule(
    Kind.CODE_ERROR,
    r"connection (was )?(closed|reset|refused)|broken ?pipe|socket closed|ConnectionResetError|ConnectionAbortedError",
    standing=Standing.LOST_A_CONNECTION,
)

_STORAGE_ERRNO = r"\[errno (5|28|30|116|121|122|124)\]|\[errno (19|107|108|110|112)\][^:]*: ['\"]"
_OBJECT_STORE = (
    r"botocore\.exceptions|google\.(api_core|cloud)\S*(exceptions|error)|azure\.core\.exceptions|s3transfer|SlowDown"
    r"|EndpointConnectionError|ReadTimeoutError.*(s3|storage|blob)|aiobotocore|obstore"
)

# The order counts: the first that fits.
_RULES = [
    _rule(
        Kind.GPU_OUT_OF_MEMORY,
        r"(cuda|hip|xpu|mps|npu)( error)?:? out of memory|(cuda|hip|xpu)\S* out of memory|torch\.OutOfMemoryError"
        r"|^OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    ),
    _rule(
        Kind.HARDWARE,
        r"uncorrectable ECC|uncorrectable NVLink|fallen off the bus|GPU is lost|device is lost"
        r"|unable to determine the device handle|nvmlReturn_t.GPU_IS_LOST|NVML_ERROR_GPU_IS_LOST"
        r"|invalid access of peer GPU memory over nvlink",
        "the driver reports a fault of the device",
    ),
    _rule(
        Kind.IMPORT_ERROR,
        r"torch not compiled with CUDA|found no NVIDIA driver|driver version is insufficient"
        r"|no kernel image is available",
        "this torch, the driver and the GPU don't go together",
    ),
    _rule(
        Kind.HARDWARE,
        r"\bibv_\w+ failed|IBV_EVENT_DEVICE_FATAL|ncclSystemError.*input/output error",
        "the network adapter reports a fault",
    ),
    _WAITED,
    _ADAPTER_GAVE_UP,
    _LOST_A_PEER,
    _rule(
        Kind.HOST_OUT_OF_MEMORY,
        r"killed by signal: bus error|unexpected bus error encountered in worker|insufficient shared memory",
        "shared memory (/dev/shm) of this host or container is too small for the DataLoader's batches",
    ),
    _rule(
        Kind.KILLED,
        r"DataLoader worker \(pid\S* \d+\) is killed by signal: (killed|terminated)",
        "a DataLoader worker was killed",
    ),
    _rule(
        Kind.SEGFAULT,
        r"DataLoader worker \(pid\S* \d+\) is killed by signal",
        "a DataLoader worker crashed",
    ),
    _rule(
        Kind.DATA,
        r"DataLoader timed out after",
        "a batch took longer than the DataLoader's timeout; its storage may be slow",
    ),
    _rule(Kind.UNKNOWN, r"address already in use|EADDRINUSE", "another process has the port"),
    _rule(Kind.HOST_OUT_OF_MEMORY, r"^MemoryError|\[errno 12\]|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc"),
    _rule(Kind.STORAGE, _STORAGE_ERRNO),
    _rule(
        Kind.STORAGE,
        r"no space left on device|stale file handle|stale NFS|read-only file system|disk quota exceeded"
        r"|remote I/O error|input/output error|PytorchStreamWriter failed|basic_ios::clear: iostream error"
        r"|unexpected pos \d+ vs \d+",
    ),
    _rule(Kind.STORAGE, _OBJECT_STORE, "an object store failed"),
    _rule(Kind.PREEMPTED, r"due to preemption|preemption notice|spot (instance )?interruption|^\w*Preempt\w*:"),
    _LOST_A_CONNECTION,
]

# Errors of reading something that isn't what it should be.
_UNREADABLE = {
    "UnicodeDecodeError",
    "JSONDecodeError",
    "UnidentifiedImageError",
    "BadGzipFile",
    "BadZipFile",
    "LZMAError",
    "UnpicklingError",
    "EOFError",
    "ArrowInvalid",
    "ReadError",
    "struct.error",
    "zlib.error",
    "DecompressionBombError",
    "InvalidDataError",
}
_UNREADABLE_TEXT = re.compile(
    r"cannot identify image file|image file is truncated|file signature not found|truncated file"
    r"|PytorchStreamReader failed|HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer",
    re.IGNORECASE,
)
# Slips of the programmer, wherever they happen.
_SLIPS = {
    "TypeError",
    "AttributeError",
    "NameError",
    "UnboundLocalError",
    "NotImplementedError",
    "ImportError",
    "ModuleNotFoundError",
    "SyntaxError",
}
_IMPORTS = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"}
_SETTINGS = {
    "FileNotFoundError",
    "NotADirectoryError",
    "IsADirectoryError",
    "PermissionError",
    "ArgumentError",
    "JSONDecodeError",
    "TOMLDecodeError",
    "ScannerError",
    "ParserError",
    "MissingMandatoryValue",
    "ConfigAttributeError",
    "ConfigCompositionException",
    "ValidationError",
}
# Errors of ftrun's own, which say more than what the system told it.
_OURS = {
    "CheckpointError": Kind.STORAGE,
    "UnreachableError": Kind.STORAGE,
    "IrregularError": Kind.STORAGE,
    "Disagreement": Kind.CODE_ERROR,
}
_SAMPLE = "in DataLoader worker process"
_FETCHES = ("torch/utils/data/_utils/fetch.py", "torch/utils/data/_utils/worker.py")
_LOADED = re.compile(r"\bftrun was (?:loading|reading) (?P<what>.+)")  # what ftrun.DataLoader notes in an error
_USAGE = re.compile(r"^usage: |: error: |can't open file '.*': \[Errno 2\]", re.MULTILINE)
_CUDA = re.compile(
    r"\bCUDA\b|\bHIP error|\bcu(BLAS|DNN)|CUDNN_STATUS|CUBLAS_STATUS|NCCL|AcceleratorError", re.IGNORECASE
)
_UNFLUSHED = 120
_THROWN = re.compile(r"what\(\): +(?P<text>.*)", re.DOTALL)


def of_exception(text: str, *, stepped: bool) -> Symptom | None:
    """What a traceback, or an exception without one, looks like; None where there is none in the text.

    Args:
        text: an error file's traceback or message, or the end of stderr.
        stepped: the rank has made a step in this attempt.
    """
    cause = traces.cause(text)
    if cause is None:
        return None
    gpu = _CUDA.search(cause.said) is not None
    rule = next((rule for rule in _RULES if rule.pattern.search(cause.said)), None)
    ours = _ours(text)
    if ours is not None and (rule is None or rule.kind is Kind.STORAGE):
        return Symptom(_OURS[ours.type], Standing.ERROR, ours, rule.note if rule is not None else "", gpu)
    if rule is not None and not (rule.kind is Kind.IMPORT_ERROR and stepped):
        return Symptom(rule.kind, rule.standing, cause, rule.note, gpu)
    kind, note = _by_place(cause, in_worker=_SAMPLE in text, stepped=stepped)
    loaded = _LOADED.search(text)
    if loaded is not None:
        note = f"{note or 'raised'}: {loaded['what'].strip()}"
    return Symptom(kind, Standing.ERROR, cause, note, gpu)


def _ours(text: str) -> traces.Raised | None:
    """The error of ftrun's own, about a checkpoint, that ended the process."""
    last = traces.last(text)
    if last is None or not last.type.startswith("ftrun.") or last.name not in _OURS:
        return None
    return replace(last, type=last.name)


def _by_place(cause: traces.Raised, *, in_worker: bool, stepped: bool) -> tuple[Kind, str]:
    """The kind of an exception that says nothing special, by where it was raised."""
    reading = in_worker or any(frame.file.endswith(_FETCHES) for frame in cause.frames)
    unreadable = bool({cause.name, cause.type} & _UNREADABLE) or _UNREADABLE_TEXT.search(cause.said) is not None
    if not stepped and cause.name in _IMPORTS:
        return Kind.IMPORT_ERROR, ""
    if reading:
        where = "a DataLoader worker" if in_worker else "the data set"
        if cause.name in _SLIPS:
            return Kind.CODE_ERROR, f"raised in {where}, and of a kind that code is to blame for"
        return Kind.DATA, f"raised in {where}, while it read samples"
    if not stepped and cause.name in _SETTINGS:
        return Kind.IMPORT_ERROR, "before the first step, so a path or a setting is wrong"
    if unreadable:
        return Kind.DATA, "something that was read isn't what it should be"
    return Kind.CODE_ERROR, ""


def of_abort(text: str) -> Symptom:
    """What SIGABRT looks like: a watchdog that gave up, a C++ exception, or the C library's own checks."""
    for known in (_WAITED, _LOST_A_PEER):
        if known.pattern.search(text):
            return Symptom(known.kind, known.standing, None, known.note, gpu="NCCL" in text)
    if thrown := _THROWN.search(text):
        said = traces.Raised("C++ exception", thrown["text"].partition("\nException raised from")[0])
        gpu = _CUDA.search(said.said) is not None
        rule = next((rule for rule in _RULES if rule.pattern.search(said.said)), None)
        if rule is not None:
            return Symptom(rule.kind, rule.standing, said, rule.note, gpu)
        return Symptom(Kind.SEGFAULT, Standing.SIGNAL, said, "a C++ exception that nobody caught", gpu)
    if re.search(r"double free|corrupted|free\(\)|malloc|munmap_chunk|stack smashing|Assertion .* failed", text):
        return Symptom(Kind.SEGFAULT, Standing.SIGNAL, None, "the C library found its heap or stack damaged")
    # Without a word it may be a watchdog of which nothing is left, so it is not put before a peer's own error.
    return Symptom(Kind.SEGFAULT, Standing.WAITED)


def of_exit(code: int, text: str, *, stepped: bool) -> Symptom:
    """What a plain exit code looks like, with what stderr ends with."""
    if code == 2 and not stepped and _USAGE.search(text):
        return Symptom(Kind.IMPORT_ERROR, Standing.ERROR, None, "the command line was refused")
    note = "Python couldn't write the last of its output" if code == _UNFLUSHED else ""
    return Symptom(Kind.EXIT, Standing.ERROR, None, note)
