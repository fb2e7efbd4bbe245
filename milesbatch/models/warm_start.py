"""A short supervised start for made models, so that reinforcement learning finds some reward to climb.

Owns the supervised loop: single process, fixed threads, AdamW with linear warm-up and decay. Never sees the prompts of the
run itself: its examples come from a stream with another seed. Invariant: same recipe, same kind of machine, same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from milesbatch.environments.prompts import encode_characters, encode_prompt, open_prompts, stream_random
from milesbatch.recipe.models import MadeModel, Recipe

THREADS = 1
"""Sums are split among threads, so their number is part of the result; one is the only number every machine has."""
_WARMUP_SHARE = 0.1
_IGNORED = -100
"""Label of positions without loss, as ``torch.nn.functional.cross_entropy`` names it."""

Example = tuple[tuple[int, ...], int]
"""Tokens of bos, prompt, answer, eos; and how many of them are the prompt."""


def warm_start(
    recipe: Recipe, section: MadeModel, model: Any, tokenizer: Any, progress: Callable[[int, float], None]
) -> None:
    """Train ``model`` in place on prompts with their reference answers; ``progress(step, loss)`` after each step.

    Units: loss in nats per answer token.

    Raises:
        DataError: a prompt or answer holds a character without a token, or is too long.
    """
    plan = section.warm_start
    if plan.steps == 0:
        return
    examples = supervised_examples(recipe, section, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    draw = stream_random(recipe.seed, "warm_start", "batches")
    model.train()
    with _fixed_threads():
        for step in range(1, plan.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * _schedule(step, plan.steps)
            batch = [examples[draw.randrange(len(examples))] for _ in range(plan.batch_size)]
            input_ids, labels = _collate(batch, int(tokenizer.pad_token_id))
            logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
            )
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress(step, loss.item())
    model.zero_grad(set_to_none=True)
    model.eval()


def supervised_examples(recipe: Recipe, section: MadeModel, tokenizer: Any) -> list[Example]:
    """The first ``warm_start.examples`` prompts of the warm-start stream, with answers.

    Raises:
        DataError: a character has no token, or an example is longer than ``model.max_length``.
    """
    from milesbatch.errors import DataError

    stream = open_prompts(recipe, "warm_start")
    examples: list[Example] = []
    for index in range(section.warm_start.examples):
        prompt = stream.prompt(index)
        asked = encode_prompt(tokenizer, section, prompt)
        answer = encode_characters(tokenizer, prompt.answer, prompt.prompt_id)
        tokens = (*asked, *answer, int(tokenizer.eos_token_id))
        if len(tokens) > section.max_length:
            raise DataError(
                f"prompt {prompt.prompt_id} with its answer has {len(tokens)} tokens; model.max_length is {section.max_length}",
                mend="raise model.max_length, or use shorter prompts",
            )
        examples.append((tokens, len(asked)))
    return examples


def _collate(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right; the causal mask keeps the padding out of everything before it. Both int64 [batch, longest]."""
    longest = max(len(tokens) for tokens, _ in batch)
    input_ids = torch.full((len(batch), longest), pad, dtype=torch.int64)
    labels = torch.full((len(batch), longest), _IGNORED, dtype=torch.int64)
    for row, (tokens, asked) in enumerate(batch):
        sequence = torch.tensor(tokens, dtype=torch.int64)
        input_ids[row, : len(tokens)] = sequence
        labels[row, asked : len(tokens)] = sequence[asked:]
    return input_ids, labels


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate at ``step`` (from 1): linear up over a tenth of the steps, then linear down."""
    warmup = max(1, round(_WARMUP_SHARE * steps))
    if step <= warmup:
        return step / warmup
    return (steps - step + 1) / (steps - warmup + 1)


@contextmanager
def _fixed_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)
