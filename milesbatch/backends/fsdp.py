"""The trainer group on FSDP2: a transformers model, sharded over all ranks, and its AdamW.

It owns parameters, gradients and optimizer state, and every collective of a train step. It never reads or writes files.
Invariant: parameters are sharded between two calls of its methods, and are the same function of (starting model,
steps, samples) on every run with the same number of ranks and threads.

The way of a step: samples -> microbatches of this rank -> forward, loss part, backward for each (gradients are summed
over ranks by FSDP2, and are already those of the global token mean) -> global norm, clip -> AdamW.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from milesbatch.algorithm.losses import MAXIMUM_NAMES, SUM_NAMES, grpo_loss, log_softmax, pick
from milesbatch.algorithm.packing import Microbatch, PackedTensors, plan_microbatches, to_tensors
from milesbatch.algorithm.samples import TrainSample
from milesbatch.algorithm.schedule import learning_rate
from milesbatch.backends.distributed_checkpoint import random_state, restore_random_state
from milesbatch.backends.protocol import StepMetrics, do_nothing
from milesbatch.errors import CorruptArtefactError, ModelError, RunFailedError
from milesbatch.recipe.models import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class FsdpBackend:
    """One rank of the trainer group; implements :class:`milesbatch.backends.protocol.TrainerBackend`."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel, device: torch.device) -> None:
        """Shard ``model`` (collective); it belongs to the backend from then on.

        ``model`` is in float32 on the CPU and the same on all ranks: the starting model, also when a checkpoint is loaded
        afterwards, for the reference of the KL is copied from it. torch.distributed is initialised.

        Raises:
            ModelError: a parameter is not float32, or the architecture cannot be packed or sharded.
        """
        _check_model(model)
        self._recipe, self._device = recipe, device
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(device.type, (self._ranks,))
        _prepare(model, checkpointing=recipe.trainer.gradient_checkpointing)
        self._tied = _tied_names(model)
        dtype = getattr(torch, recipe.trainer.dtype)
        self._reference: torch.nn.Module | None = None
        if recipe.algorithm.kl_coef > 0:
            self._reference = _shard(copy.deepcopy(model).requires_grad_(False), mesh, dtype)
        self._model = _shard(model, mesh, dtype)
        self._parameters = {name: cast(DTensor, value) for name, value in self._model.named_parameters()}
        self._optimizer = _adamw(recipe, self._parameters)

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self._device

    # -- training ---------------------------------------------------------------------------------------------------

    def train_step(
        self, step: int, samples: Sequence[TrainSample], before_update: Callable[[], None] = do_nothing
    ) -> StepMetrics:
        """Make one optimizer step on all of ``samples`` (collective); see ``TrainerBackend.train_step``."""
        began = time.monotonic()
        rate = learning_rate(step, self._recipe.steps, self._recipe.trainer.optimizer)
        loss_tokens = sum(sample.num_loss_tokens for sample in samples)
        microbatches = self._plan(samples)[self._rank]
        sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self._device)
        maxima = torch.zeros(len(MAXIMUM_NAMES), dtype=torch.float64, device=self._device)
        for microbatch in microbatches:
            part_sums, part_maxima = self._accumulate(microbatch, loss_tokens)
            sums, maxima = sums + part_sums, torch.maximum(maxima, part_maxima)
        grad_norm = self._clip_gradients(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(sums)
        slowest = torch.cat([maxima, maxima.new_tensor([time.monotonic() - began])])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        mean = dict(zip(SUM_NAMES, (sums / max(1, loss_tokens)).tolist(), strict=True))
        ratio_max, difference_max, seconds = slowest.tolist()
        return StepMetrics(
            step=step,
            loss=mean["loss"],
            grad_norm=grad_norm,
            learning_rate=rate,
            kl=None if self._reference is None else mean["kl"],
            entropy=mean["entropy"],
            clip_share=mean["clipped"],
            ratio_mean=mean["ratio"],
            ratio_max=ratio_max,
            logprob_difference_mean=mean["logprob_difference"],
            logprob_difference_max=difference_max,
            samples=len(samples),
            tokens=sum(sample.num_tokens for sample in samples),
            loss_tokens=loss_tokens,
            microbatches=len(microbatches),
            seconds=seconds,
        )

    def _plan(self, samples: Sequence[TrainSample]) -> tuple[tuple[Microbatch, ...], ...]:
        return plan_microbatches(samples, self._ranks, self._recipe.trainer.max_tokens_per_microbatch)

    def _accumulate(self, microbatch: Microbatch, loss_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one microbatch's gradients; returns its sums and maxima."""
        tensors = to_tensors(microbatch, self._device)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = pick(_logprobs(self._reference, tensors), tensors.targets)
        part = grpo_loss(
            self._recipe.algorithm,
            loss_tokens,
            _logprobs(self._model, tensors),
            tensors.targets,
            tensors.rollout_logprobs,
            tensors.advantages,
            reference,
        )
        part.loss.backward()  # type: ignore[no-untyped-call]
        return part.sums, part.maxima

    @torch.no_grad()
    def _clip_gradients(self, step: int) -> float:
        """Scale gradients to the recipe's largest norm; returns the norm before. Sums in a fixed order, in float64."""
        gradients = [cast(DTensor, p.grad).to_local() for p in self._parameters.values() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        dist.all_reduce(squares)
        norm = math.sqrt(squares.item()) if math.isfinite(squares.item()) else math.nan
        if math.isnan(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise RunFailedError(
                f"step {step}: the gradient is not finite; the step was not made",
                mend="lower trainer.optimizer.learning_rate, or look at the step's samples with `milesbatch traj show`",
            )
        limit = self._recipe.trainer.optimizer.grad_clip
        if norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        return norm

    # -- looking at the policy --------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """Logprobs of each sample under the current weights (collective); see ``TrainerBackend.logprobs``."""
        mine: dict[tuple[int, int], list[float]] = {}
        for microbatch in self._plan(samples)[self._rank]:
            tensors = to_tensors(microbatch, self._device)
            flat = pick(_logprobs(self._model, tensors), tensors.targets).tolist()
            for sample in microbatch.samples:
                mine[sample.key] = flat[: sample.num_loss_tokens]
                flat = flat[sample.num_loss_tokens :]
        gathered: list[dict[tuple[int, int], list[float]]] = [{} for _ in range(self._ranks)]
        dist.all_gather_object(gathered, mine)
        found = {key: values for share in gathered for key, values in share.items()}
        results = []
        for sample in samples:
            result = torch.zeros(sample.num_tokens, dtype=torch.float32)
            result[torch.tensor(sample.loss_mask)] = torch.tensor(found[sample.key], dtype=torch.float32)
            results.append(result)
        return results

    @torch.no_grad()
    def named_weights(
        self, dtype: torch.dtype, owners: Mapping[str, int] | None = None, *, on_device: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters in a fixed order (collective); see ``TrainerBackend.named_weights``."""
        place = self._device if on_device else torch.device("cpu")
        for name, parameter in self._parameters.items():
            if owners is not None and self._ranks > 1:
                whole = _gathered(parameter, dtype, owners[name], self._rank, self._ranks)
                if whole is not None:
                    yield name, whole.to(place)
                continue
            # A copy even when nothing had to be gathered: the caller may keep it while the next step trains.
            yield name, parameter.full_tensor().detach().to(place, dtype, copy=True).contiguous()
        if place.type == "cuda":
            torch.cuda.current_stream(place).synchronize()

    def weight_sizes(self) -> dict[str, int]:
        """Elements of each parameter that ``named_weights`` gives; the same on all ranks."""
        return {name: parameter.numel() for name, parameter in self._parameters.items()}

    def tied_names(self) -> dict[str, str]:
        """Names left out by ``named_weights`` -> the name that holds the same parameter."""
        return dict(self._tied)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Live state, flat: ``model/NAME``, ``optimizer/NAME/…`` and ``random/RANK/…`` of this rank only."""
        state: dict[str, Any] = self._tensors()
        for key, value in random_state(self._device).items():
            state[f"random/{self._rank}/{key}"] = value
        return state

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"model/{name}"] = parameter.detach()
            for moment in _MOMENTS:
                tensors[f"optimizer/{name}/{moment}"] = self._optimizer.state[parameter][moment]
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave, after a checkpoint was loaded into it."""
        expected, found = set(self.state_dict()), set(state)
        if expected != found:
            raise CorruptArtefactError(
                f"the trainer's state does not fit: missing {sorted(expected - found)[:3]}, "
                f"unknown {sorted(found - expected)[:3]}",
                mend="the checkpoint is of another model or number of ranks; use the checkpoint before",
            )
        for key, tensor in self._tensors().items():
            tensor.copy_(state[key])
        prefix = f"random/{self._rank}/"
        mine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        restore_random_state(mine, self._device)


def _gathered(parameter: DTensor, dtype: torch.dtype, owner: int, rank: int, ranks: int) -> torch.Tensor | None:
    """A parameter whole, as ``dtype``, at the rank that owns it (collective); None at the others.

    Shards lie one behind the other along the first dimension, all of the same height but for the last ones: received side by
    side in one block they are the parameter, and what is beyond its height is cut off. Only a shard is ever held besides.
    """
    assert len(parameter.placements) == 1 and parameter.placements[0].is_shard(0), f"sharded {parameter.placements}"
    local, height = parameter.to_local().detach().to(dtype), -(-parameter.shape[0] // ranks)
    mine = local.new_zeros((height, *local.shape[1:])) if len(local) < height else local.contiguous()
    if mine is not local:
        mine[: len(local)] = local
    if rank != owner:
        dist.gather(mine, dst=owner)
        return None
    block = local.new_empty((ranks * height, *local.shape[1:]))
    dist.gather(mine, list(block.chunk(ranks)), dst=owner)
    return block[: parameter.shape[0]]


def _check_model(model: PreTrainedModel) -> None:
    config, kind = model.config, type(model).__name__
    mend = "use a decoder-only model with full attention in every layer (Qwen2, Qwen3, Llama, SmolLM2, …)"
    wrong = sorted({str(p.dtype) for p in model.parameters()} - {"torch.float32"})
    if wrong:
        raise ModelError(f"{kind}: parameters are {', '.join(wrong)}", mend="load the model with dtype=torch.float32")
    # Packing rests on the attention mask alone; layers that look elsewhere would mix samples without an error.
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layer_types or window:
        raise ModelError(f"{kind}: layers {sorted(layer_types)}, sliding window {window}: cannot be packed", mend=mend)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{kind}: its forward has no `logits_to_keep`", mend=mend)
    if not _layers(model):
        raise ModelError(f"{kind}: names no decoder layers to shard (`_no_split_modules`)", mend=mend)


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _prepare(model: PreTrainedModel, *, checkpointing: bool) -> None:
    """Set attention and memory options; remove dropout, which would make the trainer's logprobs differ from the rollout's."""
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.train()
    if checkpointing:
        # The second is the older name of the same method.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def _tied_names(model: torch.nn.Module) -> dict[str, str]:
    stored: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = stored.setdefault(id(parameter), name)
        if first != name:
            tied[name] = first
    return tied


def _shard(model: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> torch.nn.Module:
    """Shard each decoder layer, then the rest; gradients are summed over ranks, in float32."""
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*_layers(model), model):
        # Resharding the root too means that parameters are whole only inside a forward or backward pass: whatever reads
        # or loads them between two calls meets the shards, never a stale whole copy.
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(sharded, FSDPModule)
        # FSDP2 averages over ranks by default. The loss is already divided by the tokens of all ranks, so the sum is
        # wanted; plain sums are also the one reduction that gloo and NCCL share.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    return model


def _adamw(recipe: Recipe, parameters: Mapping[str, DTensor]) -> torch.optim.AdamW:
    """AdamW with its state already there, so that a first checkpoint or a load needs no pretended step.

    Norms and biases (one-dimensional) are not decayed.
    """
    options = recipe.trainer.optimizer
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.epsilon,
        foreach=False,
        fused=False,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _logprobs(model: torch.nn.Module, tensors: PackedTensors) -> torch.Tensor:
    """Log-probabilities [N, V] in float32 at the positions that predict the loss tokens."""
    output = model(
        input_ids=tensors.input_ids,
        attention_mask=tensors.attention_mask,
        position_ids=tensors.position_ids,
        logits_to_keep=tensors.columns,
        use_cache=False,
    )
    return log_softmax(output.logits[tensors.predict_row, tensors.predict_column], tensors.temperatures)
