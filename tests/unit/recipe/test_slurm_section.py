"""The ``slurm`` section of a recipe: what is refused, and that it may change in a living run."""

from __future__ import annotations

from pathlib import Path

import pytest

from milesbatch.errors import RecipeError
from milesbatch.recipe.freeze import ABSENT, changed_keys, with_changes
from milesbatch.recipe.load import dump_recipe, load_recipe
from milesbatch.recipe.models import Recipe

BASE = "name: base\nsteps: 3\nmodel: {kind: made}\ndata: {kind: arithmetic}\n"
APPTAINER = "{runtime: apptainer, image: a.sif, options: [--nv]}"


def load(directory: Path, *overrides: str) -> Recipe:
    path = directory / "base.yaml"
    path.write_text(BASE)
    return load_recipe(path, overrides)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("slurm.shape=two", 'found "two"; allowed: one of `het`, `single`, `separate`'),
        ("slurm.trainer.nodes=0", "found 0; allowed: integer, at least 1"),
        ("slurm.trainer.gpus_per_task=-1", "found -1; allowed: integer, at least 0"),
        (
            "slurm.time_limit_minutes='1:00:00'",
            'found "1:00:00"; allowed: integer, at least 1, at most 525600 (without quotes)',
        ),
        ("slurm.rollout.exclusive=1", "found 1; allowed: true or false"),
        ("slurm.trainer.partition='a b'", 'found "a b"; allowed: text (without blanks'),
        ("slurm.trainer.gpus=4", "did you mean `slurm.trainer.gpus_per_task`?"),
        ("slurm.partition=gpu", "did you mean `slurm.trainer.partition` or `slurm.rollout.partition`?"),
        ("slurm.rollout.container={image: x}", "slurm.rollout.container.runtime"),
        ("slurm.rollout.directives=['--array=0-3']", "--array is set by milesbatch: `milesbatch scale` adds workers"),
        ("slurm.rollout.directives=['--time=5']", "--time is set by milesbatch: `slurm.time_limit_minutes`"),
        ("slurm.rollout.directives=['-C x']", "`--option` or `--option=value`, one line"),
        ("slurm.rollout.memory=4", "did you mean `slurm.rollout.memory_gib`?"),
        ("slurm.trainer.nodes=3", "trainer.ranks (2) must be a multiple of slurm.trainer.nodes (3)"),
    ],
)
def test_a_mistake_names_field_value_and_what_is_allowed(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, override)
    assert says in str(caught.value)


def test_all_of_it_survives_a_dump(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "slurm.shape=separate",
        f"slurm.rollout.container={APPTAINER}",
        "slurm.trainer.directives=['--mail-user=\"a b\"']",
    )
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), (f"slurm.trainer.container={APPTAINER}",)),
        ((f"slurm.trainer.container={APPTAINER}",), ()),
        ((f"slurm.trainer.container={APPTAINER}",), ("slurm.trainer.container={runtime: pyxis, image: a.sif}",)),
        (("slurm.shape=separate",), ("slurm.shape=het", "slurm.trainer.nodes=2", "slurm.rollout.qos=low")),
    ],
    ids=["a container", "no container", "another container", "another shape"],
)
def test_a_living_run_may_change_all_of_it(tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    frozen, new = load(tmp_path, *before), load(tmp_path, *after)
    changes = changed_keys(frozen, new)
    assert changes and all(change.may_change for change in changes)
    # As the controller records it: a field that is gone is null.
    recorded = {change.path: None if change.new is ABSENT else change.new for change in changes}
    assert with_changes(frozen, recorded) == new
