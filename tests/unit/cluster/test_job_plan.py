"""What a recipe and a site ask for together, and what is refused before anything is queued."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from milesbatch.cluster.job_plan import JobPlan, plan_jobs
from milesbatch.errors import EXIT_USAGE, SiteError
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.site import Site

APPTAINER = {"runtime": "apptainer", "image": "site.sif"}
PYXIS = {"runtime": "pyxis", "image": "rollout.sqsh"}


def recipe(slurm: dict[str, Any], **sections: Any) -> Recipe:
    values = {"name": "tiny", "steps": 4, "model": {"kind": "made"}, "data": {"kind": "arithmetic"}}
    groups = {"trainer": {"ranks": 4, "threads": 3, "groups_per_step": 4}, "rollout": {"workers": 6}}
    return Recipe.model_validate({**values, **groups, "slurm": slurm, **sections})


def plan(slurm: dict[str, Any] | None = None, site: dict[str, Any] | None = None, **sections: Any) -> JobPlan:
    return plan_jobs(recipe(slurm or {}, **sections), Site.model_validate({"name": "here", **(site or {})}))


def refused(slurm: dict[str, Any] | None = None, site: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises(SiteError) as caught:
        plan(slurm, site, **sections)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


# -- groups -----------------------------------------------------------------------------------------------------------


def test_processes_are_spread_evenly_and_bring_their_threads_and_gpus() -> None:
    found = plan({"trainer": {"nodes": 2, "gpus_per_task": 2}, "rollout": {"nodes": 3, "cpus_per_task": 5}})
    trainer, rollout = found.trainer, found.rollout
    assert (trainer.nodes, trainer.tasks_per_node, trainer.cpus_per_task) == (2, 2, 3)
    assert (trainer.gpus_per_node, trainer.gpus_per_task) == (4, 2)
    assert (rollout.nodes, rollout.tasks_per_node, rollout.cpus_per_task, rollout.gpus_per_node) == (3, 2, 5, 0)
    assert found.whole is None


def test_the_recipe_wins_over_the_site_field_by_field() -> None:
    site = {
        "trainer": {
            "partition": "gpu",
            "account": "site",
            "memory_gib": 10,
            "directives": ["--nice=1"],
            "exclude": "n9",
        },
        "rollout": {"memory_gib": 20},
    }
    found = plan({"trainer": {"account": "mine", "directives": ["--nice=2"]}, "rollout": {"memory_gib": 5}}, site)
    assert dict(found.trainer.places) == {"partition": "gpu", "account": "mine", "exclude": "n9"}
    assert found.trainer.directives == ("--nice=1", "--nice=2")
    assert (found.trainer.memory_gib, found.rollout.memory_gib) == (10, 5)


def test_rollout_takes_over_account_and_qos_and_nothing_else() -> None:
    places = {
        "account": "a",
        "qos": "q",
        "partition": "p",
        "constraint": "c",
        "reservation": "r",
        "exclude": "n1",
    }
    for shape in ("het", "separate"):
        found = plan({"shape": shape, "trainer": places})
        assert dict(found.rollout.places) == {"account": "a", "qos": "q"}, shape
    own = plan({"trainer": places, "rollout": {"account": "b", "qos": "s"}})
    assert dict(own.rollout.places) == {"account": "b", "qos": "s"}


def test_a_container_is_the_recipes_the_groups_or_the_sites_in_this_order() -> None:
    site = {"container": APPTAINER, "rollout": {"container": PYXIS}}
    found = plan({}, site)
    assert found.trainer.container is not None and found.trainer.container.image == "site.sif"
    assert found.rollout.container is not None and found.rollout.container.runtime == "pyxis"
    mine = plan({"rollout": {"container": {"runtime": "singularity", "image": "mine.sif"}}}, site)
    assert mine.rollout.container is not None and mine.rollout.container.image == "mine.sif"
    assert plan().trainer.container is None


def test_suspects_are_excluded_besides_those_that_are_anyway() -> None:
    found = plan({"trainer": {"exclude": "n[1-2]"}})
    without = found.without(("n5", "n6"))
    assert dict(without.trainer.places)["exclude"] == "n[1-2],n5,n6"
    assert dict(without.rollout.places)["exclude"] == "n5,n6"
    assert found.without(()) == found
    whole = plan({"shape": "single"}).without(("n5",)).whole
    assert whole is not None and dict(whole.places) == {"exclude": "n5"}


# -- one allocation ---------------------------------------------------------------------------------------------------


def test_one_allocation_has_the_nodes_of_both_each_as_large_as_the_larger() -> None:
    slurm = {
        "shape": "single",
        "trainer": {"nodes": 2, "gpus_per_task": 1, "memory_gib": 8, "exclude": "n1", "directives": ["--a=1", "--b"]},
        "rollout": {
            "nodes": 3,
            "gpus_per_task": 4,
            "memory_gib": 16,
            "exclude": "n2",
            "exclusive": True,
            "directives": ["--b"],
        },
    }
    whole = plan(slurm).whole
    assert whole is not None
    assert (whole.nodes, whole.tasks_per_node) == (5, 1)
    assert whole.cpus_per_task == 6, "two ranks of 3 threads, against two workers of 1"
    assert (whole.gpus_per_node, whole.memory_gib, whole.exclusive) == (8, 16, True)
    assert dict(whole.places) == {"exclude": "n1,n2"}
    assert whole.directives == ("--a=1", "--b")


def test_one_allocation_is_where_the_trainer_is_and_extra_rollout_jobs_where_rollout_is() -> None:
    site = {
        "trainer": {"partition": "safe", "memory_gib": 4, "directives": ["--t"]},
        "rollout": {"partition": "idle", "memory_gib": 99, "constraint": "x", "directives": ["--r"]},
    }
    found = plan({"shape": "single", "trainer": {"account": "a"}}, site)
    assert found.whole is not None
    assert dict(found.whole.places) == {"partition": "safe", "account": "a"}
    assert (found.whole.memory_gib, found.whole.directives) == (4, ("--t",))
    assert dict(found.rollout.places) == {"partition": "idle", "constraint": "x", "account": "a"}
    assert found.rollout.memory_gib == 99


def test_one_allocation_cannot_come_from_two_places() -> None:
    said = refused({"shape": "single", "rollout": {"partition": "idle"}}, {"trainer": {"partition": "safe"}})
    assert "slurm.rollout.partition is idle" in said and "(partition: safe)" in said
    assert "take slurm.rollout.partition out of the recipe" in said
    assert plan({"shape": "single", "trainer": {"qos": "q"}, "rollout": {"qos": "q"}}).whole is not None


# -- what a site cannot do --------------------------------------------------------------------------------------------


def test_a_shape_that_the_site_lacks_is_refused() -> None:
    said = refused({"shape": "het"}, {"shapes": ["single", "separate"]})
    assert "slurm.shape is het, which site here cannot run; it can: single, separate" in said
    assert "--set slurm.shape=single" in said
    assert plan({"shape": "separate"}, {"shapes": ["single", "separate"]})


def test_a_time_limit_beyond_the_sites_is_refused() -> None:
    said = refused({"time_limit_minutes": 1201}, {"max_time_minutes": 1200})
    assert "slurm.time_limit_minutes is 1201; site here allows 1200" in said
    assert plan({"time_limit_minutes": 1200}, {"max_time_minutes": 1200})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {"kind": "pretrained", "path": "s3://models/x"}}, "model.path is s3://models/x"),
        ({"data": {"kind": "file", "path": "https://host/p.jsonl"}}, "data.path is https://host/p.jsonl"),
    ],
)
def test_a_url_is_refused_where_nodes_are_offline(sections: dict[str, Any], says: str) -> None:
    said = refused({}, {"offline_nodes": True}, **sections)
    assert says in said and "offline_nodes" in said
    assert plan({}, {}, **sections)


@pytest.mark.parametrize("path", ["/shared/p.jsonl", "file:///shared/p.jsonl", "p.jsonl"])
def test_a_path_is_fine_where_nodes_are_offline(path: str) -> None:
    assert plan({}, {"offline_nodes": True}, data={"kind": "file", "path": path})


def test_slurm_would_hand_the_trainers_memory_on_in_a_heterogeneous_job() -> None:
    said = refused({"trainer": {"memory_gib": 500}})
    assert "500 GiB" in said and "--set slurm.rollout.memory_gib=N" in said
    assert plan({"trainer": {"memory_gib": 500}}, {"rollout": {"memory_gib": 20}}).rollout.memory_gib == 20
    assert plan({"shape": "separate", "trainer": {"memory_gib": 500}}).rollout.memory_gib is None
    assert plan({"rollout": {"memory_gib": 500}}).trainer.memory_gib is None


def test_processes_that_cannot_be_spread_evenly_are_refused_by_the_recipe() -> None:
    with pytest.raises(ValidationError, match=r"rollout.workers \(6\) must be a multiple of slurm.rollout.nodes \(4\)"):
        recipe({"rollout": {"nodes": 4}})
