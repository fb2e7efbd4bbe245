"""A real SGLang server for tests, the tiny models that it serves, and what one full forward says of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from milesbatch.engines.protocol import Completion, GenerationRequest, SamplingParams
from milesbatch.engines.sglang.engine import EngineLimits, SGLangEngine
from milesbatch.engines.sglang.fitness import Needed
from milesbatch.engines.sglang.fleet import FleetOptions
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.engines.sglang.router import Router
from milesbatch.engines.sglang.serving import AttachedServer, ServerPlace, StartedServer
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.engines.sglang.weights import FromDisk, PauseMode, Prover, Way, written_to
from milesbatch.models.tokenizer import make_tokenizer

PYTHON = Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-=. ,ABCDEFGHIJKLMNO"
VOCAB = 4 + len(ALPHABET)
EOS = 2
MAX_LENGTH = 256


@cache
def tokenizer() -> Any:
    return make_tokenizer(ALPHABET, MAX_LENGTH)


def spell(tokens: Sequence[int]) -> str:
    return str(tokenizer().decode(list(tokens), skip_special_tokens=True))


def make_model(seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model; its initialisation is wide, so that greedy choices are far from ties and differ by context."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    config = Qwen3Config(**{**shape, **changes}, architectures=["Qwen3ForCausalLM"], dtype=dtype)
    return Qwen3ForCausalLM(config).to(dtype).eval()


EXPERTS, ROUTED = 8, (2, 2)
"""Of a layer; layers, and experts that a token goes through in each."""


def make_experts_model(seed: int) -> Any:
    """A random mixture of experts, in which each token goes through two of eight in each of two layers."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=64,
        moe_intermediate_size=48,
        num_experts=EXPERTS,
        num_experts_per_tok=ROUTED[1],
        num_hidden_layers=ROUTED[0],
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype=torch.float32,
    )
    return Qwen3MoeForCausalLM(config).eval()


@dataclass
class Weights:
    """A policy version in memory, which can be written as servers want it."""

    version: int
    model: Any
    weights_digest: str = field(default="xxh128:" + "0" * 32)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        return state

    def write_model(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        tokenizer().save_pretrained(directory)


def settings_of(model_directory: Path, dtype: str = "float32", **options: Any) -> ServerSettings:
    given: dict[str, Any] = {"max_length": MAX_LENGTH, "max_running": 16, "max_total_tokens": 4096}
    return ServerSettings(PYTHON, model_directory, "cpu", dtype, **{**given, **options})


def make_engine(
    places: Sequence[ServerPlace],
    memory: Path,
    *,
    pause: PauseMode = "retract",
    way: Way | None = None,
    health_timeout_s: float = 60.0,
    request_timeout_s: float = 120.0,
    update_timeout_s: float = 120.0,
    start_timeout_s: float = 300.0,
    told: list[str] | None = None,
    expects: bool = True,
    routed: tuple[int, int] | None = None,
    in_files: Any = None,
    router: Router | None = None,
    needed: Needed | None = None,
) -> SGLangEngine:
    options = FleetOptions(
        pause=pause,
        start_timeout_s=start_timeout_s,
        health_timeout_s=health_timeout_s,
        request_timeout_s=request_timeout_s,
        update_timeout_s=update_timeout_s,
        listener=FleetListener(([] if told is None else told).append),
        needed=needed if routed is None else Needed({}, "float32", MAX_LENGTH, routed_experts=True),
    )
    way = way or FromDisk(written_to(memory))
    limits = EngineLimits(MAX_LENGTH, VOCAB, routed)
    return SGLangEngine(places, way, Prover(expects), options, limits, spell, in_files, router)


@dataclass
class RealServer:
    """A server that other engines may attach to; it lives as long as ``owner``."""

    place: StartedServer
    owner: SGLangEngine

    def attach(self, memory: Path, url: str | None = None, **options: Any) -> SGLangEngine:
        return make_engine([AttachedServer(url or self.place.url, self.place.key)], memory, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.place.key}"}
        return httpx.post(f"{self.place.url}/{path}", json=body, headers=headers, timeout=60, trust_env=False)

    def slowly(self, seconds: float | None) -> None:
        """Each forward pass takes so much longer; None: as always."""
        assert self.post("slow_down", forward_sleep_time=seconds).status_code == 200


def start_server(
    directory: Path,
    model: Any,
    name: str = "server-0",
    dtype: str = "float32",
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> RealServer:
    """Blocks until it serves version 0, which is ``model``; ``engine`` are options of its owner."""
    Weights(0, model).write_model(directory / "model")
    settings = settings_of(directory / "model", dtype, **options)
    place = StartedServer(name, settings, directory / f"{name}.log", directory / "memory")
    owner = make_engine([place], directory / "staged", told=(told := []), **(engine or {}))
    try:
        owner.activate(Weights(0, model))
    except BaseException:
        owner.close()
        print("\n".join(told))
        raise
    return RealServer(place, owner)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(3 + (salt * 17 + 5 * i * i + i) % (VOCAB - 3) for i in range(length))


def request(
    length: int = 5, *, salt: int = 0, seed: int = 0, max_new_tokens: int = 12, **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(prompt(length, salt), SamplingParams(max_new_tokens, **sampling), seed)


def results(futures: Sequence[Future[Completion]], timeout_s: float = 120) -> list[Completion]:
    return [future.result(timeout=timeout_s) for future in futures]


def reference(model: Any, asked: GenerationRequest, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs [R, vocabulary] at the places of ``tokens``, by one full forward without a cache."""
    ids = torch.tensor([[*asked.context_tokens, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    start = len(asked.context_tokens) - 1
    return torch.log_softmax(logits[start : start + len(tokens)], dim=-1)


def reference_logprobs(model: Any, asked: GenerationRequest, done: Completion, temperature: float = 1.0) -> list[float]:
    table = reference(model, asked, done.tokens, temperature)
    return table.gather(1, torch.tensor(done.tokens)[:, None]).squeeze(1).tolist()  # type: ignore[no-any-return]


def replayed_logprobs(
    models: Mapping[int, Any],
    asked: GenerationRequest,
    done: Completion,
    experts: list[Any] | None = None,
    head: torch.dtype | None = None,
) -> list[float]:
    """Logprobs when every token is fed to the model of its own version, on the keys and values that earlier ones left.

    ``experts`` is filled with those of each token by layer, of a mixture of experts. ``head``: type in which the logits
    are computed, that of the model by default.
    """
    cache = DynamicCache()
    ids = torch.tensor([[*asked.context_tokens, *done.tokens]])
    start = len(asked.context_tokens) - 1
    found: list[float] = []
    for place in range(start + len(done.tokens)):
        drawn = max(place - start, 0)
        version = next(span.version for span in reversed(done.versions) if span.start <= drawn)
        with torch.no_grad():
            options = {} if experts is None else {"output_router_logits": True}
            model = models[version]
            output = model(ids[:, place : place + 1], cache=cache, use_cache=True, output_hidden_states=True, **options)
            weight = model.lm_head.weight.to(head or model.lm_head.weight.dtype)
            logits = output.hidden_states[-1][0, -1].to(weight.dtype) @ weight.T
        if experts is not None:
            experts.append([layer.view(-1).topk(ROUTED[1]).indices.tolist() for layer in output.router_logits])
        if place >= start:
            found.append(float(torch.log_softmax(logits.float(), dim=-1)[ids[0, place + 1]]))
    return found
