"""Planned numbers against what a trainer and an engine's cache really take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from milesbatch.plan.memory import trainer_device, trainer_host, worker_device
from milesbatch.plan.model_size import model_size
from milesbatch.recipe.load import load_recipe

ROOT = Path(__file__).parents[3]
CHANGES = [
    "trainer.ranks=1",
    "model.hidden_size=512",
    "model.heads=8",
    "model.layers=6",
    "model.intermediate_size=1536",
]
FACTOR = 1.6
"""Measured over planned memory of a whole process, and the other way round: activations and libraries are estimates."""

PROGRAM = """
import json, resource, sys
from pathlib import Path
import torch
import torch.distributed as dist
from milesbatch.algorithm.samples import TrainSample
from milesbatch.backends.fsdp import FsdpBackend
from milesbatch.models.made import make_model
from milesbatch.recipe.load import load_recipe

recipe = load_recipe(Path("recipes/tiny.yaml"), sys.argv[1:])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
backend = FsdpBackend(recipe, make_model(recipe.model, 0), torch.device("cpu"))
sample = lambda i: TrainSample(i, 0, tuple([1] * 64), tuple([False] + [True] * 63), tuple([0.0] + [-3.0] * 63), 1.0, 1.0)
backend.train_step(1, [sample(i) for i in range(128)])
state = {key: value.numel() * 4 for key, value in backend.state_dict().items() if value.is_floating_point()}
share = sum(tensor.nbytes for _, tensor in backend.named_weights(torch.float32))
print(json.dumps({
    "weights": sum(size for key, size in state.items() if key.startswith("model/")),
    "optimizer": sum(size for key, size in state.items() if "/exp_avg" in key),
    "share": share,
    "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def test_a_trainer_takes_about_what_was_planned() -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", CHANGES)
    planned = trainer_device(recipe, model_size(recipe))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *CHANGES], check=True, capture_output=True, cwd=ROOT, text=True
    )
    found = json.loads(ran.stdout)
    assert planned["weights"] == planned["gradients"] == found["weights"]
    assert planned["optimizer"] == pytest.approx(found["optimizer"], rel=1e-6)
    assert trainer_host(recipe, model_size(recipe))["published weights"] == 2 * found["share"]
    total = sum(planned.values())
    assert total / FACTOR < found["process"] < total * FACTOR, (planned, found)


def test_a_key_value_cache_takes_what_was_planned() -> None:
    import torch

    from milesbatch.engines.kv_cache import SlotCache

    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", [])
    size = model_size(recipe)
    cache = SlotCache(
        layers=size.layers,
        rows=recipe.rollout.max_concurrent_samples,
        length=size.context,
        heads=size.kv_heads,
        head_dim=size.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    storages = {}
    for value in vars(cache).values():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(storages.values()) == worker_device(recipe, size)["key-value cache"]
