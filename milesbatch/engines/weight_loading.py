"""Matching the tensors of a policy version to the parameters of a live model.

Owns: the check that a policy version is exactly what the model holds, and the copy. Never: half a copy after a failed
check. Invariant: :func:`plan_copy` touches nothing; only :func:`copy_weights` writes, and it cannot meet a wrong shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from milesbatch.errors import ModelError

CopyPlan = list[tuple[torch.Tensor, torch.Tensor]]
"""(tensor of the model, new content) for every distinct tensor."""

_MEND = "the policy version must come from the same model configuration as the engine's model"


def plan_copy(model: Any, tensors: Mapping[str, torch.Tensor]) -> CopyPlan:
    """Pair every distinct tensor of ``model`` with its new content, or fail before anything is touched.

    Tensors that the model ties (embedding and output head) are expected once, under any one of their names.

    Raises:
        ModelError: a tensor is missing, unknown, given under two tied names, or has another shape or a dtype that the
            model's tensor cannot hold without rounding; names it.
    """
    names_of: dict[int, list[str]] = {}
    held: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in held.items():
        names_of.setdefault(id(tensor), []).append(name)
    unknown = sorted(set(tensors) - set(held))
    if unknown:
        raise ModelError(f"policy version has a tensor that the model does not: {unknown[0]!r}", mend=_MEND)
    plan: CopyPlan = []
    for names in names_of.values():
        given = [name for name in names if name in tensors]
        if not given:
            raise ModelError(f"policy version lacks the tensor {names[0]!r} of the model", mend=_MEND)
        if len(given) > 1:
            raise ModelError(f"policy version has the tied tensors {given} more than once", mend="leave aliases out")
        target, new = held[given[0]], tensors[given[0]]
        _check(given[0], target, new)
        plan.append((target, new))
    return plan


def copy_weights(plan: CopyPlan) -> None:
    """Write the new content into the model; afterwards no memory is shared with its source."""
    with torch.inference_mode():
        for target, new in plan:
            target.copy_(new)


def _check(name: str, target: torch.Tensor, new: torch.Tensor) -> None:
    if new.shape != target.shape:
        raise ModelError(
            f"tensor {name!r} of the policy version has shape {tuple(new.shape)}, the model's has {tuple(target.shape)}",
            mend=_MEND,
        )
    if torch.promote_types(new.dtype, target.dtype) != target.dtype:
        raise ModelError(
            f"tensor {name!r} of the policy version is {new.dtype}, the model's is {target.dtype}: copying would round",
            mend="load the engine's model in the dtype of the published weights (recipe: weights.dtype)",
        )
