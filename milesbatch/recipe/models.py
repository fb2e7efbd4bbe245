"""The recipe: one small frozen model for each component. Imports without torch.

``docs/recipe.md`` is generated from the descriptions here (``python -m milesbatch.recipe.document``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen part of a recipe; unknown keys are errors (the loader names the nearest key that exists)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# -- model ----------------------------------------------------------------------------------------------------------


class WarmStart(Section):
    """Supervised training of a made model before reinforcement learning begins (cached by digest)."""

    steps: int = Field(300, ge=0, description="Optimizer steps of supervised training; 0 keeps the random weights.")
    batch_size: int = Field(64, ge=1, description="Examples per supervised step.")
    learning_rate: float = Field(3e-3, gt=0, description="Peak learning rate; too high diverges, too low learns nothing.")
    examples: int = Field(2000, ge=1, description="Distinct supervised examples, drawn apart from the prompts trained on.")


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
    path: str = Field(description="Path or fsspec URL; the ending (.jsonl, .parquet, .arrow) says the format.")
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
        0.2, ge=0, le=1, description="The run stops when more than this share of the last episodes failed with an error."
    )
    failed_window: int = Field(64, ge=1, description="How many last episodes `max_failed_share` looks at.")


# -- rollout --------------------------------------------------------------------------------------------------------


class Sampling(Section):
    """How tokens are drawn; the same meaning in every engine."""

    max_new_tokens: int = Field(16, ge=1, description="Longest response in tokens; a longer one ends with `length`.")
    temperature: float = Field(1.0, ge=0, description="0 is greedy; logprobs are of softmax(logits / temperature).")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus share; does not change the recorded logprobs.")
    top_k: int = Field(-1, ge=-1, description="Draw from the k likeliest tokens only; -1 for all.")
    stop: tuple[str, ...] = Field((), description="Texts that end a response; the text stays in the tokens.")


class Rollout(Section):
    """The rollout group: how many workers, what a lease holds, how far ahead of the trainer it may run."""

    workers: int = Field(2, ge=1, description="Rollout workers, each with its own engine.")
    engine: Literal["embedded"] = Field("embedded", description="`embedded`: torch in the worker itself.")
    samples_per_group: int = Field(8, ge=2, description="Samples of each prompt (n).")
    groups_per_lease: int = Field(
        4, ge=1, description="Groups handed out and decoded together; must divide `trainer.groups_per_step`."
    )
    staleness: int = Field(
        1,
        ge=0,
        description="Versions that data may lag. With `determinism: bitwise` the lag is exactly this; otherwise at most. 0"
        " makes trainer and rollout wait for each other.",
    )
    sampling: Sampling = Field(Sampling(), description="How tokens are drawn; see below.")
    max_concurrent_samples: int = Field(64, ge=1, description="Sequences decoded at once by one engine.")
    threads: int = Field(1, ge=1, description="CPU threads of one embedded engine.")
    lease_s: float = Field(300.0, gt=0, description="Seconds after which an unfinished lease is handed out again.")


# -- trainer --------------------------------------------------------------------------------------------------------


class Optimizer(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the first and second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0.")
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="Shape after the warm-up.")
    min_learning_rate: float = Field(0.0, ge=0, description="Where `cosine` and `linear` end.")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")


class Trainer(Section):
    """The trainer group: ranks of one torch.distributed job."""

    backend: Literal["fsdp"] = Field("fsdp", description="`fsdp`: FSDP2 over a transformers model.")
    ranks: int = Field(2, ge=1, description="Processes of the trainer group.")
    groups_per_step: int = Field(16, ge=1, description="Prompt groups of one train step.")
    max_tokens_per_microbatch: int = Field(4096, ge=16, description="Packed tokens in one forward pass of one rank.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Compute type; master weights are float32.")
    optimizer: Optimizer = Field(Optimizer(), description="AdamW and its schedule; see below.")
    threads: int = Field(1, ge=1, description="CPU threads of one rank.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass to save memory.")


class Algorithm(Section):
    """GRPO and its variants."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="Ratio is clipped below 1 - this.")
    clip_high: float = Field(0.28, ge=0, description="Ratio is clipped above 1 + this (DAPO's clip-higher when larger).")
    normalize_advantage: bool = Field(True, description="Divide by the group's standard deviation; false is Dr. GRPO.")
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the starting model; 0 keeps no reference model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Schulman's estimators of the KL divergence.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of an entropy bonus.")
    group_filter: Literal["none", "zero_variance"] = Field(
        "none", description="`zero_variance` rejects groups whose samples all have the same reward."
    )


class Weights(Section):
    """How policy versions reach the rollout group."""

    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type in which the rollout group sees weights.")
    keyframe_every: int = Field(20, ge=1, description="A full copy every so many versions; deltas between.")
    transport: Literal["delta"] = Field("delta", description="`delta`: files in the run directory.")


class Checkpoint(Section):
    """When state is saved and what happens when a replay differs."""

    every: int = Field(10, ge=1, description="Steps between checkpoints; a restart replays at most this many.")
    keep: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    on_divergence: Literal["adopt", "discard", "stop"] = Field(
        "stop", description="What to do when a replayed step gives other weights than the published ones."
    )


class Slurm(Section):
    """Limits on restarts; they hold for the local launcher too."""

    max_restarts_without_progress: int = Field(
        3, ge=0, description="Restarts of a role without a new train step before the run stops and says why."
    )
    heartbeat_s: float = Field(2.0, gt=0, description="Seconds between heartbeats; after five missed ones a process is treated as lost.")
    hang_s: float = Field(120.0, gt=0, description="A process that makes no progress for so long is treated as dead.")


class Tracking(Section):
    """Where curves go."""

    kind: Literal["mlflow", "none"] = Field("mlflow", description="`mlflow` logs to `MLFLOW_TRACKING_URI`, default SQLite.")
    experiment: str = Field("milesbatch", description="MLflow experiment.")


class Recipe(Section):
    """A whole recipe, resolved."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; part of its id.")
    seed: int = Field(0, ge=0, lt=2**31, description="Root of all randomness.")
    steps: int = Field(ge=1, description="Train steps (optimizer steps) in the whole run.")
    determinism: Literal["bitwise", "relaxed"] = Field(
        "bitwise", description="`bitwise`: a killed run ends with the same weights digest as one that was not."
    )
    model: Model = Field(description="What is trained.")
    data: Data = Field(description="Where prompts come from.")
    environment: Environment = Field(Environment(), description="How episodes are judged.")
    rollout: Rollout = Field(Rollout(), description="The rollout group.")
    trainer: Trainer = Field(Trainer(), description="The trainer group.")
    algorithm: Algorithm = Field(Algorithm(), description="The loss.")
    weights: Weights = Field(Weights(), description="Transport of policy versions.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="Saving and replay.")
    slurm: Slurm = Field(Slurm(), description="Restart limits and heartbeats.")
    tracking: Tracking = Field(Tracking(), description="Where curves go.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        per_step, per_lease = self.trainer.groups_per_step, self.rollout.groups_per_lease
        if per_step % per_lease:
            raise ValueError(
                f"rollout.groups_per_lease ({per_lease}) must divide trainer.groups_per_step ({per_step}); "
                f"allowed: {[d for d in range(1, per_step + 1) if per_step % d == 0]}"
            )
        if isinstance(self.model, MadeModel):
            if self.model.hidden_size % self.model.heads:
                raise ValueError(f"model.heads ({self.model.heads}) must divide model.hidden_size")
            if self.model.heads % self.model.kv_heads:
                raise ValueError(f"model.kv_heads ({self.model.kv_heads}) must divide model.heads")
        if self.trainer.ranks > self.trainer.groups_per_step * self.rollout.samples_per_group:
            raise ValueError(f"trainer.ranks ({self.trainer.ranks}) is more than the samples of a step")
        return self
