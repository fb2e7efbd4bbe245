"""Is a server one that this run can use? Asked before any weights go there: those of another model end a server.

Owns the comparison of what a server says of itself with what the run needs. Never: talks to it. Invariant: what a server
does not say, or says in words that are not known here, is no reason to refuse it; its weights' proof comes after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milesbatch.errors import InputError

_SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "hidden_act", "rms_norm_eps", "attention_bias", "tie_word_embeddings", "layer_types"),
    *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "sliding_window", "use_sliding_window"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "shared_expert_intermediate_size"),
)
"""What makes another function, or tensors of other shapes, of the same names. Weights are proven later; these never."""
_DTYPES = {"half": "float16", "float": "float32"}
"""Further names that SGLang has for types."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What a server must be."""

    config: Mapping[str, Any]
    """The model's ``config.json``."""
    dtype: str
    """Of the weights: ``float32``, ``bfloat16`` …"""
    max_length: int
    """Tokens of prompt and response together."""
    routed_experts: bool = False

    @classmethod
    def of_model(cls, model: Path, dtype: str, max_length: int, *, routed_experts: bool = False) -> Needed:
        return cls(_config_of(model.absolute()), dtype, max_length, routed_experts)

    def check(self, name: str, server: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """``server`` and ``model`` are what it answers to ``/server_info`` and ``/model_info``.

        Raises:
            InputError: it is another one; says in what, and which flag makes it the right one.
        """
        self._check_model(name, server, model)
        self._check_dtype(name, server)
        length = server.get("context_length")
        if isinstance(length, int) and length < self.max_length:
            raise InputError(
                f"{name} takes {length} tokens of prompt and response together, and this run has up to {self.max_length}",
                mend=f"start it with --context-length={self.max_length + 16}, or give the run a shorter model.max_length",
            )
        if self.routed_experts and not server.get("enable_return_routed_experts"):
            raise InputError(
                f"{name} does not tell which experts tokens went through",
                mend="start it with --enable-return-routed-experts, or set rollout.sglang.routed_experts: false",
            )

    def _check_model(self, name: str, server: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        mend = "start it with this run's model: --model-path=RUN/model"
        found, wanted = model.get("architectures"), self.config.get("architectures")
        if isinstance(found, list) and isinstance(wanted, list) and found != wanted:
            raise InputError(f"{name} serves a {_listed(found)}, and this run trains a {_listed(wanted)}", mend=mend)
        # What it was started with, or, as it says after weights came, where these lay, which may be gone.
        paths = [path for path in (server.get("model_path"), model.get("model_path")) if isinstance(path, str)]
        path, other = next(((path, config) for path in paths if (config := _config_of(Path(path)))), ("", {}))
        differ = [key for key in _SAME if key in other and key in self.config and other[key] != self.config[key]]
        if differ:
            what = ", ".join(f"{key} {other[key]} instead of {self.config[key]}" for key in differ)
            raise InputError(f"{name} serves another model, {path}: {what}", mend=mend)

    def _check_dtype(self, name: str, server: Mapping[str, Any]) -> None:
        stated = server.get("dtype")
        if not isinstance(stated, str):
            return
        found = _DTYPES.get(stated, stated)
        # With "auto" SGLang takes float16 for a model in float32.
        if found == self.dtype or (found == "auto" and self.dtype != "float32"):
            return
        raise InputError(
            f"{name} computes in {'float16 (dtype auto)' if found == 'auto' else found}, which would change this run's weights:"
            f" they are {self.dtype}",
            mend=f"start it with --dtype={self.dtype}, or set weights.dtype",
        )


def _config_of(directory: Path) -> Mapping[str, Any]:
    """Empty where it cannot be seen: the server may be on another host, or have its model by a name."""
    if not directory.is_absolute():
        return {}
    try:
        found = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names))
