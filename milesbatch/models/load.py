"""Loading models and tokenizers; every process of a run goes through here.

Owns how a model becomes a torch module: float32 or the asked type, attention by ``sdpa``, on the CPU. Never reaches the
network and never writes. Invariant: the names in ``load_initial_model(...).state_dict()`` are those of ``load_skeleton(...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from milesbatch.errors import ModelError
from milesbatch.models.pretrained import recorded_cache, recorded_max_length, resolve_source
from milesbatch.recipe.models import MadeModel, PretrainedModel, Recipe


def load_tokenizer(model_directory: Path) -> Any:
    """The tokenizer in a prepared model directory (``PreTrainedTokenizerBase``).

    Raises:
        ModelError: it is missing or cannot be read.
    """
    from transformers import AutoTokenizer

    with loading(model_directory, "tokenizer"):
        return AutoTokenizer.from_pretrained(model_directory, local_files_only=True)


def load_config(model_directory: Path) -> Any:
    """The configuration in a prepared model directory (``PretrainedConfig``).

    Raises:
        ModelError: it is missing or cannot be read.
    """
    from transformers import AutoConfig

    with loading(model_directory, "config.json"):
        return AutoConfig.from_pretrained(model_directory, local_files_only=True)


def context_length(model_directory: Path) -> int:
    """Longest sequence (prompt and response) in tokens: the model's own, or the recipe's ``model.max_length`` if shorter.

    Raises:
        ModelError: the configuration is missing or cannot be read.
    """
    own, limit = int(load_config(model_directory).max_position_embeddings), recorded_max_length(model_directory)
    return own if limit is None else min(own, limit)


def stop_token_ids(model_directory: Path) -> tuple[int, ...]:
    """Token ids that end a response, ascending: of the generation configuration and of the tokenizer."""
    from transformers import GenerationConfig

    with loading(model_directory, "generation_config.json"):
        stated = GenerationConfig.from_pretrained(model_directory, local_files_only=True).eos_token_id
    stops = set(stated if isinstance(stated, list) else [stated]) | {load_tokenizer(model_directory).eos_token_id}
    return tuple(sorted(int(token) for token in stops if token is not None))


def load_skeleton(model_directory: Path, dtype: torch.dtype) -> Any:
    """A ``PreTrainedModel`` of the right shape in eval mode; its parameters are uninitialised memory, to be filled.

    Raises:
        ModelError: the configuration cannot be read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = load_config(model_directory)
    with loading(model_directory, "config.json"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        # Tying is part of the initialisation that was left out.
        model.tie_weights()
    return model.eval()


def load_initial_model(recipe: Recipe, model_directory: Path) -> Any:
    """The starting model (policy version 0) as a ``PreTrainedModel`` with float32 weights, in eval mode.

    A made model comes from ``model_directory``; a pretrained one from its source, GGUF files dequantised.

    Raises:
        ModelError: files are missing or cannot be read, or the source lacks weights that the configuration asks for.
    """
    model = recipe.model
    if isinstance(model, MadeModel):
        loaded = _load_weights(model_directory, None)
    else:
        loaded = _load_weights(source_directory(model, model_directory), model.gguf_file)
    # Only the tensors are kept: a model loaded from GGUF remembers its quantisation and would refuse to be saved.
    skeleton = load_skeleton(model_directory, torch.float32)
    with loading(model_directory, "weights"):
        skeleton.load_state_dict(loaded.state_dict(), strict=True)
    return skeleton


def source_directory(model: PretrainedModel, model_directory: Path) -> Path:
    """Where a prepared run finds its pretrained weights; a download made by ``prepare_model`` is found again.

    Raises:
        ModelError: it is gone.
    """
    return resolve_source(model, recorded_cache(model, model_directory), _silent)


def _silent(message: str) -> None:
    """Progress of a download is told by ``prepare_model``; later loads find it done."""


def _load_weights(directory: Path, gguf_file: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    with loading(directory, gguf_file or "weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            **({} if gguf_file is None else {"gguf_file": gguf_file}),
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    absent = sorted(info["missing_keys"]) + sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if absent:
        raise ModelError(
            f"the model in {directory} lacks {len(absent)} tensors that its configuration asks for: "
            f"{', '.join(absent[:4])}",
            mend="use a complete model directory of a causal language model",
        )
    return model


@contextmanager
def loading(directory: Path, what: str) -> Iterator[None]:
    """Turn what transformers raises about bad files into a :class:`ModelError` that names them; no progress bars."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"cannot load the {what} of the model in {directory} ({cause})",
            mend="check that the directory holds a complete causal language model of an architecture that transformers knows",
        ) from error
