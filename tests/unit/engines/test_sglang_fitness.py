"""Servers that a run cannot use are named before any weights go there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milesbatch.engines.sglang.fitness import Needed
from milesbatch.errors import InputError

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2}
SERVER: dict[str, Any] = {"dtype": "float32", "context_length": 80, "enable_return_routed_experts": False}


def model(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def needed(tmp_path: Path, dtype: str = "float32", **options: Any) -> Needed:
    return Needed.of_model(model(tmp_path / "mine"), dtype, 64, **options)


def served(path: Path | str, *architectures: str) -> dict[str, Any]:
    return {"model_path": str(path), "architectures": list(architectures or ("Qwen3ForCausalLM",))}


@pytest.mark.parametrize(
    ("dtype", "server"),
    [
        ("float32", {}),
        ("float32", {"dtype": "float"}),
        ("float16", {"dtype": "half"}),
        ("bfloat16", {"dtype": "auto"}),
        ("float32", {"dtype": None, "context_length": None}),
        ("float32", {"context_length": 64}),
    ],
)
def test_one_that_can_be_used(tmp_path: Path, dtype: str, server: dict[str, Any]) -> None:
    needed(tmp_path, dtype).check("s", SERVER | server, served(tmp_path / "mine"))


@pytest.mark.parametrize("path", ["/of/another/host", "Qwen/Qwen3-0.6B", ""])
def test_a_model_that_cannot_be_seen_here_is_not_compared(tmp_path: Path, path: str) -> None:
    needed(tmp_path).check("s", SERVER, served(path))


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"dtype": "auto"}, r"float16 \(dtype auto\), which would .* they are float32(.|\n)*--dtype=float32"),
        ({"dtype": "bfloat16"}, r"computes in bfloat16(.|\n)*--dtype=float32"),
        ({"context_length": 63}, r"takes 63 tokens .*up to 64(.|\n)*--context-length=80"),
    ],
)
def test_one_with_other_flags_is_named_with_the_right_one(tmp_path: Path, server: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        needed(tmp_path).check("s", SERVER | server, served(tmp_path / "mine"))


def test_one_that_does_not_tell_experts(tmp_path: Path) -> None:
    wanted = needed(tmp_path, routed_experts=True)
    with pytest.raises(InputError, match=r"does not tell(.|\n)*--enable-return-routed-experts"):
        wanted.check("s", SERVER, served(tmp_path / "mine"))
    wanted.check("s", SERVER | {"enable_return_routed_experts": True}, served(tmp_path / "mine"))


def test_one_of_another_model_is_named_with_what_differs(tmp_path: Path) -> None:
    wanted = needed(tmp_path)
    with pytest.raises(InputError, match=r"s serves a LlamaForCausalLM, and this run trains a Qwen3ForCausalLM"):
        wanted.check("s", SERVER, served(tmp_path / "mine", "LlamaForCausalLM"))
    other = model(tmp_path / "other", vocab_size=35, hidden_size=64)
    with pytest.raises(
        InputError, match=r"another model, .*other: vocab_size 35 instead of 19, hidden_size 64 instead of 32"
    ):
        wanted.check("s", SERVER, served(other))


@pytest.mark.parametrize("content", ["", "{", "[1]", "null"])
def test_a_configuration_that_cannot_be_read_is_not_compared(tmp_path: Path, content: str) -> None:
    wanted = needed(tmp_path)
    other = model(tmp_path / "other", vocab_size=35)
    (other / "config.json").write_text(content)
    wanted.check("s", SERVER, served(other))


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"rope_parameters": {"rope_theta": 10000.0}}, {"rope_parameters": {"rope_theta": 100.0}}),
        ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-5}),
        ({"intermediate_size": 48}, {"intermediate_size": 32}),
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}),
    ],
)
def test_the_same_weights_in_another_function_are_another_model(
    tmp_path: Path, mine: dict[str, Any], other: dict[str, Any]
) -> None:
    """Checksums prove weights, and nothing of what is computed with them."""
    wanted = Needed.of_model(model(tmp_path / "mine", **mine), "float32", 64)
    wanted.check("s", SERVER, served(model(tmp_path / "like", **mine)))
    with pytest.raises(InputError, match=f"another model, .*: {next(iter(mine))} "):
        wanted.check("s", SERVER, served(model(tmp_path / "other", **other)))
