"""Making the engine that a recipe names, in the process that calls: the same for training's rollouts and for evaluation.

Owns how recipe and model directory become an engine. Never: weights, which are activated later. Invariant: in bitwise mode what
it generates is a pure function of weights and requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from milesbatch.engines.embedded import EmbeddedEngine
from milesbatch.models.load import context_length, load_skeleton
from milesbatch.recipe.models import Recipe


def open_engine(model: Path, recipe: Recipe, tokenizer: Any) -> EmbeddedEngine:
    """The engine of ``recipe.rollout`` for the model directory ``model``; sets torch's threads for this process.

    Raises:
        ModelError: the model cannot be loaded or driven.
    """
    is_bitwise = recipe.determinism == "bitwise"
    torch.set_num_threads(recipe.rollout.threads)
    torch.use_deterministic_algorithms(is_bitwise, warn_only=True)
    return EmbeddedEngine(
        load_skeleton(model, torch.float32),
        max_length=context_length(model),
        max_concurrent_samples=recipe.rollout.max_concurrent_samples,
        isolate_calls=is_bitwise,
        stop_text=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
    )
