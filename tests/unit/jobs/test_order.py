"""What a job is given, as files under ``RUN/jobs``, and finding it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builders import make_recipe

from milesbatch.errors import InputError, RecipeError, SiteError, UsageError
from milesbatch.jobs.order import (
    Order,
    last_order,
    place_order,
    read_order,
    submitted_recipe,
    was_submitted,
    write_order,
)
from milesbatch.recipe.site import Site
from milesbatch.store.layout import RunLayout

SITE = Site.model_validate(
    {"name": "here", "python": "/venv/bin/python", "setup": ["echo 'a: b' # \N{GRINNING FACE}"], "container": None}
)


def written(root: Path, directory: Path | None = None, steps: int = 8, site: Site = SITE) -> Order:
    order = place_order(RunLayout(root), make_recipe(steps=steps), site, directory)
    order.layout.jobs.mkdir(parents=True, exist_ok=True)
    write_order(order)
    return order


def test_a_job_reads_what_it_was_submitted_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    order = written(tmp_path / "run")
    assert read_order(order.layout.root, order.recipe_file, order.site_file) == order
    assert last_order(order.layout) == order


def test_placing_an_order_writes_nothing(tmp_path: Path) -> None:
    place_order(RunLayout(tmp_path / "run"), make_recipe(), SITE)
    assert list(tmp_path.iterdir()) == []


def test_copies_go_by_their_content_so_that_a_queued_job_keeps_its_own(tmp_path: Path) -> None:
    first, second = written(tmp_path / "run", steps=8), written(tmp_path / "run", steps=9)
    again = written(tmp_path / "run", steps=8)
    assert first.recipe_file != second.recipe_file and first.site_file == second.site_file
    assert again == first
    assert read_order(first.layout.root, first.recipe_file, first.site_file).recipe.steps == 8
    assert sorted(path.name.split("-")[0] for path in first.layout.jobs.iterdir()) == [
        "recipe",
        "recipe",
        "site",
        "working",
    ]


def test_the_last_submission_is_the_last_one_written(tmp_path: Path) -> None:
    order = written(tmp_path / "run", tmp_path, steps=8)
    os.utime(order.recipe_file, (1, 1))
    written(tmp_path / "run", tmp_path / "elsewhere", steps=9)
    found = last_order(order.layout)
    assert found is not None and (found.recipe.steps, found.directory) == (9, tmp_path / "elsewhere")
    recipe = submitted_recipe(order.layout)
    assert recipe is not None and recipe.steps == 9


def test_jobs_run_where_the_first_submission_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resume` and `scale` may be called anywhere; a recipe's relative paths must not change their meaning by it."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    order = written(tmp_path / "run")
    monkeypatch.chdir("/")
    found = last_order(order.layout)
    assert found is not None and found.directory == tmp_path / "project"


def test_a_run_that_was_never_submitted_has_no_order(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    assert last_order(layout) is None and submitted_recipe(layout) is None and not was_submitted(layout)
    assert was_submitted(written(tmp_path / "run").layout)


def test_the_command_finds_the_order_again_and_leaves_out_what_is_empty(tmp_path: Path) -> None:
    order = place_order(RunLayout(tmp_path / "run"), make_recipe(), SITE)
    root = str(tmp_path / "run")
    files = ("--recipe", str(order.recipe_file), "--site", str(order.site_file))
    assert order.command("control", {"excluded": "n1,n2", "after": "", "cause": "a b"}) == (
        *("/venv/bin/python", "-u", "-m", "milesbatch.jobs.control", root, *files),
        *("--excluded", "n1,n2", "--cause", "a b"),
    )


def test_the_login_nodes_interpreter_is_written_down(tmp_path: Path) -> None:
    order = place_order(RunLayout(tmp_path / "run"), make_recipe(), Site(name="here"))
    assert order.site.python == Site(name="here").interpreter


def test_a_run_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert place_order(RunLayout(Path("link/run")), make_recipe(), SITE).layout.root == tmp_path / "real" / "run"


@pytest.mark.parametrize(("name", "error"), [("recipe_file", RecipeError), ("site_file", SiteError)])
def test_a_copy_that_was_spoilt_or_lost_is_named(tmp_path: Path, name: str, error: type[InputError]) -> None:
    order = written(tmp_path / "run")
    path: Path = getattr(order, name)
    path.write_text("name: [")
    with pytest.raises(error, match="not readable as YAML"):
        read_order(order.layout.root, order.recipe_file, order.site_file)
    path.unlink()
    with pytest.raises(error) as caught:
        read_order(order.layout.root, order.recipe_file, order.site_file)
    assert str(path) in str(caught.value)


def test_a_removed_current_directory_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="current directory was removed"):
        place_order(RunLayout(tmp_path / "run"), make_recipe(), SITE)
