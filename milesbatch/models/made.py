"""A small Qwen3-architecture model, made on the spot from a recipe.

Owns the configuration and the random start. Never trains (see :mod:`milesbatch.models.warm_start`). Invariant: the same
model section and seed give the same bits.

Source: Qwen3 technical report, https://arxiv.org/abs/2505.09388 (grouped-query attention with normed queries and keys).
"""

from __future__ import annotations

from typing import Any

import torch

from milesbatch.environments.prompts import stream_seed
from milesbatch.models.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS
from milesbatch.recipe.models import MadeModel

ROPE_THETA = 10_000.0
INITIALIZER_RANGE = 0.05
"""Larger than the usual 0.02, which is meant for widths in the thousands: a narrow model would start too flat."""


def make_config(model: MadeModel) -> Any:
    """The ``Qwen3Config`` of the recipe's model section; embeddings are tied."""
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(SPECIAL_TOKENS) + len(model.alphabet),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        max_position_embeddings=model.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        dtype="float32",
    )


def make_model(model: MadeModel, seed: int) -> Any:
    """A ``Qwen3ForCausalLM`` with random float32 weights; leaves torch's global random state as it was."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "initial_weights"))
        return AutoModelForCausalLM.from_config(make_config(model), dtype=torch.float32, attn_implementation="sdpa")
