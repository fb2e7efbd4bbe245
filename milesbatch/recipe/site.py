"""A *site* file: what belongs to a cluster and not to a recipe. Imports without torch.

Owns: fields, and finding and loading a site by name. Never: recipes, or a command to Slurm. Invariant: a site is checked as
strictly as a recipe; an unknown key is an error. The page behind it is ``docs/sites.md``.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from milesbatch.errors import RecipeError, SiteError
from milesbatch.recipe.inputs import Section
from milesbatch.recipe.layers import read_layers
from milesbatch.recipe.problems import problems_text
from milesbatch.recipe.slurm import Container, Placement, Text

Line = Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SitePlacement(Placement):
    """The cluster's own defaults for a group of nodes."""

    memory_gib: int | None = Field(None, ge=1, description="Memory of each node in GiB; not set: Slurm's default.")


class Site(Section):
    """One cluster."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the site.")
    description: str = Field("", description="What it is, and where that is documented.")
    trainer: SitePlacement = Field(SitePlacement(), description="Where trainer nodes come from.")
    rollout: SitePlacement = Field(SitePlacement(), description="Where rollout nodes come from.")
    shapes: tuple[Literal["het", "single", "separate"], ...] = Field(
        ("het", "single", "separate"),
        min_length=1,
        description="Shapes of jobs that the site can run. A recipe that asks for another is refused before it is queued.",
    )
    gpu_option: str = Field(
        "--gres=gpu:{count}",
        pattern=r"^--[a-z-]+=[^\s{}]*\{count\}[^\s{}]*$",
        description="How GPUs of a node are asked for; `{count}` is filled in (`--gpus-per-node=h100:{count}`).",
    )
    cpu_only_option: str | None = Field(
        None, pattern=r"^--[a-z-]+(=[^\s]*)?$", description="An option for groups without GPUs, where a site needs one."
    )
    max_time_minutes: int | None = Field(None, ge=1, description="Longest time limit; a longer one is refused.")
    setup: tuple[Line, ...] = Field(
        (),
        description="Shell lines before anything runs: `module load …`, `source …/activate`. They must not print secrets.",
    )
    environment: dict[Name, Line] = Field(
        {},
        description="Variables for all processes, taken as they are (`export X=$HOME/y` belongs in `setup`). No secrets: the"
        " script is readable.",
    )
    python: Text | None = Field(
        None,
        description="The interpreter on the compute nodes that has milesbatch (and, without a container, torch); not set: the"
        " one that `milesbatch submit` runs with. The controller always runs with it, outside of any container.",
    )
    container: Container | None = Field(
        None, description="Container for the processes of both roles, where neither says its own; not set: none."
    )
    runs_directory: Text | None = Field(
        None,
        description="Where runs live by default: a shared, writable filesystem. `~` and variables (`$SCRATCH/runs`) are those"
        " of whoever submits.",
    )
    offline_nodes: bool = Field(
        False,
        description="Whether compute nodes cannot reach other networks. Then a recipe that names a model or prompts at a URL"
        " is refused before it is queued.",
    )
    warning_s: int = Field(
        120,
        ge=0,
        le=65535,
        description="Seconds before the time limit (or, where the site says so, a preemption) at which Slurm warns the"
        " controller. Shorter than a save takes, the last checkpoint is the periodic one.",
    )
    srun_options: tuple[Text, ...] = Field((), description="More options for every srun (`--mpi=none`).")
    template: Text | None = Field(
        None,
        description="A batch script of your own, a path relative to the site file; lines `{directives}`, `{setup}` and"
        " `{command}` are filled in. What follows `{command}` never runs: the process takes the shell's place.",
    )

    @property
    def interpreter(self) -> str:
        """The Python of processes outside of a container."""
        return self.python or sys.executable


def load_site(name_or_path: str, directories: Sequence[Path]) -> Site:
    """The site file at a path, or the one called ``NAME.yaml`` in the first of ``directories`` that has it.

    Like a recipe it may ``extends`` another. A ``template`` becomes an absolute path.

    Raises:
        SiteError: there is none, or something in it is not allowed; names file, field, value and what is allowed.
    """
    path = _find(name_or_path, directories)
    try:
        document = read_layers(path, "site")
        site = Site.model_validate_json(json.dumps(document.value), strict=True)
    except ValidationError as error:
        what = problems_text(error, Site, str(path), document.origins)
        raise SiteError(what, mend="correct these fields; docs/sites.md describes every one") from error
    except RecipeError as error:
        raise SiteError(error.what, mend=error.mend) from error
    except UnicodeEncodeError as error:
        raise SiteError(f"{path}: holds text that is not Unicode ({error.reason})") from error
    if site.template is None:
        return site
    return site.model_copy(update={"template": str(path.absolute().parent / site.template)})


def _find(name_or_path: str, directories: Sequence[Path]) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or "/" in name_or_path:
        if path.is_file():
            return path
        what = "is a directory" if path.is_dir() else "does not exist"
        raise SiteError(f"the site file {path} {what}", mend="give the path of a file, or the name of a known site")
    known = {file.stem: file for directory in reversed(directories) for file in sorted(directory.glob("*.yaml"))}
    if name_or_path in known:
        return known[name_or_path]
    near = difflib.get_close_matches(name_or_path, list(known), n=3) or sorted(known)
    raise SiteError(
        f"there is no site {name_or_path}; known: {', '.join(near) or 'none'}",
        mend=f"write {directories[0] / (name_or_path + '.yaml')}, or give --site with one of these (or a path)",
    )
