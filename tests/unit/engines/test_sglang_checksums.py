"""Checksums that a server must answer, and what is noticed when it does not. The real server's own are in tests/contract."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch.nn.functional import pad

from milesbatch.engines.sglang.checksums import compare
from milesbatch.errors import EngineError

Tensors = dict[str, torch.Tensor]


def hashed(*parts: torch.Tensor, zeros: int = 0) -> str:
    data = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts) + bytes(zeros)
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (61, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.mlp.experts.0.gate_proj.weight": (6, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": (6, 8),
        "model.layers.0.mlp.experts.0.down_proj.weight": (8, 6),
        "model.layers.0.mlp.experts.1.gate_proj.weight": (6, 8),
        "model.layers.0.mlp.experts.1.up_proj.weight": (6, 8),
        "model.layers.0.mlp.experts.1.down_proj.weight": (8, 6),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def answered(t: Tensors) -> dict[str, str]:
    q, k, v = (t[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    expert = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    # Their inner width of 6 is filled up to 32.
    gate_up = [pad(t[expert.format(number, part)], (0, 0, 0, 26)) for number in (0, 1) for part in ("gate", "up")]
    down = [pad(t[expert.format(number, "down")], (0, 26)) for number in (0, 1)]
    return {
        "model.embed_tokens.weight": hashed(t["model.embed_tokens.weight"], zeros=3 * 8 * 4),
        "model.layers.0.self_attn.qkv_proj.weight": hashed(q, k, v),
        "model.layers.0.mlp.experts.w13_weight": hashed(*gate_up),
        "model.layers.0.mlp.experts.w2_weight": hashed(*down),
    }


def test_all_are_proven(tensors: Tensors) -> None:
    proof = compare(answered(tensors), tensors, can_expect=True, others={})
    assert (proof.proven, proof.agreed) == (4, 0)


def test_any_changed_element_is_found(tensors: Tensors) -> None:
    right = answered(tensors)
    for name in tensors:
        wrong = {**tensors, name: tensors[name].clone()}
        wrong[name].view(-1)[-1] += 1e-3
        with pytest.raises(EngineError, match="has checksum"):
            compare(right, wrong, can_expect=True, others={})


def test_a_tensor_that_the_server_does_not_have_is_named(tensors: Tensors) -> None:
    with pytest.raises(EngineError, match=r"does not say that it has model\.extra\.weight"):
        compare(answered(tensors), {**tensors, "model.extra.weight": torch.ones(2)}, can_expect=True, others={})


def test_experts_that_a_server_knows_by_no_name_are_missed(tensors: Tensors) -> None:
    """As transformers holds them, in one tensor: the server would leave its own as they are."""
    expert = "model.layers.0.mlp.experts."
    fused = {name: tensor for name, tensor in tensors.items() if not name.startswith(expert)}
    fused |= {expert + "gate_up_proj": torch.ones(2, 12, 8), expert + "down_proj": torch.ones(2, 8, 6)}
    with pytest.raises(EngineError, match=r"does not say that it has .*experts\.down_proj"):
        compare(answered(tensors), fused, can_expect=True, others={})


def test_a_parameter_that_is_made_of_nothing_known_is_no_proof(tensors: Tensors) -> None:
    with pytest.raises(EngineError, match=r"has lm_head\.weight, which is made of no tensor"):
        compare({**answered(tensors), "lm_head.weight": "0" * 16}, tensors, can_expect=True, others={})


def test_without_expectation_servers_are_compared_with_each_other(tensors: Tensors) -> None:
    right = answered(tensors)
    assert compare(right, tensors, can_expect=False, others={}).proven == 0
    assert compare(right, tensors, can_expect=False, others=right).agreed == 4
    with pytest.raises(EngineError, match=r"embed_tokens\.weight has checksum"):
        compare({**right, "model.embed_tokens.weight": "0" * 16}, tensors, can_expect=False, others=right)


def test_no_answer_is_no_proof(tensors: Tensors) -> None:
    with pytest.raises(EngineError, match="no checksums"):
        compare({}, tensors, can_expect=True, others={})
