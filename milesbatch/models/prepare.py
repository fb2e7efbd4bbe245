"""Filling a new run's model directory: configuration, tokenizer, and for a made model its starting weights.

Owns what is in ``RUN/model/`` (see ``docs/format.md``). Never touches a run that exists: it is called before ``run.json`` is
committed, and replaces what an earlier start that died left behind. Invariant: same recipe and cache -> same bytes.

Run as a process of its own, so that the caller needs no torch:
``python -m milesbatch.models.prepare RECIPE_YAML MODEL_DIR CACHE_DIR``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from milesbatch.errors import MilesbatchError, ModelError, RecipeError, StorageError
from milesbatch.models.cache import cached_directory
from milesbatch.models.load import loading
from milesbatch.models.made import make_config, make_model
from milesbatch.models.pretrained import SOURCE_FILE, resolve_source, source_record
from milesbatch.models.tokenizer import make_tokenizer
from milesbatch.models.warm_start import warm_start
from milesbatch.recipe.models import MadeModel, PretrainedModel, Recipe
from milesbatch.records import canonical_json, digest_bytes
from milesbatch.store import durable

CACHE_FORMAT = 1
"""Raised whenever the code would make another model from the same recipe, so that old cache entries are not used."""
WEIGHTS_FILE = "model.safetensors"
_PROGRESS_LINES = 10


def prepare_model(recipe: Recipe, model_directory: Path, cache: Path, report: Callable[[str], None]) -> None:
    """Fill ``model_directory``; ``report`` gets lines of progress for people.

    Made model: ``config.json``, ``generation_config.json``, tokenizer files with chat template and ``model.safetensors``
    (float32, after the warm start), kept under ``cache`` by the digest of their inputs. Pretrained model: the same
    without weights, which stay at their source.

    Durability: on return every file is durable; if killed midway some are there, and the next call replaces them.

    Raises:
        ModelError: the model's source cannot be used. DataError: the warm start's data cannot be used.
        StorageError: the directory or the cache cannot be written.
    """
    model = recipe.model
    durable.make_directory(model_directory)
    if isinstance(model, MadeModel):
        entry = cache / "made" / made_model_key(recipe, model).removeprefix("xxh128:")
        try:
            source = cached_directory(entry, lambda directory: _make(recipe, model, directory, report), report)
        except StorageError as error:
            mend = f"{error.mend}; made models are kept in {cache}, MILESBATCH_CACHE names another place"
            raise type(error)(error.what, mend=mend) from error
        _publish_directory(source, model_directory)
        return
    resolved = resolve_source(model, cache, report)
    with tempfile.TemporaryDirectory() as temporary:
        _describe_pretrained(model, resolved, Path(temporary))
        _publish_directory(Path(temporary), model_directory)
    _publish(model_directory / SOURCE_FILE, source_record(model, cache))


def made_model_key(recipe: Recipe, model: MadeModel) -> str:
    """Digest of all inputs of a made model: model section, data section, seed, format."""
    inputs = {
        "format": CACHE_FORMAT,
        "seed": recipe.seed,
        "model": model.model_dump(mode="json"),
        "data": recipe.data.model_dump(mode="json"),
        "content": _data_fingerprint(recipe, model),
    }
    return digest_bytes(canonical_json(inputs))


def _data_fingerprint(recipe: Recipe, model: MadeModel) -> str:
    from milesbatch.environments.prompts import open_prompts

    return open_prompts(recipe, "warm_start").fingerprint() if model.warm_start.steps else ""


def _make(recipe: Recipe, section: MadeModel, directory: Path, report: Callable[[str], None]) -> None:
    from safetensors.torch import save
    from transformers import GenerationConfig

    tokenizer = make_tokenizer(section.alphabet, section.max_length)
    model = make_model(section, recipe.seed)
    steps = section.warm_start.steps
    report(f"made a model with {sum(p.numel() for p in model.parameters()):,} parameters; warm start of {steps} steps")

    def progress(step: int, loss: float) -> None:
        if step % max(1, steps // _PROGRESS_LINES) == 0 or step == steps:
            report(f"warm start: step {step} of {steps}, loss {loss:.3f}")

    warm_start(recipe, section, model, tokenizer, progress)
    # The output projection shares its storage with the embedding, so it is stored once, as transformers does.
    tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    # Not `save_file`, which makes it readable for its owner only: a cache may be shared. Before the small files, whose
    # writers do not always say what a full disk is.
    (directory / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    config = make_config(section)
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _describe_pretrained(model: PretrainedModel, source: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    gguf: dict[str, Any] = {} if model.gguf_file is None else {"gguf_file": model.gguf_file}
    with loading(source, model.gguf_file or "config.json"):
        config = AutoConfig.from_pretrained(source, local_files_only=True, **gguf)
        _name_architecture(config, source)
        config.save_pretrained(directory)
        _generation_config(config, source).save_pretrained(directory)
    with loading(source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, **gguf)
        tokenizer.save_pretrained(directory)


def _name_architecture(config: Any, source: Path) -> None:
    """Servers choose their model class by ``architectures``, which GGUF files do not state."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"the model in {source} has type {config.model_type!r}, which is not a causal language model",
            mend="use a causal language model",
        )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]


def _generation_config(config: Any, source: Path) -> Any:
    from transformers import GenerationConfig

    if (source / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(source, local_files_only=True)
    return GenerationConfig.from_model_config(config)


def _publish_directory(source: Path, model_directory: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file():
            _publish(model_directory / path.name, path.read_bytes())


def _publish(final: Path, data: bytes) -> None:
    try:
        durable.publish_file(final, data)
    except durable.AlreadyExistsError:
        # Left by a start that died before its run existed, with another recipe: nothing refers to it.
        durable.remove_file(final)
        durable.publish_file(final, data)


def _read_recipe(path: Path) -> Recipe:
    try:
        return Recipe.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}", mend="give a resolved recipe") from error


def main(arguments: list[str]) -> int:
    """``RECIPE_YAML MODEL_DIR CACHE_DIR``: prepare the model, progress on stdout; returns the exit code."""
    if len(arguments) != 3:
        print("usage: python -m milesbatch.models.prepare RECIPE_YAML MODEL_DIR CACHE_DIR", file=sys.stderr)
        return 2
    recipe_file, model_directory, cache = map(Path, arguments)
    try:
        prepare_model(_read_recipe(recipe_file), model_directory, cache, lambda line: print(line, flush=True))
    except MilesbatchError as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
