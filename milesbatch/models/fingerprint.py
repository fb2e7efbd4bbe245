"""Digests of the model, tokenizer and chat template that a run uses.

Owns what counts as "the same model". Never loads weights into memory. Invariant: the digests depend on the content of
files only, not on where they are.
"""

from __future__ import annotations

from pathlib import Path

from milesbatch.errors import ModelError
from milesbatch.models.load import source_directory
from milesbatch.recipe.models import MadeModel, Recipe
from milesbatch.records import canonical_json, digest_bytes
from milesbatch.store.durable import digest_file, read_optional

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_TEMPLATE_FILE = "chat_template.jinja"


def model_fingerprints(recipe: Recipe, model_directory: Path) -> dict[str, str]:
    """``model``, ``tokenizer`` and ``chat_template`` digests of a prepared model directory and the weights it stands for.

    Raises:
        ModelError: the directory is incomplete or the source of the weights is gone.
    """
    model = recipe.model
    if isinstance(model, MadeModel):
        weights = _weight_files(model_directory, None)
    else:
        weights = _weight_files(source_directory(model, model_directory), model.gguf_file)
    config = {name: _digest(model_directory / name) for name in _CONFIG_FILES}
    contents = {path.name: digest_file(path) for path in weights}
    return {
        "model": digest_bytes(canonical_json({"config": config, "weights": contents})),
        "tokenizer": digest_bytes(canonical_json({name: _digest(model_directory / name) for name in _TOKENIZER_FILES})),
        "chat_template": digest_bytes(read_optional(model_directory / _TEMPLATE_FILE) or b""),
    }


def _weight_files(directory: Path, gguf_file: str | None) -> list[Path]:
    files = [directory / gguf_file] if gguf_file else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{directory} holds no *.safetensors", mend="use a model with safetensors weights, or set model.gguf_file"
        )
    return files


def _digest(path: Path) -> str:
    data = read_optional(path)
    if data is None:
        raise ModelError(f"{path} is missing", mend="the model directory is incomplete; start the run anew")
    return digest_bytes(data)
