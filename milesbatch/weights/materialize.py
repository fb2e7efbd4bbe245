"""A policy version as a directory that Hugging Face tools load: configuration, tokenizer, ``model.safetensors``.

Owns what such a directory holds; never writes over existing files, or into a run (but for a hold while it reads). Invariant:
the weights file is written last, so a directory left by a killed process cannot be loaded by mistake; the same call goes on
from it. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from milesbatch.errors import ModelError
from milesbatch.records import WeightsManifest
from milesbatch.store.directories import filling, require_free
from milesbatch.store.durable import TEMPORARY_PREFIX, make_directory, publish_file, publishing, storage_error
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import AcceptManifest, accept_all
from milesbatch.weights.rebuild import rebuild
from milesbatch.weights.tensorfile import write_tensors
from milesbatch.weights.tensors import RawTensor, torch_dtype_name

WEIGHTS = Path("model.safetensors")
_CONFIG = Path("config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


InFiles = Callable[[Mapping[str, RawTensor]], Mapping[str, RawTensor]]
"""From the names of a version's tensors to those that files of such models have, where these are others."""


def materialize(
    layout: RunLayout,
    version: int,
    directory: Path,
    *,
    accept: AcceptManifest = accept_all,
    in_files: InFiles | None = None,
) -> WeightsManifest:
    """Write policy ``version`` as a model directory that ``from_pretrained`` loads, bit for bit what was published.

    A live run does not retire what is being read (:mod:`milesbatch.store.holds`).

    Durability: files are durable on return; if killed midway the directory lacks ``model.safetensors``, and the same call goes
    on. After an error the directory is as it was.

    Raises:
        InputError: ``directory`` holds something else.
        ModelError: the run has no ``model/config.json``.
        CorruptArtefactError: the version cannot be rebuilt, or was retired (``RetiredError``); StorageError: it is not
            published. Nothing was written.
    """
    require_room_for(layout.model, directory)
    with holding(layout, version, "weights materialize"):
        copy = rebuild(layout, version, accept=accept)
    write_model(layout, copy.tensors if in_files is None else in_files(copy.tensors), directory)
    return copy.manifest


def write_model(layout: RunLayout, tensors: Mapping[str, RawTensor], directory: Path) -> None:
    """Write ``tensors`` with the run's configuration and tokenizer; tied aliases stay out, the configuration ties them.

    Raises:
        InputError: ``directory`` holds something else.
        ModelError: the run has no readable ``model/config.json``.
        StorageError: something could not be written; what was, is gone again.
    """
    _write(model_files(layout, tensors), tensors, directory)


def write_model_like(model: Path, tensors: Mapping[str, RawTensor], directory: Path) -> None:
    """Write ``tensors`` with configuration and tokenizer of another model directory, which stay as they are.

    Raises:
        InputError: ``directory`` holds something else.
        StorageError: something could not be read or written; what was written, is gone again.
    """
    _write(_read_files(model), tensors, directory)


def model_files(layout: RunLayout, tensors: Mapping[str, RawTensor]) -> dict[Path, bytes]:
    """What stands beside the weights of a version of the run, by relative path.

    Raises:
        ModelError: the run has no readable ``model/config.json``. StorageError: another file cannot be read.
    """
    return {**_read_files(layout.model), _CONFIG: _config(layout, tensors)}


def require_room_for(model: Path, directory: Path) -> None:
    """Accept ``directory`` before the work is done: new, empty, or what a call that ended early left of this model's files.

    Raises:
        InputError: it holds something else. StorageError: it cannot be read.
    """
    require_free(directory, {relative: None for _, relative in _model_files(model)})


def _read_files(model: Path) -> dict[Path, bytes]:
    files = {}
    for source, relative in _model_files(model):
        try:
            files[relative] = source.read_bytes()
        except OSError as error:
            raise storage_error(source, error) from error
    return files


def _write(files: Mapping[Path, bytes], tensors: Mapping[str, RawTensor], directory: Path) -> None:
    require_free(directory, files)
    with filling(directory, files):
        for relative, data in files.items():
            make_directory((directory / relative).parent)
            publish_file(directory / relative, data)
        needed = sum(tensor.data.size for tensor in tensors.values())
        with publishing(directory, WEIGHTS.name, needed_bytes=needed) as file:
            write_tensors(file.stream, tensors)


def is_weights_file(name: str) -> bool:
    """Does a file of this name in a model directory hold weights, or say where they are?"""
    return name.endswith(_WEIGHT_SUFFIXES)


def _config(layout: RunLayout, tensors: Mapping[str, RawTensor]) -> bytes:
    """``config.json`` with the stored dtype: loaders convert to what it says, which would change the bits."""
    path = layout.model / _CONFIG
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing", mend="copy the model's configuration into the run's model/ again"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}", mend="restore the model's configuration") from error
    except OSError as error:
        raise storage_error(path, error) from error
    num_bytes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in ("F64", "F32", "F16", "BF16"):
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.data.size
    if num_bytes:
        config.pop("torch_dtype", None)
        config["dtype"] = torch_dtype_name(max(num_bytes, key=lambda dtype: (num_bytes[dtype], dtype)))
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _model_files(model: Path) -> Iterator[tuple[Path, Path]]:
    for path in sorted(model.rglob("*")):
        if path.is_file() and not is_weights_file(path.name) and not path.name.startswith(TEMPORARY_PREFIX):
            yield path, path.relative_to(model)
