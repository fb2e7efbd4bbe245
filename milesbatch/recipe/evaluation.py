"""The recipe section for evaluation: held-out prompts that chosen policy versions are asked. Imports without torch.

The page behind it is ``docs/recipe.md``, which is generated from the descriptions here.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from milesbatch.recipe.inputs import Data, FileData, Section, checked_temperature


class Evaluation(Section):
    """Held-out prompts that some policy versions are asked beside the training. It reads the run and changes nothing in it."""

    prompts: Data = Field(
        description="Where the prompts come from, written like `data`. None of them may be a prompt that training (or a"
        " supervised start) asks: that is checked, and an error."
    )
    num_prompts: int | None = Field(
        None,
        ge=1,
        description="How many prompts are asked; null asks every row of a file, and is an error with prompts without end."
        " Few make a noisy curve: the standard error of a share is up to 0.5 divided by the root of this.",
    )
    every_steps: int = Field(
        10,
        ge=1,
        description="Train steps from one evaluation to the next; version 0 and the last one are always evaluated. Small values"
        " make an evaluator that falls behind, so that old weights stay on the disk until it has read them.",
    )
    samples_per_prompt: int = Field(
        1,
        ge=1,
        le=10_000,
        description="Samples of each prompt. With `temperature: 0` all of them are equal, so more than 1 is then an error.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="As `rollout.sampling.temperature`; 0 always takes the likeliest token. All other settings of sampling are"
        " those of `rollout.sampling`.",
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest response, in tokens; null takes `rollout.sampling.max_new_tokens`."
    )
    wait_s: float = Field(
        120.0,
        ge=0,
        description="How long a run waits, after its last step, for evaluations that are still to come. What is missing then is"
        " made by `milesbatch evaluate RUN`.",
    )

    @field_validator("temperature")
    @classmethod
    def _can_be_divided_by(cls, value: float) -> float:
        return checked_temperature(value)

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.num_prompts is None and not isinstance(self.prompts, FileData):
            raise ValueError(f"num_prompts is needed: prompts of kind {self.prompts.kind} have no end")
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt} with temperature 0, which makes them all equal;"
                " allowed: samples_per_prompt 1, or a temperature above 0"
            )
        return self
