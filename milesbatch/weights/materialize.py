"""A policy version as a directory that Hugging Face tools load: configuration, tokenizer, ``model.safetensors``.

Owns what such a directory holds; never writes over existing files, or into a run (but for a hold while it reads). Invariant:
the weights file is written last, so a directory left by a killed process cannot be loaded by mistake. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from milesbatch.errors import InputError, ModelError
from milesbatch.records import WeightsManifest
from milesbatch.store.durable import TEMPORARY_PREFIX, make_directory, publish_file, publishing, storage_error
from milesbatch.store.holds import holding
from milesbatch.store.layout import RunLayout
from milesbatch.weights.reader import AcceptManifest, accept_all
from milesbatch.weights.rebuild import rebuild
from milesbatch.weights.tensorfile import write_tensors
from milesbatch.weights.tensors import RawTensor, torch_dtype_name

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def materialize(
    layout: RunLayout, version: int, directory: Path, *, accept: AcceptManifest = accept_all
) -> WeightsManifest:
    """Write policy ``version`` as a model directory that ``from_pretrained`` loads, bit for bit what was published.

    A live run does not retire what is being read (:mod:`milesbatch.store.holds`).

    Durability: files are durable on return; if killed midway the directory lacks ``model.safetensors``.

    Raises:
        InputError: ``directory`` is not empty.
        ModelError: the run has no ``model/config.json``.
        CorruptArtefactError: the version cannot be rebuilt, or was retired (``RetiredError``); StorageError: it is not
            published. Nothing was written.
    """
    require_empty(directory)
    with holding(layout, version, "weights materialize"):
        copy = rebuild(layout, version, accept=accept)
    write_model(layout, copy.tensors, directory)
    return copy.manifest


def write_model(layout: RunLayout, tensors: Mapping[str, RawTensor], directory: Path) -> None:
    """Write ``tensors`` with the run's configuration and tokenizer; tied aliases stay out, the configuration ties them.

    Raises:
        InputError: ``directory`` is not empty.
        ModelError: the run has no readable ``model/config.json``.
        StorageError: something could not be written.
    """
    require_empty(directory)
    _write(layout.model, _config(layout, tensors), tensors, directory)


def write_model_like(model: Path, tensors: Mapping[str, RawTensor], directory: Path) -> None:
    """Write ``tensors`` with configuration and tokenizer of another model directory, which stay as they are.

    Raises:
        InputError: ``directory`` is not empty.
        StorageError: something could not be read or written.
    """
    require_empty(directory)
    _write(model, None, tensors, directory)


def _write(model: Path, config: bytes | None, tensors: Mapping[str, RawTensor], directory: Path) -> None:
    make_directory(directory)
    for source, relative in _model_files(model):
        make_directory((directory / relative).parent)
        try:
            data = source.read_bytes()
        except OSError as error:
            raise storage_error(source, error) from error
        publish_file(directory / relative, config if config and relative == Path("config.json") else data)
    with publishing(directory, "model.safetensors") as file:
        write_tensors(file.stream, tensors)


def is_weights_file(name: str) -> bool:
    """Does a file of this name in a model directory hold weights, or say where they are?"""
    return name.endswith(_WEIGHT_SUFFIXES)


def require_empty(directory: Path) -> None:
    """Accept a directory that does not exist or is empty.

    Raises:
        InputError: anything else.
    """
    try:
        is_free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    except OSError as error:
        raise storage_error(directory, error) from error
    if not is_free:
        raise InputError(
            f"{directory} exists and is not an empty directory", mend="choose a new directory, or remove this one first"
        )


def _config(layout: RunLayout, tensors: Mapping[str, RawTensor]) -> bytes:
    """``config.json`` with the stored dtype: loaders convert to what it says, which would change the bits."""
    path = layout.model / "config.json"
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
