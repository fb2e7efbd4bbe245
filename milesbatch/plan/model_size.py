"""How large a model is, without loading it: from the recipe's fields, a ``config.json`` and the headers of safetensors files.

Owns the count of parameters by place; never reads weights and needs no torch. Invariant: what was counted says where from, so
that an estimate is never taken for a count. Shapes of the decoder are those of Llama, Qwen2 and Qwen3 in transformers.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milesbatch.errors import ModelError
from milesbatch.models.pretrained import is_url, resolve_source
from milesbatch.models.tokenizer import SPECIAL_TOKENS
from milesbatch.plan.gguf_header import read_header
from milesbatch.recipe.models import MadeModel, Recipe
from milesbatch.weights.tensorfile import parse_header

_LENGTH = struct.Struct("<Q")
_MEND = "give a directory with the model's config.json, or `model.kind: made`"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Elements and sizes that memory and traffic follow from."""

    parameters: int
    """All elements, tied ones once."""
    layer_parameters: int
    """Of one decoder layer."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    """Longest sequence in tokens."""
    counted_from: str
    """``recipe``, the headers of the weights' files, or ``config.json``, which is an estimate."""

    @property
    def outer_parameters(self) -> int:
        """Outside of the decoder layers: embedding, output, last norm."""
        return self.parameters - self.layers * self.layer_parameters

    @property
    def kv_elements(self) -> int:
        """Key-value elements of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def model_size(recipe: Recipe) -> ModelSize:
    """Sizes of the recipe's model.

    Raises:
        ModelError: the model is at a URL, its directory or ``config.json`` is missing, or lacks a size.
    """
    model = recipe.model
    if isinstance(model, MadeModel):
        config = {
            "vocab_size": len(SPECIAL_TOKENS) + len(model.alphabet),
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "max_position_embeddings": model.max_length,
            "tie_word_embeddings": True,
            "model_type": "qwen3",
        }
        return _from_config(config, None, "recipe")
    if is_url(model.path):
        raise ModelError(
            f"model.path is {model.path!r}: nothing is downloaded to plan a run",
            mend="download it, and give the directory",
        )
    directory = resolve_source(model, Path(), lambda text: None)
    if model.gguf_file is not None:
        size = _of_gguf(directory / model.gguf_file)
        return size if model.max_length is None else _limited(size, model.max_length)
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})", mend=_MEND) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object", mend=_MEND)
    try:
        size = _from_config(config, _counted(directory), "config.json")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{path} lacks a size of the model ({error!r})", mend=_MEND) from error
    limit = model.max_length
    return size if limit is None else _limited(size, limit)


def _from_config(config: dict[str, Any], counted: dict[str, int] | None, source: str) -> ModelSize:
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    intermediate, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    kind = str(config.get("model_type", ""))
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    biases = (heads + 2 * kv_heads) * head_dim if config.get("attention_bias", kind == "qwen2") else 0
    norms = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)
    layer = attention + biases + 3 * hidden * intermediate + norms
    is_tied = bool(config.get("tie_word_embeddings", False))
    parameters = layers * layer + vocabulary * hidden * (1 if is_tied else 2) + hidden
    if counted is not None:
        stored = {name: size for name, size in counted.items() if not (is_tied and name == "lm_head.weight")}
        parameters, source = sum(stored.values()), "safetensors headers"
        of_layers = sum(size for name, size in stored.items() if ".layers." in name)
        layer = of_layers // layers if of_layers else layer
    return ModelSize(
        parameters=parameters,
        layer_parameters=layer,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        context=int(config["max_position_embeddings"]),
        counted_from=source,
    )


def _of_gguf(path: Path) -> ModelSize:
    try:
        found, stored = read_header(path)
        kind = str(found["general.architecture"])
        config = {
            "model_type": kind,
            "hidden_size": found[f"{kind}.embedding_length"],
            "num_hidden_layers": found[f"{kind}.block_count"],
            "num_attention_heads": found[f"{kind}.attention.head_count"],
            "num_key_value_heads": found.get(f"{kind}.attention.head_count_kv"),
            "head_dim": found.get(f"{kind}.attention.key_length"),
            "intermediate_size": found[f"{kind}.feed_forward_length"],
            "max_position_embeddings": found[f"{kind}.context_length"],
            "vocab_size": stored["token_embd.weight"] // int(found[f"{kind}.embedding_length"]),
            "tie_word_embeddings": "output.weight" not in stored,
        }
        counted = {name.replace("blk.", "model.layers."): size for name, size in stored.items()}
        return replace(_from_config(config, counted, ""), counted_from="the GGUF file's header")
    except (OSError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ModelError(f"{path} does not say how large its model is ({error!r})", mend=_MEND) from error


def _limited(size: ModelSize, limit: int) -> ModelSize:
    return replace(size, context=min(size.context, limit))


def _counted(directory: Path) -> dict[str, int] | None:
    """Elements by name, from the headers of the files that lie there; None without any."""
    found: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with open(path, "rb") as stream:
                (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                rows, _ = parse_header(stream.read(min(length, 1 << 27)))
        except (OSError, ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
            raise ModelError(f"{path} is not a safetensors file ({error})", mend="fetch the model again") from error
        found.update({name: math.prod(shape) for name, _, shape, _ in rows})
    return found or None
