"""Site files: finding, loading, and the sentence that each mistake gets; and the sites that are shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from milesbatch.cluster.job_plan import plan_jobs
from milesbatch.errors import EXIT_USAGE, SiteError
from milesbatch.recipe.load import dump_model
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.shipped import shipped_sites
from milesbatch.recipe.site import Site, load_site
from milesbatch.recipe.slurm import OWN_OPTIONS

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path.stem for path in shipped_sites().glob("*.yaml"))


def write(directory: Path, text: str, name: str = "here.yaml") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def problem(path: Path | str, *directories: Path) -> str:
    with pytest.raises(SiteError) as caught:
        load_site(str(path), directories)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


# -- finding ----------------------------------------------------------------------------------------------------------


def test_the_first_directory_that_has_a_name_wins(tmp_path: Path) -> None:
    write(tmp_path / "mine", "name: mine\n", "a.yaml")
    write(tmp_path / "shipped", "name: shipped\n", "a.yaml")
    write(tmp_path / "shipped", "name: other\n", "b.yaml")
    directories = (tmp_path / "mine", tmp_path / "shipped")
    assert load_site("a", directories).name == "mine"
    assert load_site("b", directories).name == "other"


@pytest.mark.parametrize("text", ["{directory}/a.yaml", "a.yml"])
def test_a_path_is_taken_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    write(tmp_path, "name: mine\n", "a.yaml")
    write(tmp_path, "name: mine\n", "a.yml")
    monkeypatch.chdir(tmp_path)
    assert load_site(text.format(directory=tmp_path), ()).name == "mine"


def test_an_unknown_name_gets_the_nearest_and_a_place_for_a_new_one(tmp_path: Path) -> None:
    write(tmp_path / "mine", "name: lumi\n", "lumi.yaml")
    said = problem("lumii", tmp_path / "mine", tmp_path / "none")
    assert "there is no site lumii; known: lumi" in said
    assert str(tmp_path / "mine" / "lumii.yaml") in said
    assert "known: none" in problem("lumi", tmp_path / "none")


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    assert "x.yaml does not exist" in problem(tmp_path / "x.yaml")
    (tmp_path / "d.yaml").mkdir()
    assert "d.yaml is a directory" in problem(tmp_path / "d.yaml")


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_small_site_gets_every_default(tmp_path: Path) -> None:
    site = load_site(str(write(tmp_path, "name: here\n")), ())
    assert site == Site(name="here")
    assert site.shapes == ("het", "single", "separate")
    assert site.interpreter == sys.executable
    assert site.model_copy(update={"python": "/x/python"}).interpreter == "/x/python"


def test_a_site_extends_another(tmp_path: Path) -> None:
    write(tmp_path, "name: base\ntrainer: {account: a, partition: p}\nsetup: [one]\n", "base.yaml")
    child = write(tmp_path / "d", "extends: ../base.yaml\nname: mine\ntrainer: {account: b}\n")
    site = load_site(str(child), ())
    assert (site.name, site.trainer.account, site.trainer.partition, site.setup) == ("mine", "b", "p", ("one",))


def test_a_template_lies_beside_the_site_whatever_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d", "name: here\ntemplate: batch.sh\n")
    monkeypatch.chdir(tmp_path)
    assert load_site("d/here.yaml", ()).template == str(tmp_path / "d" / "batch.sh")


def test_a_dumped_site_loads_as_an_equal_one(tmp_path: Path) -> None:
    site = Site.model_validate(
        {
            "name": "1e5",
            "setup": ["module load 'x' # \N{GRINNING FACE}", "echo \x7f\x1b", ""],
            "environment": {"A": "yes", "B": "0123", "C": "{x}: #"},
            "container": {"runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:24.06-py3"},
        }
    )
    assert load_site(str(write(tmp_path, dump_model(site))), ()) == site


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nmae: here\n", ['line 1): unknown key with value "here"; did you mean `name`?', "name: missing"]),
        ("name: here\nruns_dir: /x\n", ["runs_dir (", "did you mean `runs_directory`?"]),
        ("name: here\ntrainer: {acount: a}\n", ["trainer.acount (", "did you mean `trainer.account`?"]),
        ("name: here\npartition: p\n", ["partition (", "did you mean `trainer.partition` or `rollout.partition`?"]),
        ("name: here\nshapes: [het, both]\n", ["shapes.1", 'found "both"; allowed: list of one of `het`, `single`']),
        ("name: here\nshapes: []\n", ["found []; allowed: list of one of", "length at least 1"]),
        ("name: here\nwarning_s: '60'\n", ['found "60"; allowed: integer, at least 0', "(without quotes)"]),
        ("name: here\nwarning_s: 65536\n", ["found 65536; allowed: integer, at least 0, at most 65535"]),
        ("name: here\ngpu_option: --gres=gpu:4\n", ["gpu_option", "must match", "{count"]),
        ("name: here\ngpu_option: '--gres=gpu:{type}:{count}'\n", ["gpu_option", "must match"]),
        ("name: here\nenvironment: {A B: x}\n", ["environment.A B", "must match"]),
        ("name: here\nenvironment: {A: 1}\n", ["environment.A", "found 1", "(put it in quotes to make it text)"]),
        ('name: here\nsetup: ["a\\nb"]\n', ["setup.0", 'found "a\\nb"', "one line"]),
        ("name: here\ncontainer: {image: x}\n", ["container.runtime", "missing; expected one of `apptainer`"]),
        (
            "name: here\ncontainer: {runtime: docker, image: x}\n",
            ["container.runtime", 'found "docker"; allowed: one of'],
        ),
        ("name: here\ntrainer: {exclude: 'n1 n2'}\n", ["trainer.exclude", "without blanks"]),
        ("name: here\ntrainer: {directives: [-C h100]}\n", ["trainer.directives.0", "`--option` or `--option=value`"]),
        ("name: here\nname: there\n", ["the key `name` appears twice"]),
        ("name: [\n", ["not readable as YAML"]),
        ("", ["the site ", "is empty", "begin with `name`"]),
        ("- name\n", ["the site ", "is a list, not a mapping"]),
        ("extends: nowhere.yaml\nname: x\n", ["which does not exist"]),
        ("extends: here.yaml\nname: x\n", ["sites extend each other in a circle"]),
    ],
)
def test_a_mistake_names_file_field_value_and_what_is_allowed(tmp_path: Path, text: str, says: list[str]) -> None:
    said = problem(write(tmp_path, text))
    assert str(tmp_path / "here.yaml") in said
    for part in says:
        assert part in said, said


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    said = problem(write(tmp_path, "name: here\nshapez: [het]\nwarning_s: -1\n"))
    assert "2 problems" in said and "shapez" in said and "warning_s" in said
    assert "docs/sites.md describes every one" in said


@pytest.mark.parametrize("option", OWN_OPTIONS)
def test_options_that_are_our_own_cannot_be_directives(tmp_path: Path, option: str) -> None:
    said = problem(write(tmp_path, f"name: here\nrollout: {{directives: [--nice=1, '--{option}=x']}}\n"))
    assert "rollout.directives" in said
    assert f"--{option} is set by milesbatch: {OWN_OPTIONS[option]}" in said


# -- the shipped ones -------------------------------------------------------------------------------------------------


def test_the_shipped_sites_cover_what_sites_differ_in() -> None:
    sites = [load_site(name, (shipped_sites(),)) for name in SHIPPED]
    assert SHIPPED == ["devcluster", "jean-zay", "kempner", "lrz-ai", "lumi"]
    assert [site.name for site in sites] == SHIPPED
    assert {site.gpu_option for site in sites} == {"--gres=gpu:{count}", "--gpus-per-node={count}"}
    assert {site.container.runtime for site in sites if site.container} == {"singularity", "pyxis"}
    assert any("het" not in site.shapes for site in sites)
    assert any(site.offline_nodes for site in sites)
    assert any(site.setup for site in sites)
    assert any(site.trainer.partition != site.rollout.partition for site in sites)
    assert sum(site.max_time_minutes is not None for site in sites) == 3


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "devcluster"])
def test_an_example_says_where_it_is_from_and_that_it_was_not_run(name: str) -> None:
    text = (shipped_sites() / f"{name}.yaml").read_text()
    opening = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "Written from the documentation, not run there." in opening
    assert "http" in opening and "Before the first run:" in opening


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shape_that_a_shipped_site_allows_can_be_planned(name: str) -> None:
    site = load_site(name, (shipped_sites(),))
    values: dict[str, Any] = {"name": "tiny", "steps": 1, "model": {"kind": "made"}, "data": {"kind": "arithmetic"}}
    for shape in site.shapes:
        assert plan_jobs(Recipe.model_validate({**values, "slurm": {"shape": shape}}), site).shape == shape


def test_the_page_of_sites_is_what_the_models_say_and_names_every_shipped_site() -> None:
    path = ROOT / "docs" / "sites.md"
    command = [sys.executable, "-m", "milesbatch.recipe.document", "--check", str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    text = path.read_text()
    assert not [name for name in SHIPPED if f"`{name}`" not in text]
    assert not [name for name in Site.model_fields if f"| `{name}` |" not in text]
