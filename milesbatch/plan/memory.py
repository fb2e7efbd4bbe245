"""What a rank and a rollout worker need of memory, by part. Pure arithmetic over sizes; nothing is measured here.

Owns the formulas, each beside what it stands for; never decides whether something fits. Invariant: parts that follow from
shapes alone are exact up to alignment; the others are named in :data:`ESTIMATED`.
"""

from __future__ import annotations

from collections.abc import Mapping

from milesbatch.decisions.shares import shares
from milesbatch.plan.model_size import ModelSize
from milesbatch.recipe.models import Recipe
from milesbatch.weights.device_diff import MOST_DEVICE_BYTES

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
ESTIMATED = ("activations", "libraries")
"""Parts that are estimates; the others are sums of tensors."""

_LIBRARIES = 500_000_000
"""Of a process with torch and transformers: code, allocators, the interpreter."""
_CUDA = 800_000_000
"""More on a GPU: context, kernels, collectives' buffers."""


def trainer_device(recipe: Recipe, size: ModelSize) -> dict[str, int]:
    """Bytes on the device of one trainer rank (its GPU; without, host memory)."""
    ranks, width = recipe.trainer.ranks, BYTES[recipe.trainer.dtype]
    share = -(-size.parameters // ranks)
    copies = 2 if recipe.algorithm.kl_coef > 0 else 1
    finds_changes = recipe.weights.diff_on == "device" or (
        recipe.weights.diff_on == "auto" and recipe.slurm.trainer.gpus_per_task > 0
    )
    return {
        "weights": 4 * share,
        "gradients": 4 * share,
        "optimizer": 8 * share,
        "reference": 4 * share * (copies - 1),
        # FSDP2 gathers the next layer while one computes, and the root (embedding, output) for the whole pass; in the backward
        # pass their gradients are whole, too, until they are reduced.
        "gathered": (2 * size.layer_parameters + size.outer_parameters) * (width + 4) if ranks > 1 else 0,
        "activations": _activations(recipe, size, width),
        # Two versions, and what the search for changes takes beside them at most.
        "published weights": _published(recipe, size) + MOST_DEVICE_BYTES if finds_changes else 0,
        "libraries": _LIBRARIES + (_CUDA if recipe.slurm.trainer.gpus_per_task else 0),
    }


def trainer_host(recipe: Recipe, size: ModelSize) -> dict[str, int]:
    """Bytes of host memory of one rank besides."""
    return {
        "published weights": _published(recipe, size),
        "checkpoint copy": 12 * -(-size.parameters // recipe.trainer.ranks),
    }


def _published(recipe: Recipe, size: ModelSize) -> int:
    """Two versions of the largest share of any rank."""
    owners = 1 if recipe.weights.transport != "delta" else recipe.trainer.ranks
    width = BYTES[recipe.weights.dtype]
    pieces = {f"layer {i}": size.layer_parameters for i in range(size.layers)} | {"outer": size.outer_parameters}
    of_ranks = [0] * owners
    for name, rank in shares(pieces, owners).items():
        of_ranks[rank] += pieces[name]
    return 2 * width * max(of_ranks)


def worker_device(recipe: Recipe, size: ModelSize) -> dict[str, int]:
    """Bytes on the device of one rollout worker."""
    width, rows = BYTES[recipe.weights.dtype], recipe.rollout.max_concurrent_samples
    return {
        "weights": width * size.parameters,
        "key-value cache": width * size.kv_elements * rows * size.context,
        # One token of each row: hidden states, the feed-forward layer, logits in float32 and what sampling makes of them.
        "activations": rows * (width * (8 * size.hidden + 3 * size.intermediate) + 3 * 4 * size.vocabulary),
        "libraries": _LIBRARIES + (_CUDA if recipe.slurm.rollout.gpus_per_task else 0),
    }


def worker_host(recipe: Recipe, size: ModelSize) -> dict[str, int]:
    """Bytes of host memory of one worker besides: its copy of the weights, which deltas are applied to."""
    width = BYTES[recipe.weights.dtype]
    received = 0
    if recipe.weights.transport != "delta":
        received = recipe.rollout.staleness + 1 if recipe.determinism == "bitwise" else 1
    return {"local copy": width * size.parameters, "received versions": width * size.parameters * received}


def _activations(recipe: Recipe, size: ModelSize, width: int) -> int:
    """Of one microbatch, kept for the backward pass. Logits only where tokens are learned from, but all may be."""
    tokens = recipe.trainer.max_tokens_per_microbatch
    of_layer = 8 * size.hidden + 3 * size.intermediate + (size.heads + 2 * size.kv_heads) * size.head_dim
    layers = size.layers * (size.hidden if recipe.trainer.gradient_checkpointing else of_layer)
    inside = of_layer if recipe.trainer.gradient_checkpointing else 0
    logits = 3 * 4 * size.vocabulary  # logits, their softmax and its gradient, in float32
    return tokens * (width * (layers + inside) + logits)
