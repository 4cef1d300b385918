"""How each peer is called, by its documentation."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import ckpt_state
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    States = dict[str, torch.Tensor]


class Method(Protocol):
    """One way to save. ``save`` returns when training may go on, ``finish`` when the checkpoint is whole."""

    def save(self, path: Path) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Loadable(Protocol):
    """One that loads too, into the state that it saved; ``files`` are those that this rank needs."""

    def load(self, path: Path) -> None: ...

    def files(self, path: Path) -> list[Path]: ...


class TorchSave:
    """``torch.save`` with an fsync: rank 0 for all, or each rank its shards; all go on when it is stored."""

    def __init__(self, states: States, shared: bool) -> None:
        self._states, self._shared = states, shared

    def save(self, path: Path) -> None:
        if not self._shared or dist.get_rank() == 0:
            path.mkdir(exist_ok=True)
            content = {name: ckpt_state.local(each) for name, each in self._states.items()}
            with self._file(path).open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def load(self, path: Path) -> None:
        loaded = torch.load(self._file(path), map_location="cpu", weights_only=True)
        for name, each in self._states.items():
            ckpt_state.local(each).copy_(loaded[name])

    def files(self, path: Path) -> list[Path]:
        return [self._file(path)]

    def _file(self, path: Path) -> Path:
        return path / f"rank{0 if self._shared else dist.get_rank()}.pt"


class DcpSave:
    """``dcp.save`` and ``dcp.load``."""

    def __init__(self, states: States, shared: bool) -> None:
        self._states, self._shared = states, shared

    def save(self, path: Path) -> None:
        dcp.save(self._states, checkpoint_id=path)

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def load(self, path: Path) -> None:
        dcp.load(self._states, checkpoint_id=path)

    def files(self, path: Path) -> list[Path]:
        return sorted(path.glob("*.distcp" if self._shared else f"__{dist.get_rank()}_*.distcp"))


class DcpAsync:
    """``dcp.async_save`` as it comes, with a process group of its own."""

    asynchronous = True

    def __init__(self, kind: str, states: States, shared: bool) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._states, self._kind = states, AsyncCheckpointerType[kind]
        self._group = dist.new_group(backend="gloo")
        self._answer: Any = None

    def save(self, path: Path) -> None:
        self._answer = dcp.async_save(
            self._states, checkpoint_id=path, process_group=self._group, async_checkpointer_type=self._kind
        )

    def finish(self) -> None:
        getattr(self._answer, "upload_completion", self._answer).result()

    def close(self) -> None: ...


class TorchSnapshot:
    """``Snapshot.async_take``."""

    def __init__(self, states: States, shared: bool) -> None:
        import torchsnapshot

        self._take = torchsnapshot.Snapshot.async_take
        self._state = {"state": torchsnapshot.StateDict(**states)}
        self._replicated = ["**"] if shared else []
        self._pending: Any = None

    def save(self, path: Path) -> None:
        self._pending = self._take(str(path), self._state, replicated=self._replicated)

    def finish(self) -> None:
        self._pending.wait()

    def close(self) -> None: ...


class Nvrx:
    """NVRx's asynchronous writer, as its documentation calls it."""

    asynchronous = True

    def __init__(self, states: States, shared: bool) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        self._core, self._files, self._saver = core, filesystem_async, state_dict_saver
        self._states = states
        self._queue = core.AsyncCallsQueue()

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        writer = self._files.FileSystemWriterAsync(path, thread_count=1)
        planned = self._saver.save_state_dict_async_plan(self._states, writer, None, planner=dcp.DefaultSavePlanner())
        function, preload, arguments = writer.get_save_function_and_args()
        finish = partial(self._saver.save_state_dict_async_finalize, *planned)
        request = self._core.AsyncRequest(function, arguments, [finish], preload_fn=self._preload(preload))
        self._queue.schedule_async_request(request)

    def _preload(self, given: Any) -> Any:
        return given

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=False)

    def close(self) -> None:
        self._queue.close()


class NvrxOnCpu(Nvrx):
    """The same without its calls of CUDA. Nothing is staged: the worker reads the tensors while training goes on."""

    def _preload(self, given: Any) -> Any:
        return None

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def close(self) -> None:
        caller = self._queue.persistent_caller
        if caller is not None:
            caller.close()


METHODS: dict[str, Callable[[States, bool], Method]] = {
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save thread": partial(DcpAsync, "THREAD"),
    "dcp.async_save process": partial(DcpAsync, "PROCESS"),
    "torchsnapshot": TorchSnapshot,
    "nvrx": Nvrx,
    "nvrx on CPU": NvrxOnCpu,
}
