"""What a run starts from: the model, the prompts, and how episodes are judged. Imports without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A frozen part of a recipe; unknown keys are errors (the loader names the nearest key that exists)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_COLDEST = 1e-6
"""Logits divided by less than this may overflow."""


def checked_temperature(value: float) -> float:
    """``value`` when logits can be divided by it, or when it is 0, which always takes the likeliest token.

    Raises:
        ValueError: neither.
    """
    if 0 < value < _COLDEST:
        raise ValueError(f"temperature is {value:g}; allowed: 0 (always the likeliest token) or at least {_COLDEST:g}")
    return value


# -- model ----------------------------------------------------------------------------------------------------------


class WarmStart(Section):
    """Supervised training of a made model before reinforcement learning begins (cached by digest)."""

    steps: int = Field(300, ge=0, description="Optimizer steps of supervised training; 0 keeps the random weights.")
    batch_size: int = Field(64, ge=1, description="Examples per supervised step.")
    learning_rate: float = Field(
        3e-3, gt=0, description="Peak learning rate; too high diverges, too low learns nothing."
    )
    examples: int = Field(
        2000, ge=1, description="Distinct supervised examples, drawn apart from the prompts trained on."
    )


class MadeModel(Section):
    """A small Qwen3-architecture model made on the spot, with a character tokenizer."""

    kind: Literal["made"] = "made"
    hidden_size: int = Field(128, ge=8, description="Width of the residual stream, in elements.")
    layers: int = Field(2, ge=1, description="Number of transformer layers.")
    heads: int = Field(4, ge=1, description="Query heads; must divide into `hidden_size`.")
    kv_heads: int = Field(2, ge=1, description="Key-value heads; must divide `heads`.")
    intermediate_size: int = Field(384, ge=8, description="Width of the gated feed-forward layer.")
    max_length: int = Field(128, ge=16, description="Longest sequence (prompt and response) in tokens.")
    alphabet: str = Field(
        "0123456789+-*=() abcdefghijklmnopqrstuvwxyz:,.?\n", min_length=2, description="Characters that are tokens."
    )
    warm_start: WarmStart = Field(WarmStart(), description="Supervised start; see below.")


class PretrainedModel(Section):
    """A model in a Hugging Face directory, or a GGUF file that transformers can load."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(
        description="Local directory, any fsspec URL of one, or `package:NAME/SUBDIR` for a directory inside an installed"
        " Python package."
    )
    gguf_file: str | None = Field(None, description="Name of a GGUF file inside `path`; null for safetensors.")
    chat_template: bool = Field(True, description="Wrap prompts with the model's own chat template.")
    system_prompt: str | None = Field(None, description="System message put before each prompt; null for none.")
    max_length: int | None = Field(
        None,
        ge=16,
        description="Longest sequence (prompt and response) in tokens; engines set aside memory for so many at each of"
        " `rollout.max_concurrent_samples`. null uses the model's whole context, which can be far more than is needed.",
    )


Model = Annotated[MadeModel | PretrainedModel, Field(discriminator="kind")]


# -- data -----------------------------------------------------------------------------------------------------------


class ArithmeticData(Section):
    """An endless seeded stream of small arithmetic problems."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: str = Field("+", min_length=1, pattern=r"^[+\-*]+$", description="Operators that appear: any of `+-*`.")
    min_operand: int = Field(0, ge=0, description="Smallest operand.")
    max_operand: int = Field(99, ge=1, description="Largest operand; more digits are harder.")


class ReasoningGymData(Section):
    """An endless seeded stream of problems from the `reasoning-gym` package."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(description="Name of a reasoning-gym data set, for example `basic_arithmetic`.")
    options: dict[str, Any] = Field({}, description="Options of that data set, as reasoning-gym names them.")
    instruction: str = Field("", description="Text added after the question, for example how to give the answer.")


class FileData(Section):
    """Prompts from a JSONL, Parquet or Arrow file, local or at any fsspec URL; shuffled anew in each epoch."""

    kind: Literal["file"] = "file"
    path: str = Field(
        description="Path, fsspec URL, or `package:NAME/FILE` for a file inside an installed Python package; the ending"
        " (.jsonl, .parquet, .arrow) says the format."
    )
    prompt_field: str = Field("prompt", description="Column with the prompt: a string, or a list of chat messages.")
    answer_field: str = Field("answer", description="Column with the reference answer that the reward function gets.")
    id_field: str | None = Field(None, description="Column with a stable prompt id; null uses the row number.")


Data = Annotated[ArithmeticData | ReasoningGymData | FileData, Field(discriminator="kind")]


class Environment(Section):
    """How episodes are judged."""

    reward: str = Field(
        "milesbatch.environments.rewards:exact_match",
        description="Reward function `package.module:name`, sync or async; returns a number or named parts.",
    )
    max_failed_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="The run stops when more than this share of the last episodes failed with an error.",
    )
    failed_window: int = Field(64, ge=1, description="How many last episodes `max_failed_share` looks at.")
