"""Tiny models, weights and references that the engine's tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.engines.protocol import Completion, GenerationRequest, SamplingParams

VOCAB = 61
MAX_LENGTH = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(family: str = "qwen3", seed: int = 0, attention: str = "sdpa") -> Any:
    """A random model; its initialisation is wide, so that greedy choices are far from ties and differ by context."""
    torch.manual_seed(seed)
    options = {**_SHAPE, "attn_implementation": attention}
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**options, head_dim=16, tie_word_embeddings=True)).eval()
    if family == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options, **experts, tie_word_embeddings=True)).eval()
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**options, tie_word_embeddings=False)).eval()
    return LlamaForCausalLM(LlamaConfig(**options, tie_word_embeddings=True)).eval()


@dataclass
class Weights:
    """A policy version in memory."""

    version: int
    content: dict[str, torch.Tensor]
    weights_digest: str = field(default="xxh128:" + "0" * 32)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.content

    def write_model(self, directory: Path) -> None:
        raise AssertionError("the embedded engine needs no directory")


def weights_of(model: Any, version: int = 0) -> Weights:
    """The model's tensors without tied aliases, as copies."""
    tied = model.config.tie_word_embeddings
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    return Weights(version, state)


def make_engine(model: Any | None = None, rows: int = 8, **options: Any) -> EmbeddedEngine:
    """An engine with the model's own weights active as version 0."""
    model = make_model() if model is None else model
    engine = EmbeddedEngine(model, **{"max_length": MAX_LENGTH, "max_concurrent_samples": rows, **options})
    engine.activate(weights_of(model))
    return engine


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 17 + 5 * i * i + i) % VOCAB for i in range(length))


def request(
    length: int = 5, *, salt: int = 0, seed: int = 0, max_new_tokens: int = 12, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(prompt(length, salt), SamplingParams(max_new_tokens, **sampling), seed)


def results(futures: Sequence[Future[Completion]]) -> list[Completion]:
    return [future.result(timeout=60) for future in futures]


def reference_logprobs(
    model: Any, asked: GenerationRequest, tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Logprobs of ``tokens`` by one full forward without a cache (float32, R)."""
    ids = torch.tensor([[*asked.prompt_tokens, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    start = len(asked.prompt_tokens) - 1
    predicted = torch.log_softmax(logits[start : start + len(tokens)], dim=-1)
    return predicted.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
