"""``docs/recipe.md`` and ``docs/sites.md``, made from the models: ``python -m milesbatch.recipe.document [--check] PAGE...``.

Owns: the pages' form. Never: descriptions, types or limits (the models have them). Invariant: a page is a pure function of the
models, so that ``--check`` can compare it byte for byte.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from milesbatch.recipe.fields import kinds_of, limits_text, type_text
from milesbatch.recipe.freeze import MAY_CHANGE
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.site import Site
from milesbatch.recipe.slurm import OWN_OPTIONS

_OPENING = """\
# Recipe

<!-- Generated from milesbatch/recipe/models.py by `python -m milesbatch.recipe.document docs/recipe.md`. Do not edit. -->

A recipe is a YAML file that says what a run trains, on what, and how. Every field is checked before anything starts: an
unknown key, a wrong type or a value outside its limits is an error that names the field, the value, what is allowed, and
the line. `milesbatch recipes validate FILE` checks a recipe, `milesbatch recipes show FILE` prints it with every default
filled in.

The smallest recipe:

```yaml
name: adder
steps: 20
model: {kind: made}
data: {kind: arithmetic}
```

## Building on another recipe

- `extends: other.yaml` (relative to the file that says so) starts from another recipe. What this file says wins, key by
  key. A section whose `kind` changes is replaced whole, because the fields of the old kind mean nothing to the new one.
- `--set a.b=value` on the command line sets one field, after all files. The value is YAML: `--set steps=5`,
  `--set 'rollout.sampling.stop=["\\n"]'`, `--set model.system_prompt=null`. It replaces what was at its path.
- Numbers, `true`/`false` and `null` are written without quotes; text that looks like one of them needs quotes. `1e-4` is a
  number. A key that appears twice in a file is an error.

## What a run may change later

The resolved recipe is frozen in the run directory. When the same run is started again, these fields may differ:
{may_change}. `steps` may change only while `trainer.optimizer.schedule` is `constant`, since the length of the other
schedules shapes every step, those already recorded included. Any other difference needs a new run.
"""


_SITES = """\
# Sites

<!-- Generated from milesbatch/recipe/site.py by `python -m milesbatch.recipe.document docs/sites.md`. Do not edit. -->

A recipe says what is trained; a *site* says what a cluster is like: where nodes come from, how GPUs are asked for, what
must be loaded, in what container processes run. The same recipe then runs on several clusters:

    milesbatch submit recipes/tiny.yaml --site lumi --dry-run

`--site` takes a path or a name; `MILESBATCH_SITE` names the one that is used when none is given. A name is looked for in
`~/.config/milesbatch/sites/NAME.yaml` (`$XDG_CONFIG_HOME` is heeded) and then among those that are shipped in
`slurm/sites/`:

- `devcluster`: the development cluster of this repository, on which everything is tested;
- `jean-zay` (account, constraint and QoS; offline nodes; no heterogeneous jobs), `lumi` (`--gpus-per-node`, whole and
  shared nodes, Singularity), `kempner` (a safe and a preemptible partition), `lrz-ai` (Pyxis): worked examples of real
  clusters, written from their public documentation and **not run there**. Each says its sources and what to change.

Begin with a copy of the nearest one, or with a file of a few lines that `extends` it:

```yaml
extends: /path/to/slurm/sites/jean-zay.yaml
name: jean-zay
trainer: {account: mine@h100}
rollout: {account: mine@h100}
```

A recipe's own `slurm.trainer` and `slurm.rollout` win over the site, field by field; directives of both are used.

## What the shapes ask for

- `het`: one heterogeneous job, a component for each group. The site must allow heterogeneous jobs; they start through the
  backfill scheduler only.
- `single`: one allocation, of which the trainer has the first nodes. All nodes come from where the trainer's do, and each
  is as large as the larger of the two groups needs.
- `separate`: the trainer's job, and one for rollout that may come and go, so its partition may be preemptible.

In a heterogeneous job Slurm hands some options of the first component on to the second. So that every shape asks for the
same, rollout takes the trainer's account and QoS where nothing else is said, `exclude` and `reservation` of the trainer
are reset for rollout, and a trainer with `memory_gib` needs a rollout with it. Raw `directives` of the trainer such as
`--hint` or `--nice` reach rollout too.

## Containers

Only the processes of the roles run in a container; the controller, which starts them with `srun`, runs outside with
`python` and needs no torch. The run directory is mounted under its own path. Paths in the recipe must exist under the same
name inside: add `mounts`. The working directory is that in which `milesbatch submit` was called; Apptainer and Singularity
mount it by themselves where the site lets them, Pyxis needs `--container-workdir`.

## A batch script of your own

`template` names a script with lines for what milesbatch fills in:

```bash
#!/bin/bash
{directives}
#SBATCH --mail-type=END

ulimit -n 65536
{setup}
{command}
```

`{command}` replaces the shell (`exec`), so that Slurm's signals reach it. Directives must come before the first command.
These options are milesbatch's own, and neither a directive nor a template may set them: {own_options}.

## Shared filesystems

Runs belong on a filesystem that all nodes see and that keeps what it has acknowledged: `docs/storage.md`. `milesbatch submit`
expands `~` and variables of `runs_directory` when it is called.
"""


def page() -> str:
    """The page of recipes as Markdown."""
    allowed = ", ".join(f"`{name}*`" if name.endswith(".") else f"`{name}`" for name in MAY_CHANGE)
    return _page(Recipe, _OPENING.replace("{may_change}", allowed))


def sites_page() -> str:
    """The page of sites as Markdown."""
    return _page(Site, _SITES.replace("{own_options}", ", ".join(f"`--{name}`" for name in OWN_OPTIONS)))


PAGES: dict[str, Callable[[], str]] = {"recipe.md": page, "sites.md": sites_page}


def _page(root: type[BaseModel], opening: str) -> str:
    parts = [opening, "## Top level\n", _about(root), _table(root)]
    for name, field in root.model_fields.items():
        parts.extend(_section(name, field))
    return "\n".join(part for part in parts if part).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with ``--check`` compare them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m milesbatch.recipe.document", description="Write generated pages.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PAGE", help="docs/recipe.md, docs/sites.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when a file differs")
    options = parser.parse_args(arguments)
    unknown = [path for path in options.paths if path.name not in PAGES]
    if unknown:
        parser.error(f"{unknown[0]}: not a generated page; those are {', '.join(PAGES)}")
    codes = [_write(path, PAGES[path.name](), options.check) for path in options.paths]
    return max(codes)


def _write(path: Path, wanted: str, only_check: bool) -> int:
    if not only_check:
        path.write_text(wanted, encoding="utf-8")
        return 0
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == wanted:
        return 0
    lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(path), "models", lineterm="", n=1)
    print(f"{path} is not what the models say; write it again with", file=sys.stderr)
    print(f"  python -m milesbatch.recipe.document {path}", *lines, sep="\n", file=sys.stderr)
    return 1


def _section(path: str, field: FieldInfo, depth: int = 2) -> Iterator[str]:
    for kind, model in kinds_of(field.annotation).items():
        yield f"{'#' * depth} `{path}`{f', kind `{kind}`' if kind else ''}\n"
        yield _about(model)
        yield _table(model)
        for name, inner in model.model_fields.items():
            yield from _section(f"{path}.{name}", inner, depth + 1)


def _about(model: type[BaseModel]) -> str:
    text = " ".join((model.__doc__ or "").split())
    return f"{text}\n"


def _table(model: type[BaseModel]) -> str:
    rows = ["| field | type | default | limits | meaning |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default, meaning = _default(field), field.description or ""
        if name == "kind" and not meaning:
            default, meaning = "required", "Chooses this kind of section and with it the fields below."
        cells = (f"`{name}`", type_text(field.annotation), default, limits_text(field), meaning)
        rows.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join([*rows, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "as below"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


if __name__ == "__main__":
    sys.exit(main())
