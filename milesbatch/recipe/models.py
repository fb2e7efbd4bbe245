"""The recipe: one small frozen model for each component. Imports without torch.

``docs/recipe.md`` is generated from the descriptions here (``python -m milesbatch.recipe.document``).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from milesbatch.recipe.artefacts import Checkpoint, Weights
from milesbatch.recipe.evaluation import Evaluation
from milesbatch.recipe.inputs import (
    ArithmeticData,
    Data,
    Environment,
    FileData,
    MadeModel,
    Model,
    PretrainedModel,
    ReasoningGymData,
    Section,
    WarmStart,
    checked_temperature,
)
from milesbatch.recipe.sglang import SGLang
from milesbatch.recipe.slurm import Slurm

# -- rollout --------------------------------------------------------------------------------------------------------


class Sampling(Section):
    """How tokens are drawn; the same meaning in every engine."""

    max_new_tokens: int = Field(
        16,
        ge=1,
        description="Longest response, in tokens. A longer one is cut and ends with `length`; too small cuts right"
        " answers, too large lets one rambling sample hold up its whole lease.",
    )
    temperature: float = Field(
        1.0,
        ge=0,
        description="Divides the logits before tokens are drawn. 0 always takes the likeliest token, so that all samples"
        " of a group are equal and nothing is learned (between 0 and 1e-6 is an error); far above 1 gives noise. Recorded"
        " logprobs are those of softmax(logits / temperature).",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Draw only from the likeliest tokens that together have this probability. Recorded logprobs do not"
        " change with it, so values below 1 make training slightly off-policy.",
    )
    top_k: int = Field(
        -1,
        ge=-1,
        description="Draw only from this many likeliest tokens; -1 means all, 0 is an error. Recorded logprobs do not"
        " change with it, so small values make training off-policy.",
    )
    stop: tuple[str, ...] = Field(
        (), description="Texts that end a response; the matching text stays in the tokens that are trained on."
    )

    @field_validator("temperature")
    @classmethod
    def _can_be_divided_by(cls, value: float) -> float:
        return checked_temperature(value)

    @field_validator("top_k")
    @classmethod
    def _draws_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k is 0; allowed: -1 (all) or at least 1")
        return value


class Rollout(Section):
    """The rollout group: how many workers, what a lease holds, how far it may run ahead of the trainer."""

    workers: int = Field(
        2,
        ge=1,
        description="Rollout workers, each a process with its own engine. Too few leave the trainer waiting, more than"
        " there are cores or GPUs slow each other down.",
    )
    engine: Literal["embedded", "sglang"] = Field(
        "embedded",
        description="What generates tokens: `embedded` runs the model with torch in the worker itself, `sglang` in SGLang"
        " servers that the worker starts or attaches to (`determinism: relaxed` only).",
    )
    sglang: SGLang = Field(SGLang(), description="The servers, with `engine: sglang`.")
    samples_per_group: int = Field(
        8,
        ge=2,
        description="Samples of each prompt, compared with each other to get advantages. Few make noisy advantages; many"
        " cost time without telling more about an easy prompt.",
    )
    groups_per_lease: int = Field(
        4,
        ge=1,
        description="Prompt groups that a worker is handed at once and decodes together; must divide"
        " `trainer.groups_per_step`. 1 decodes small, slow batches; large values are lost together when a worker dies.",
    )
    staleness: int = Field(
        1,
        ge=0,
        description="How many policy versions training data may lag behind the trainer: exactly this many with"
        " `determinism: bitwise`, at most this many otherwise. 0 makes trainer and rollout wait for each other; large"
        " values learn from an old policy and may become unstable.",
    )
    sampling: Sampling = Field(Sampling(), description="How tokens are drawn.")
    max_concurrent_samples: int = Field(
        64,
        ge=1,
        description="Sequences that one engine decodes at the same time. Higher is faster until memory for the key-value"
        " cache runs out.",
    )
    threads: int = Field(
        1,
        ge=1,
        description="CPU threads of one embedded engine. More threads than cores, over all workers and ranks together,"
        " slow everything down.",
    )
    lease_s: float = Field(
        300.0,
        gt=0,
        description="Seconds after which an unfinished lease is handed out again. Shorter than a lease needs, the same"
        " work is begun over and over; very long, a silent worker holds up the run.",
    )


# -- trainer --------------------------------------------------------------------------------------------------------


class Optimizer(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(
        1e-4,
        gt=0,
        description="Learning rate after the warm-up. Too high destroys the policy within a few steps; too low shows no"
        " change in reward.",
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95),
        description="Decay of the running mean of the gradient and of its square. Close to 1 remembers long and reacts"
        " slowly.",
    )
    epsilon: float = Field(
        1e-8,
        gt=0,
        description="Added to the root of the second moment so that a tiny gradient is not blown up; large values turn"
        " AdamW into plain gradient descent.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Share of each weight, times the learning rate, that is taken off in every step; 0 is off.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Train steps in which the learning rate rises linearly from near 0; as many as the run has steps"
        " means that the full rate is never reached.",
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant",
        description="Learning rate after the warm-up: `constant`, or falling to `min_learning_rate` at the last step."
        " Only with `constant` can `steps` be changed in a living run.",
    )
    min_learning_rate: float = Field(
        0.0, ge=0, description="Learning rate at which `cosine` and `linear` end; unused with `constant`."
    )
    grad_clip: float = Field(
        1.0,
        gt=0,
        description="Largest global gradient norm; a longer gradient is scaled down to it. Very small values make every"
        " step the same length, very large ones never clip.",
    )

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.schedule != "constant" and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate ({self.min_learning_rate:g}) is above learning_rate ({self.learning_rate:g}), to which"
                f" `{self.schedule}` would have to rise"
            )
        return self


class Trainer(Section):
    """The trainer group: ranks of one torch.distributed job."""

    backend: Literal["fsdp"] = Field(
        "fsdp", description="What trains the model: `fsdp` is FSDP2 (`fully_shard`) over a transformers model."
    )
    ranks: int = Field(
        2,
        ge=1,
        description="Processes of the trainer group; at most the samples of one step, since each needs some to work on.",
    )
    groups_per_step: int = Field(
        16,
        ge=1,
        description="Prompt groups that one train step learns from. Few make noisy steps, many make slow ones.",
    )
    max_tokens_per_microbatch: int = Field(
        4096,
        ge=16,
        description="Tokens that one rank packs into one forward pass; a longer sample gets a pass of its own. Bounds the"
        " memory for activations: too large runs out of it, too small wastes time.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type in which the model computes; master weights are always float32. `bfloat16` is faster on GPUs and"
        " makes logprobs less exact.",
    )
    optimizer: Optimizer = Field(Optimizer(), description="AdamW and its learning-rate schedule.")
    threads: int = Field(
        1,
        ge=1,
        description="CPU threads of one rank. More threads than cores, over all workers and ranks together, slow"
        " everything down.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Whether activations are computed again in the backward pass instead of kept; saves memory, costs"
        " about a third more time.",
    )


class Algorithm(Section):
    """GRPO and its variants."""

    clip_low: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="The probability ratio of new to old policy is clipped below 1 minus this. 0 forbids lowering any"
        " token's probability after the first update; near 1 hardly clips.",
    )
    clip_high: float = Field(
        0.28,
        ge=0,
        description="The probability ratio is clipped above 1 plus this; larger than `clip_low` is DAPO's clip-higher, which"
        " keeps rare tokens alive. Very large values allow steps that ruin the policy.",
    )
    normalize_advantage: bool = Field(
        True,
        description="Whether advantages are divided by their group's standard deviation; false is Dr. GRPO, which does not"
        " favour groups whose samples nearly agree.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence from the starting model in the loss. 0 keeps no reference model in memory;"
        " large values hold the policy where it began.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="Which of Schulman's estimators of the KL divergence is used; no effect while `kl_coef` is 0."
    )
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of an entropy bonus in the loss. Small values keep exploration alive; large ones reward noise.",
    )
    group_filter: Literal["none", "zero_variance"] = Field(
        "none",
        description="Which groups are rejected after judging: `zero_variance` rejects those whose samples all have the same"
        " reward, from which nothing can be learned; the step is then smaller by those groups.",
    )


class Tracking(Section):
    """Where curves go."""

    kind: Literal["mlflow", "tensorboard", "wandb", "none"] = Field(
        "mlflow",
        description="Where metrics go: `mlflow` writes to `MLFLOW_TRACKING_URI`, or to SQLite in the run directory when that"
        " is not set; `tensorboard` writes event files in the run directory; `wandb` an offline W&B run there, or online with"
        " `WANDB_MODE=online`; `none` keeps only the run's own event log.",
    )
    experiment: str = Field(
        "milesbatch", min_length=1, description="Name of the MLflow experiment, or the W&B project, of the run."
    )
    report: bool = Field(
        True,
        description="With `kind: mlflow`: when the run has finished or failed, put its report (without the audit) and the"
        " samples that it shows into the MLflow run as artefacts. A job keeps its nodes for that, for seconds, and at most"
        " 60 s longer; a report that is not done then is left out.",
    )


class Recipe(Section):
    """A whole recipe, resolved."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run, part of its id and of its directory: letters, digits, dots, underscores and hyphens.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Root of all randomness: prompts, sampling and initial weights follow from it.",
    )
    steps: int = Field(ge=1, description="Train steps (optimizer steps) in the whole run, over all its restarts.")
    determinism: Literal["bitwise", "relaxed"] = Field(
        "bitwise",
        description="`bitwise` makes a run that was killed end with the same weights digest as one that was not, at the"
        " price of waiting for a fixed order; `relaxed` takes groups as they come.",
    )
    model: Model = Field(description="What is trained.")
    data: Data = Field(description="Where prompts come from.")
    environment: Environment = Field(Environment(), description="How episodes are judged.")
    rollout: Rollout = Field(Rollout(), description="The rollout group and what it is handed.")
    trainer: Trainer = Field(Trainer(), description="The trainer group and its optimizer.")
    algorithm: Algorithm = Field(Algorithm(), description="The loss and the choice of groups.")
    weights: Weights = Field(Weights(), description="How policy versions reach the rollout group.")
    checkpoint: Checkpoint = Field(
        Checkpoint(), description="When state is saved, and what happens when a replay differs."
    )
    slurm: Slurm = Field(
        Slurm(),
        description="What the run asks of Slurm; limits on restarts, and heartbeats, which hold without it too.",
    )
    tracking: Tracking = Field(Tracking(), description="Where curves go.")
    evaluation: Evaluation | None = Field(
        None, description="Held-out prompts that policy versions are asked while the run goes on; null asks none."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        per_step, per_lease = self.trainer.groups_per_step, self.rollout.groups_per_lease
        if per_step % per_lease:
            raise ValueError(
                f"rollout.groups_per_lease ({per_lease}) must divide trainer.groups_per_step ({per_step}); "
                f"allowed: {[d for d in range(1, per_step + 1) if per_step % d == 0]}"
            )
        for role, processes, nodes in (
            ("rollout.workers", self.rollout.workers, self.slurm.rollout.nodes),
            ("trainer.ranks", self.trainer.ranks, self.slurm.trainer.nodes),
        ):
            if processes % nodes:
                raise ValueError(
                    f"{role} ({processes}) must be a multiple of slurm.{role.split('.')[0]}.nodes ({nodes})"
                )
        if self.rollout.engine == "sglang":
            self._check_servers()
        if isinstance(self.model, MadeModel):
            if self.model.hidden_size % self.model.heads:
                raise ValueError(f"model.heads ({self.model.heads}) must divide model.hidden_size")
            if self.model.heads % self.model.kv_heads:
                raise ValueError(f"model.kv_heads ({self.model.kv_heads}) must divide model.heads")
        if self.trainer.ranks > self.trainer.groups_per_step * self.rollout.samples_per_group:
            raise ValueError(f"trainer.ranks ({self.trainer.ranks}) is more than the samples of a step")
        return self

    def _check_servers(self) -> None:
        if self.determinism == "bitwise":
            raise ValueError(
                "rollout.engine: sglang cannot hold determinism: bitwise (what a server draws depends on what else it is"
                " asked); allowed: determinism: relaxed, or rollout.engine: embedded"
            )
        urls, workers = len(self.rollout.sglang.urls), self.rollout.workers
        if urls and urls < workers:
            raise ValueError(f"rollout.sglang.urls has {urls} servers for {workers} workers; each needs one of its own")
        routers = len(self.rollout.sglang.routers)
        if routers and not urls:
            raise ValueError("rollout.sglang.routers are in front of rollout.sglang.urls, and these are none")
        if routers not in (0, workers):
            raise ValueError(
                f"rollout.sglang.routers has {routers} routers for {workers} workers; each needs one of its own"
            )


__all__ = [
    "Algorithm",
    "ArithmeticData",
    "Checkpoint",
    "Data",
    "Environment",
    "Evaluation",
    "FileData",
    "MadeModel",
    "Model",
    "Optimizer",
    "PretrainedModel",
    "ReasoningGymData",
    "Recipe",
    "Rollout",
    "SGLang",
    "Sampling",
    "Section",
    "Slurm",
    "Tracking",
    "Trainer",
    "WarmStart",
    "Weights",
]
