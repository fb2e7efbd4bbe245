"""Sharded state to and from a directory, in the background, with torch.distributed.checkpoint (DCP).

It owns the asynchronous save and the encoding of random states. It never commits: a directory written here counts only
once the caller has written its manifest. Invariant: what is saved is the state at the moment of ``start``, whatever the
optimizer does afterwards.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from milesbatch.errors import CorruptArtefactError, RunFailedError, StorageError
from milesbatch.store.durable import storage_error

_MT19937_WORDS = 624


class AsyncSaver:
    """Saves one state at a time in the background. Construction is collective, and so is every call but ``done``."""

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
        self._save: Future[Any] | None = None
        self._directory = Path()

    def start(self, state: Mapping[str, Any], directory: Path) -> None:
        """Copy ``state`` and begin to write it to ``directory``; returns when parameters may change again.

        Durability: when ``done`` is true on rank 0, the files of all ranks are written and synced; the names in the
        directory are not, which is left to the commit. Killed midway, ``directory`` holds a part of the files.

        Raises:
            RuntimeError: the save before is not finished; call ``wait`` first.
        """
        if self._save is not None:
            raise RuntimeError(f"the save to {self._directory} is not finished; call wait() before start()")
        self._directory = directory
        # sync_files: only the node that wrote a file can flush its own cache of it, so the committing rank cannot do this.
        writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, overwrite=True)
        response = async_save(dict(state), storage_writer=writer, process_group=self._group)
        assert isinstance(response, Future)
        self._save = response

    @property
    def is_done(self) -> bool:
        """True when nothing is being written on this rank, whatever became of it (``wait`` tells)."""
        return self._save is None or self._save.done()

    def done(self) -> bool:
        """True when no save is running on this rank; the first call after a failed save raises its error.

        Raises:
            StorageError: the save failed; names the path and the cause. A new one may be started.
        """
        if self._save is None:
            return True
        if not self._save.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Return when no save is running.

        Raises:
            StorageError: as ``done``.
        """
        save, self._save = self._save, None
        if save is None:
            return
        try:
            save.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise _save_error(self._directory, error) from error

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
