"""Sharded state to and from a directory, in the background, with torch.distributed.checkpoint (DCP).

It owns the asynchronous save, the copies that it needs, and the encoding of random states. It never commits: a directory
written here counts only once the caller has written its manifest. Invariant: what is saved is the state at the moment of
``start``, whatever the optimizer does once ``await_copy`` has returned.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from milesbatch.errors import CorruptArtefactError, RunFailedError, StorageError
from milesbatch.store.durable import storage_error

_MT19937_WORDS = 624


class _Staging:
    """Copies a state into memory that is kept from one save to the next.

    Fresh memory costs more than the copy itself: the kernel maps and clears every page of it. The price is one copy of the
    state in host memory for the life of the process. On a GPU's host that memory is pinned, and copies have a stream of their
    own, beside that of the computation.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``state`` in CPU memory, valid until the next one is made. What computes ``state`` must have finished."""
        if self._stream is None and (gpu := _gpu_of(state)) is not None:
            self._stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copied = {key: self._copy(key, value) for key, value in state.items()}
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in copied}
        return copied

    def _copy(self, key: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            local, shape, stride = self._into_buffer(key, value.to_local()), value.shape, value.stride()
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
            )
        return self._into_buffer(key, value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    def _into_buffer(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def _gpu_of(state: Mapping[str, Any]) -> torch.device | None:
    """The one GPU on which the state lies; None when it is in host memory."""
    return next((value.device for value in state.values() if isinstance(value, torch.Tensor) and value.is_cuda), None)


class AsyncSaver:
    """Saves one state at a time in the background. Construction is collective, and so is ``start``."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        """Make the saver's own process group; ``timeout_s`` bounds how long a rank waits for the others.

        Raises:
            RunFailedError: psutil is not installed (DCP's writer needs it and would hang the save).
        """
        if importlib.util.find_spec("psutil") is None:
            raise RunFailedError("a checkpoint cannot be saved: psutil is missing", mend="pip install psutil")
        # The save talks to the other ranks from its own thread; on the training group its messages would mix with those
        # of the train step and hang both. gloo, because the snapshot is in CPU memory.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._staging = _Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Of their own, so that a copy, for which the next update waits, never waits for them.
        self._chores = ThreadPoolExecutor(1, thread_name_prefix="chores")
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._save: Future[None] | None = None
        self._later: list[Future[None]] = []
        self._directory = Path()

    def start(self, state: Mapping[str, Any], directory: Path, afterwards: Callable[[], None] | None = None) -> None:
        """Begin to copy ``state`` and to write the copy to ``directory``. It must not change before :meth:`await_copy`.

        So the copy, too, costs training nothing while that computes gradients. ``afterwards`` runs in the background, when
        this rank's save is finished: on rank 0, that of all ranks.

        Durability: by then, on rank 0, the files of all ranks are written and synced; the names in the directory are not.
        Killed midway, ``directory`` holds a part of the files.

        Raises:
            RuntimeError: the save before is not finished; call ``wait`` first.
        """
        if self._save is not None:
            raise RuntimeError(f"the save to {self._directory} is not finished; call wait() before start()")
        if (gpu := _gpu_of(state)) is not None:
            torch.cuda.current_stream(gpu).synchronize()
        self._directory = directory
        self._is_copied.clear()
        self._save = self._thread.submit(self._copy_and_write, state, directory, afterwards)

    def await_copy(self) -> None:
        """Return when the state that was given to ``start`` is copied and may change; at once when none is being copied."""
        self._is_copied.wait()

    def _copy_and_write(self, state: Mapping[str, Any], directory: Path, afterwards: Callable[[], None] | None) -> None:
        try:
            copied = self._staging.copy(state)
        finally:
            self._is_copied.set()
        # sync_files: only the node that wrote a file can flush its own cache of it, so the committing rank cannot do this.
        writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, overwrite=True)
        save(copied, storage_writer=writer, process_group=self._group)
        if afterwards is not None:
            afterwards()

    @property
    def is_done(self) -> bool:
        """True when nothing is being written on this rank, whatever became of it (``wait`` tells)."""
        return self._save is None or self._save.done()

    def later(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the background, behind those that were put off before."""
        self._later.append(self._chores.submit(action))

    def wait(self) -> None:
        """Return when nothing runs in the background: no save, nothing after it, nothing that was put off.

        Raises:
            StorageError: the save failed; names the path and the cause. A new one may be started.
            MilesbatchError: from an action that was to be run in the background.
        """
        save, self._save = self._save, None
        actions, self._later = self._later, []
        try:
            if save is not None:
                save.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise _save_error(self._directory, error) from error
        for action in actions:
            action.result()

    def load(self, state: dict[str, Any], directory: Path) -> None:
        """As :func:`load`; a save may be running."""
        load(state, directory)


def load(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors of ``state`` in place from ``directory`` (collective); the world may have another size.

    Raises:
        CorruptArtefactError: files or entries are missing, damaged or of another shape.
        StorageError: the files cannot be read.
    """
    try:
        load_sharded(state, storage_reader=FileSystemReader(directory))
    except CheckpointException as error:
        cause = _first_failure(error)
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | EOFError):
            raise storage_error(directory, cause) from error
        raise CorruptArtefactError(
            f"{directory}: the checkpoint cannot be loaded: {type(cause).__name__}: {cause}",
            mend="use the checkpoint before; `milesbatch audit` lists what is damaged",
        ) from error


def _first_failure(error: CheckpointException) -> BaseException:
    return error.failures[min(error.failures)][0] if error.failures else error


def _save_error(directory: Path, error: BaseException) -> StorageError:
    cause = _first_failure(error) if isinstance(error, CheckpointException) else error
    if isinstance(cause, OSError):
        return storage_error(directory, cause)
    return StorageError(
        f"the checkpoint was not saved to {directory}: {type(cause).__name__}: {cause}",
        mend="check space and health of that filesystem; the checkpoint before is still good",
    )


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's, numpy's and Python's global generators as tensors of fixed shape."""
    version, words, gauss = random.getstate()
    assert version == 3
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy_words": torch.tensor([*np.asarray(keys).tolist(), position], dtype=torch.int64),
        "numpy_gauss": torch.tensor([has_gauss, cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Inverse of :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python_words"].tolist()), gauss if has_gauss else None))
    words = state["numpy_words"].tolist()
    has_cached, cached = state["numpy_gauss"].tolist()
    keys = np.array(words[:_MT19937_WORDS], dtype=np.uint32)
    np.random.set_state(("MT19937", keys, words[_MT19937_WORDS], int(has_cached), cached))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
