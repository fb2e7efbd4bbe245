"""Batch scripts against golden files: ``python tests/unit/cluster/test_script.py --rewrite`` writes them anew."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milesbatch.cluster.job_plan import plan_jobs
from milesbatch.cluster.script import JobBody, rollout_script, run_script
from milesbatch.errors import SiteError, UsageError
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.shipped import shipped_sites
from milesbatch.recipe.site import Site, load_site

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/scratch/me/runs/tiny")
HERE = Path("/home/me/project")
COMMAND = ("/venv/bin/python", "-u", "-m", "milesbatch.jobs.control", str(RUN), "--cause", "by hand: `submit`")
PLAIN = {"name": "plain"}
TWO_GPU_GROUPS = {
    "trainer": {"nodes": 2, "gpus_per_task": 2, "memory_gib": 200, "exclusive": True},
    "rollout": {"nodes": 4, "gpus_per_task": 1, "cpus_per_task": 12, "memory_gib": 64},
}


def recipe(slurm: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "steps": 4,
            "model": {"kind": "made"},
            "data": {"kind": "arithmetic"},
            "trainer": {"ranks": 4, "threads": 2, "groups_per_step": 4},
            "rollout": {"workers": 8},
            "slurm": slurm or {},
            **sections,
        }
    )


def site(values: dict[str, Any] | str) -> Site:
    return load_site(values, (shipped_sites(),)) if isinstance(values, str) else Site.model_validate(values)


# Golden file -> recipe's slurm section, site, nodes that are suspects.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | str, tuple[str, ...]]] = {
    "het-cpu": ({}, "devcluster", ()),
    "single-cpu": ({"shape": "single"}, "devcluster", ()),
    "separate-cpu": ({"shape": "separate"}, "devcluster", ()),
    "het-gpu": (TWO_GPU_GROUPS, PLAIN, ()),
    "single-gpu": ({"shape": "single", **TWO_GPU_GROUPS}, PLAIN, ()),
    "separate-gpu": ({"shape": "separate", **TWO_GPU_GROUPS}, PLAIN, ()),
    "single-gpus-of-one-group": (
        {"shape": "single", "rollout": {"gpus_per_task": 1}},
        {"name": "plain", "gpu_option": "--gpus-per-node=h100:{count}"},
        (),
    ),
    "cpu-only-option": (
        {"rollout": {"gpus_per_task": 1, "nodes": 2}},
        {"name": "plain", "cpu_only_option": "--gres=none"},
        (),
    ),
    "places-of-each-group": (
        {
            "trainer": {
                "partition": "gpu,gpu2",
                "account": "abc@h100",
                "qos": "long",
                "constraint": "[rack1|rack2]",
                "reservation": "maintenance",
                "exclude": "n[1-3],n7",
            },
            "rollout": {"partition": "idle", "constraint": "a100&ib"},
        },
        {"name": "plain", "trainer": {"account": "unused"}, "rollout": {"memory_gib": 10}},
        (),
    ),
    "suspects-are-excluded": ({"trainer": {"exclude": "n9"}}, PLAIN, ("n2", "n4")),
    "directives": (
        {"rollout": {"directives": ["--switches=1@10:00", '--mail-user="a b"']}},
        {"name": "plain", "trainer": {"directives": ["--hint=nomultithread"]}},
        (),
    ),
    "requeue-off": ({"requeue": False, "time_limit_minutes": 2879}, {"name": "plain", "warning_s": 600}, ()),
    "setup": (
        {},
        {
            "name": "plain",
            "setup": ["module purge", 'source "$WORK/env/bin/activate"  # {command} stays'],
            "environment": {"B": "it's $HOME", "A": "1"},
        },
        (),
    ),
    "jean-zay": ({"shape": "single", "trainer": {"gpus_per_task": 1}, "rollout": {"nodes": 2}}, "jean-zay", ()),
    "lumi": ({"trainer": {"gpus_per_task": 2}, "rollout": {"gpus_per_task": 1}}, "lumi", ()),
    "kempner": ({"shape": "separate", "rollout": {"nodes": 2, "gpus_per_task": 1}}, "kempner", ("holygpu1",)),
    "lrz-ai": ({"trainer": {"gpus_per_task": 1}, "rollout": {"nodes": 2, "gpus_per_task": 1}}, "lrz-ai", ()),
}


def scripts(
    slurm: dict[str, Any], where: Site, suspects: tuple[str, ...] = (), run: Path = RUN, here: Path = HERE
) -> Iterator[tuple[str, str]]:
    """Role and text of the scripts that a shape needs, and always that of a rollout job that joins."""
    wanted = recipe(slurm)
    plan = plan_jobs(wanted, where).without(suspects)
    yield "run", run_script(plan, where, JobBody(run, here, COMMAND, "mark:run"), wanted.slurm.requeue).text
    yield "rollout", rollout_script(plan, where, JobBody(run, here, COMMAND, "mark:rollout")).text


def golden_files() -> dict[str, str]:
    found = {}
    for name, (slurm, values, suspects) in CASES.items():
        for role, text in scripts(slurm, site(values), suspects):
            found[f"{name}.{role}.sh"] = text
    return found


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_as_the_golden_files(name: str) -> None:
    slurm, values, suspects = CASES[name]
    for role, text in scripts(slurm, site(values), suspects):
        assert text == (GOLDEN / f"{name}.{role}.sh").read_text(), f"--rewrite if {name} may change"


def test_no_golden_file_is_left_over() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(golden_files())


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_golden_files_are_bash_and_end_in_exec(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and lines[-1].startswith("exec /venv/bin/python ")
    last_directive = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last_directive]), "sbatch stops at the first command"


# -- paths ------------------------------------------------------------------------------------------------------------


def read_directives(text: str) -> list[list[str]]:
    """What sbatch 22.05 takes from a script: a list for each component. Quotes, backslashes and ``#`` as it reads them."""
    components: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.startswith("#SBATCH"):
            continue
        argument, quote, escaped = "", "", False
        for character in line.removeprefix("#SBATCH").strip():
            if escaped:
                argument, escaped = argument + character, False
            elif character == "\\":
                escaped = True
            elif quote:
                quote, argument = ("", argument) if character == quote else (quote, argument + character)
            elif character in "\"'":
                quote = character
            elif character == "#" or character.isspace():
                break
            else:
                argument += character
        if argument == "hetjob":
            components.append([])
        else:
            components[-1].append(argument)
    return components


def log_path(directive: str) -> str:
    """The file of ``--output``, with the job id 7: ``%%`` is a percent sign."""
    pattern = directive.removeprefix("--output=")
    return re.sub(r"%(.)", lambda found: {"%": "%", "j": "7"}[found[1]], pattern)


ODD = st.text(
    st.characters(exclude_characters="\\/", exclude_categories=("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp", "Zs"))
    | st.just(" "),
    min_size=1,
)


@given(ODD, ODD)
def test_any_directory_reaches_slurm_and_the_shell_as_it_is(run: str, here: str) -> None:
    directory, working = Path("/r") / run, Path("/w") / here
    where = Site(name="plain")
    plan = plan_jobs(recipe(), where)
    command = ("python", str(directory))
    text = run_script(plan, where, JobBody(directory, working, command, "mark"), True).text
    first, second = read_directives(text)
    assert f"--chdir={working}" in first
    output = next(directive for directive in first if directive.startswith("--output="))
    assert log_path(output) == f"{directory}/logs/slurm-run-7.log"
    assert second[0] == "--nodes=1"


def test_the_shell_reads_back_an_odd_command() -> None:
    odd = '/r/it\'s "a" $HOME `id` %j #1'
    where = Site(name="plain")
    text = run_script(plan_jobs(recipe(), where), where, JobBody(RUN, HERE, ("printf", "%s", odd), "m"), True).text
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.stdout == odd


@pytest.mark.parametrize(
    ("run", "here", "container", "says"),
    [
        ("/a\nb", "/w", None, "it has '\\n' in it"),
        ("/a\\b", "/w", None, "it has '\\\\' in it"),
        ("/a", "/w\x1b", None, "it has '\\x1b' in it"),
        ("/a:b", "/w", {"runtime": "apptainer", "image": "i"}, "Slurm and the container: it has ':' in it"),
        ("/a,b", "/w", {"runtime": "pyxis", "image": "i"}, "it has ',' in it"),
        ("/a\udc80", "/w", None, "it has '\\udc80' in it"),
    ],
)
def test_directories_that_cannot_be_told_are_refused(run: str, here: str, container: Any, says: str) -> None:
    where = Site.model_validate({"name": "plain", "container": container})
    with pytest.raises(UsageError) as caught:
        list(scripts({}, where, run=Path(run), here=Path(here)))
    assert says in str(caught.value) and "plainer name" in str(caught.value)


def test_a_backslash_in_the_working_directory_is_fine() -> None:
    text = dict(scripts({}, Site(name="plain"), here=Path("/w\\x y")))["run"]
    assert "--chdir=/w\\x y" in read_directives(text)[0]


# -- a template -------------------------------------------------------------------------------------------------------


def with_template(directory: Path, text: str, **values: Any) -> Site:
    (directory / "batch.sh").write_text(text)
    return Site.model_validate({"name": "plain", "template": str(directory / "batch.sh"), **values})


def test_a_template_is_filled_in(tmp_path: Path) -> None:
    text = "#!/bin/bash -l\n# mine\n{directives}\n#SBATCH --mail-type=END\n\nulimit -n 65536\n{setup}\n{command}\n"
    where = with_template(tmp_path, text, setup=["echo {command} {directives}"])
    lines = dict(scripts({}, where))["run"].splitlines()
    assert lines[:3] == ["#!/bin/bash -l", "# mine", "#SBATCH --job-name=milesbatch-tiny"]
    assert (
        lines[lines.index("ulimit -n 65536") + 1 :]
        == [
            "echo {command} {directives}",  # what was filled in is not filled in again
            "trap '' USR1",
            "exec " + COMMAND[0] + " " + " ".join(COMMAND[1:-1]) + " 'by hand: `submit`'",
        ]
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/bash\n{directives}\n", "must have {command} exactly once"),
        ("#!/bin/bash\n{command}\n", "must have {directives} exactly once"),
        ("#!/bin/bash\n{directives}\n{command}\n{command}\n", "must have {command} exactly once"),
        ("{directives}\n{command}\n", "does not begin with `#!`"),
        ("#!/bin/bash\ncd /tmp\n{directives}\n{command}\n", "has a command before {directives}"),
        ("", "does not begin with `#!`"),
    ],
)
def test_a_template_that_cannot_work_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SiteError) as caught:
        list(scripts({}, with_template(tmp_path, text)))
    assert says in str(caught.value) and str(tmp_path / "batch.sh") in str(caught.value)


def test_a_template_without_a_place_for_the_setup_is_refused_only_when_there_is_one(tmp_path: Path) -> None:
    text = "#!/bin/bash\n{directives}\n{command}\n"
    assert dict(scripts({}, with_template(tmp_path, text)))
    with pytest.raises(SiteError, match=r"must have \{setup\} exactly once"):
        list(scripts({}, with_template(tmp_path, text, environment={"A": "1"})))


@pytest.mark.parametrize("make", ["missing", "directory", "bytes"])
def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, make: str) -> None:
    path = tmp_path / "batch.sh"
    if make == "directory":
        path.mkdir()
    if make == "bytes":
        path.write_bytes(b"#!/bin/bash\n\xff{directives}\n{command}\n")
    with pytest.raises(SiteError, match="cannot be read") as caught:
        list(scripts({}, Site(name="plain", template=str(path))))
    assert str(path) in str(caught.value)


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python tests/unit/cluster/test_script.py --rewrite")
    for old in GOLDEN.glob("*"):
        old.unlink()
    for file, content in golden_files().items():
        (GOLDEN / file).write_text(content)
