"""What is to be run where: recipe, site and directory, as a batch job finds them again. Files under ``RUN/jobs``.

Owns: the resolved copies of recipe and site that a job reads, so that nothing in it depends on a login node's home directory
or on a file that is edited while the job waits in the queue. Never: whether to submit. Invariant: a copy's name carries the
digest of its text, so that a job that is started again reads what it was submitted with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from milesbatch.errors import UsageError
from milesbatch.recipe.load import dump_model, dump_recipe, load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.site import Site, load_site
from milesbatch.records import digest_bytes
from milesbatch.store.durable import read_optional, replace_hint
from milesbatch.store.layout import RunLayout
from milesbatch.store.places import true_path


@dataclass(frozen=True, slots=True)
class Order:
    """A run to be submitted, or the run of the job that this process is in."""

    layout: RunLayout
    recipe: Recipe
    site: Site
    recipe_file: Path
    site_file: Path
    directory: Path
    """Where its jobs run: relative paths in a recipe, and a user's own modules, are looked for there."""

    def command(self, module: str, options: Mapping[str, str]) -> tuple[str, ...]:
        """What the batch script ends in: a Python process that finds this order again."""
        said = [word for name, value in options.items() if value for word in (f"--{name}", value)]
        files = ("--recipe", str(self.recipe_file), "--site", str(self.site_file))
        return (self.site.interpreter, "-u", "-m", f"milesbatch.jobs.{module}", str(self.layout.root), *files, *said)


def place_order(layout: RunLayout, recipe: Recipe, site: Site, directory: Path | None = None) -> Order:
    """An order under the absolute path of the run directory; writes nothing yet.

    ``directory`` is where its jobs are to run; not given: the current directory.

    Raises:
        UsageError: the current directory was removed. InputError: symbolic links to the run directory lead in a circle.
    """
    directory = directory or _here()
    layout = RunLayout(true_path(layout.root))
    site = site.model_copy(update={"python": site.interpreter})
    recipe_file = layout.jobs / f"recipe-{_tag(dump_recipe(recipe))}.yaml"
    site_file = layout.jobs / f"site-{_tag(dump_model(site))}.yaml"
    return Order(layout, recipe, site, recipe_file, site_file, directory)


def write_order(order: Order) -> None:
    """Put the copies where the job looks for them; writing them again changes nothing.

    Raises:
        StorageError: they cannot be written.
    """
    replace_hint(order.recipe_file, dump_recipe(order.recipe).encode())
    replace_hint(order.site_file, dump_model(order.site).encode())
    replace_hint(_directory_file(order.layout), str(order.directory).encode())


def read_order(run_directory: Path, recipe_file: Path, site_file: Path) -> Order:
    """The order of the job that this process is in.

    Raises:
        InputError: a copy is not there, or was changed by hand into something that is not allowed.
    """
    recipe, site = load_recipe(recipe_file), load_site(str(site_file), ())
    return Order(RunLayout(run_directory), recipe, site, recipe_file, site_file, _here())


def last_order(layout: RunLayout) -> Order | None:
    """How a run was submitted last; None when it never was.

    Raises:
        InputError: a copy was changed by hand into something that is not allowed.
    """
    recipe_file, site_file = _newest(layout.jobs, "recipe-*.yaml"), _newest(layout.jobs, "site-*.yaml")
    if recipe_file is None or site_file is None:
        return None
    said = read_optional(_directory_file(layout))
    recipe, site = load_recipe(recipe_file), load_site(str(site_file), ())
    return place_order(layout, recipe, site, Path(said.decode()) if said else None)


def was_submitted(layout: RunLayout) -> bool:
    """Was the run ever given to Slurm? Its first job may still wait, and nothing else of the run exist."""
    return _newest(layout.jobs, "recipe-*.yaml") is not None


def submitted_recipe(layout: RunLayout) -> Recipe | None:
    """The recipe that the run was submitted with last; None when it never was.

    Raises:
        InputError: the copy was changed by hand into something that is not allowed.
    """
    recipe_file = _newest(layout.jobs, "recipe-*.yaml")
    return None if recipe_file is None else load_recipe(recipe_file)


def _newest(directory: Path, pattern: str) -> Path | None:
    found = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _directory_file(layout: RunLayout) -> Path:
    return layout.jobs / "working-directory"


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the current directory was removed", mend="change to one that exists") from error


def _tag(text: str) -> str:
    return digest_bytes(text.encode()).removeprefix("xxh128:")[:12]
