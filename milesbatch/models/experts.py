"""Mixture-of-experts models: how many experts a token goes through, and the names that their weights have in files.

Owns both, by transformers' own tables. Never: routes anything. Invariant: :meth:`FileNames.of` gives the tensors that
``save_pretrained`` would write, and servers read; for dense models these are the ones that it was given.

transformers keeps the experts of a layer in one tensor, and publishes nothing else; in files, each expert has tensors of its
own. A server that does not find them under these names leaves them as they are, and does not say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milesbatch.errors import InputError
from milesbatch.models.load import load_config, loading
from milesbatch.recipe.models import Recipe
from milesbatch.weights.tensors import RawTensor, from_torch, to_torch


def routed_shape(model_directory: Path) -> tuple[int, int] | None:
    """Layers, and experts that a token goes through in each; None for a dense model.

    Raises:
        ModelError: the configuration is missing or cannot be read.
    """
    config = load_config(model_directory).get_text_config()
    count = getattr(config, "num_experts_per_tok", None)
    return (int(config.num_hidden_layers), int(count)) if count else None


def recorded_shape(recipe: Recipe, model_directory: Path) -> tuple[int, int] | None:
    """As :func:`routed_shape`, of a run that records routed experts; None: it does not.

    Raises:
        InputError: it wants to, and the model is dense.
        ModelError: as there.
    """
    if recipe.rollout.engine != "sglang" or not recipe.rollout.sglang.routed_experts:
        return None
    shape = routed_shape(model_directory)
    if shape is None:
        raise InputError(
            "rollout.sglang.routed_experts is true, and the model is dense: its configuration has no num_experts_per_tok",
            mend="leave it out, or use a mixture-of-experts model",
        )
    return shape


@dataclass(frozen=True, slots=True)
class FileNames:
    """Turns a model's tensors into those that its files hold."""

    _model: Any
    """Without weights; None: they are the same."""

    @classmethod
    def of_model(cls, model_directory: Path) -> FileNames:
        """For the model in ``model_directory``, which may be without weights.

        Raises:
            ModelError: the configuration cannot be read.
        """
        from transformers import AutoModelForCausalLM

        config = load_config(model_directory)
        with loading(model_directory, "config.json"), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = cls(model)
        tensors = model.state_dict()
        return names if set(names.of(tensors)) != set(tensors) else cls(None)

    @property
    def differ(self) -> bool:
        """Are there tensors that files hold otherwise?"""
        return self._model is not None

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same weights as files hold them; parts share their memory where they can."""
        if self._model is None:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, torch.Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return found

    def of_raw(self, tensors: Mapping[str, RawTensor]) -> Mapping[str, RawTensor]:
        """As :meth:`of`, bytes that stay what they are."""
        if self._model is None:
            return tensors
        named = self.of({name: to_torch(tensor) for name, tensor in tensors.items()})
        return {name: from_torch(name, tensor) for name, tensor in named.items()}
