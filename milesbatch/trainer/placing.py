"""Where a trainer rank computes: on a GPU when the recipe asks for GPUs, else on the CPU.

Owns the choice, and the backends of the process group that follow from it. Never falls back by itself: a rank that computed
on the CPU where GPUs were asked for would be found out by its slowness alone.
"""

from __future__ import annotations

import torch

from milesbatch.errors import InputError
from milesbatch.recipe.models import Recipe


def rank_device(recipe: Recipe, rank: int) -> torch.device:
    """The device of ``rank``; a GPU becomes the process's current one.

    Slurm shows each task its own GPUs only. Where nobody does, the ranks of a host take those of the host in turn.

    Raises:
        InputError: GPUs are asked for, and this process sees none.
    """
    asked = recipe.slurm.trainer.gpus_per_task
    if not asked:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise InputError(
            f"slurm.trainer.gpus_per_task is {asked}, and rank {rank} sees no GPU (torch {torch.__version__})",
            mend="install a torch that is built for the GPUs and their driver, or compute on the CPU with"
            " --set slurm.trainer.gpus_per_task=0",
        )
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def group_backend(device: torch.device) -> str:
    """As ``torch.distributed.init_process_group`` takes it: what is on the CPU goes over gloo in either case."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
