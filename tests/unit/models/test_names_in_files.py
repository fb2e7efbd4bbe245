"""The names under which files, and servers, know a mixture of experts: those that transformers itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as Qwen3Moe

from milesbatch.cli.names_in_files import in_files, refuse_other_names
from milesbatch.errors import InputError
from milesbatch.models.experts import FileNames, recorded_shape, routed_shape
from milesbatch.store.layout import RunLayout
from milesbatch.weights.materialize import materialize
from milesbatch.weights.publisher import Publisher

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def saved(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def models() -> dict[str, Any]:
    torch.manual_seed(0)
    mixtral = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    return {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
        "qwen3-moe": Qwen3Moe(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
        "qwen3-moe, one layer dense": Qwen3Moe(Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[1])),
        "mixtral": MixtralForCausalLM(mixtral),
    }


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "qwen3-moe, one layer dense", "mixtral"])
def test_they_are_those_that_are_saved(tmp_path: Path, models: dict[str, Any], kind: str) -> None:
    directory = saved(tmp_path, models[kind])
    names = FileNames.of_model(directory)
    assert names.differ == (kind != "qwen3")
    found, wanted = names.of(models[kind].state_dict()), load_file(directory / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    if kind == "qwen3-moe":
        assert "model.layers.2.mlp.experts.3.up_proj.weight" in found


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "mixtral"])
def test_a_version_is_written_under_these_names(tmp_path: Path, models: dict[str, Any], kind: str) -> None:
    """What a server is given must have the names that it looks for; exports that have others are refused."""
    layout = RunLayout(tmp_path / "run")
    for directory in layout.directories():
        directory.mkdir(parents=True)
    saved(layout.model, models[kind])
    publisher = Publisher(layout, 1, keyframe_every=3, before_commit=lambda: None)
    state = {name: tensor.clone() for name, tensor in models[kind].state_dict().items()}
    publisher.publish(0, state.items(), {})
    materialize(layout, 0, tmp_path / "out", in_files=in_files(layout))
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(layout.model / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    loaded, report = type(models[kind]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    if kind == "qwen3":
        refuse_other_names(layout, "an export")
    else:
        with pytest.raises(InputError, match="an export holds tensors as the trainer names them"):
            refuse_other_names(layout, "an export")


def test_how_many_experts_a_token_goes_through(tmp_path: Path, models: dict[str, Any]) -> None:
    found = {kind: routed_shape(saved(tmp_path / kind, model)) for kind, model in models.items()}
    assert found == {"qwen3": None, "qwen3-moe": (3, 2), "qwen3-moe, one layer dense": (3, 2), "mixtral": (3, 2)}


def test_to_record_experts_of_a_dense_model_is_an_error(tmp_path: Path, models: dict[str, Any]) -> None:
    from builders import make_recipe

    def recipe(wanted: bool) -> Any:
        rollout = {"engine": "sglang", "sglang": {"routed_experts": wanted}}
        return make_recipe(rollout=rollout, determinism="relaxed")

    dense, moe = saved(tmp_path / "dense", models["qwen3"]), saved(tmp_path / "moe", models["qwen3-moe"])
    assert recorded_shape(recipe(True), moe) == (3, 2)
    assert recorded_shape(recipe(False), moe) is None
    with pytest.raises(InputError, match="the model is dense"):
        recorded_shape(recipe(True), dense)
