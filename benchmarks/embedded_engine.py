"""Tokens per second of the embedded engine against ``model.generate`` called once for each prompt group.

Run: ``python benchmarks/embedded_engine.py [--model DIR] [--threads 2]``

Both sides sample N groups of n siblings from the same model with the same prompts, stop tokens and longest response, in
alternating rounds of one process; medians are printed. Tokens are counted up to and with the first stop token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.engines.protocol import GenerationRequest, SamplingParams

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class OwnWeights:
    """The model's own tensors as policy version 0."""

    content: Mapping[str, torch.Tensor]
    version: int = 0
    weights_digest: str = ""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.content

    def write_model(self, directory: Path) -> None:
        raise ValueError("these weights are already loaded")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory; default: a tiny random Qwen3")
    parser.add_argument("--gguf-file", help="name of a GGUF file inside --model")
    parser.add_argument("--groups", type=int, default=16, help="prompt groups (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="samples of each group (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="longest response (default 32)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="longest prompt; they vary from half of it")
    parser.add_argument("--rows", type=int, default=128, help="samples the engine decodes at once (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side, after one to warm up (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    return parser.parse_args()


def load_model(arguments: argparse.Namespace) -> Any:
    if arguments.model is not None:
        options = {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, **options).eval()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=60,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def make_prompts(groups: int, longest: int, vocab_size: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(max(1, longest // 2), longest + 1, (groups,), generator=generator).tolist()
    return [tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for length in lengths]


def engine_round(
    engine: EmbeddedEngine, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, first_seed: int
) -> tuple[int, float]:
    requests = [
        GenerationRequest(prompt, sampling, first_seed + group * samples + sample)
        for group, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    started = time.perf_counter()
    completions = [future.result() for future in engine.submit(requests)]
    return sum(len(one.tokens) for one in completions), time.perf_counter() - started


def generate_round(model: Any, prompts: Sequence[Prompt], samples: int, sampling: SamplingParams) -> tuple[int, float]:
    stop = list(sampling.stop_token_ids)
    tokens, started = 0, time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=stop,
            pad_token_id=stop[0],
        )
        for row in output[:, len(prompt) :].tolist():
            tokens += next((place + 1 for place, token in enumerate(row) if token in stop), len(row))
    return tokens, time.perf_counter() - started


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments)
    vocab_size = model.get_input_embeddings().num_embeddings
    # One token in twenty ends a response, so that lengths vary as they do in training.
    sampling = SamplingParams(arguments.max_new_tokens, stop_token_ids=tuple(range(0, vocab_size, 20)))
    prompts = make_prompts(arguments.groups, arguments.prompt_tokens, vocab_size)
    engine = EmbeddedEngine(
        model,
        max_length=arguments.prompt_tokens + arguments.max_new_tokens,
        max_concurrent_samples=arguments.rows,
    )
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    engine.activate(OwnWeights({name: t.clone() for name, t in model.state_dict().items() if name not in tied}))
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(arguments.rounds + 1):
        tokens, elapsed_s = engine_round(engine, prompts, arguments.samples, sampling, first_seed=number << 20)
        other_tokens, other_elapsed_s = generate_round(model, prompts, arguments.samples, sampling)
        if number:
            ours.append(tokens / elapsed_s)
            theirs.append(other_tokens / other_elapsed_s)
    engine.close()
    print(f"{arguments.groups} groups x {arguments.samples} samples, torch threads {arguments.threads}")
    print(f"embedded engine     {statistics.median(ours):10.0f} tokens/s   rounds {[round(rate) for rate in ours]}")
    print(f"generate per group  {statistics.median(theirs):10.0f} tokens/s   rounds {[round(rate) for rate in theirs]}")
    print(f"ratio               {statistics.median(ours) / statistics.median(theirs):10.2f}")


if __name__ == "__main__":
    main()
