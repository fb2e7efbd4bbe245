"""``milesbatch recipes``: the shipped recipes, a resolved recipe as text, and a check before anything starts.

Owns: where shipped recipes are found, and what their opening comment says. Never: starts a run. Invariant: with
``--json`` standard output is one JSON document and nothing else. Imports without torch. The page behind it is
``docs/recipe.md``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from milesbatch.errors import EXIT_NOT_WELL, RecipeError
from milesbatch.recipe.load import dump_recipe, load_recipe, recipe_digest
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.shipped import shipped_recipes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Recipes: list those that are shipped, show one resolved, validate one.",
)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Path of a recipe, or the name of a shipped one.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=VALUE", help="Set a field; may be repeated.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """A shipped recipe: what its opening comment says, and whether it is valid."""

    name: str
    path: str
    about: str
    needs: str
    tested: str
    error: str | None


@app.command("ls", epilog="Example: milesbatch recipes ls")
def ls(as_json: JsonOption = False) -> None:
    """List the shipped recipes, what each needs and how far each is tested."""
    rows = [_row(path) for path in shipped()]
    if as_json:
        _print_json([dataclasses.asdict(row) for row in rows])
    else:
        _print_table(rows)
    for row in rows:
        if row.error:
            print(f"error: {row.error}", file=sys.stderr)
    if any(row.error for row in rows):
        raise typer.Exit(EXIT_NOT_WELL)


@app.command("show", epilog="Example: milesbatch recipes show tiny --set steps=5")
def show(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Print a recipe as it would be frozen: everything it extends merged, every default filled in."""
    resolved = load_recipe(find_recipe(recipe), overrides or ())
    if as_json:
        _print_json(resolved.model_dump(mode="json"))
    else:
        sys.stdout.write(dump_recipe(resolved))


@app.command("validate", epilog="Example: milesbatch recipes validate my.yaml --set trainer.ranks=4")
def validate(recipe: RecipeArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a recipe without starting anything; exit code 2 when it is not valid."""
    try:
        path = find_recipe(recipe)
        resolved = load_recipe(path, overrides or ())
    except RecipeError as error:
        if not as_json:
            raise
        _print_json({"ok": False, "path": recipe, "digest": None, "error": str(error)})
        raise typer.Exit(error.exit_code) from error
    digest = recipe_digest(resolved)
    if as_json:
        _print_json({"ok": True, "path": str(path), "digest": digest, "error": None})
    else:
        print(f"{path} is valid: {resolved.name}, {resolved.steps} steps, digest {digest}")


def shipped() -> Iterator[Path]:
    """Recipe files beside the package and in ``recipes/`` of the current directory; names with ``_`` first are
    parts."""
    seen: set[Path] = set()
    for directory in _directories():
        for path in sorted(directory.glob("*.yaml")):
            if not path.exists() or path.name.startswith("_"):
                continue  # a symbolic link to nothing, or a part
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def find_recipe(text: str) -> Path:
    """The recipe at a path, or the shipped one of that name (``tiny`` or ``tiny.yaml``).

    Raises:
        RecipeError: there is no such file; names the nearest.
    """
    path = Path(text)
    if path.exists():
        return path
    names = {path.stem: path for path in shipped()}
    if "/" not in text and Path(text).suffix in ("", ".yaml") and Path(text).stem in names:
        return names[Path(text).stem]
    near = difflib.get_close_matches(path.stem, list(names), n=3) or list(names)
    hint = f"; shipped recipes: {', '.join(near)}" if near else ""
    raise RecipeError(f"there is no recipe {text}{hint}", mend="`milesbatch recipes ls` shows those that are shipped")


def _directories() -> list[Path]:
    return [directory for directory in (Path("recipes"), shipped_recipes()) if directory.is_dir()]


def _row(path: Path) -> RecipeRow:
    about, facts = _opening_comment(path)
    try:
        needs, error = facts.get("needs") or _needs(load_recipe(path)), None
    except RecipeError as problem:
        needs, error = facts.get("needs", ""), str(problem)
    return RecipeRow(path.stem, str(path), about, needs, facts.get("tested", ""), error)


def _opening_comment(path: Path) -> tuple[str, dict[str, str]]:
    """First line of the opening comment, and its ``needs:`` and ``tested:`` lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", {}
    about, facts = "", {}
    for line in lines:
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").rstrip()
        key, colon, value = text.partition(":")
        if colon and key.lower() in ("needs", "tested"):
            facts[key.lower()] = value.strip()
        about = about or text
    return about, facts


def _needs(recipe: Recipe) -> str:
    trainer, rollout = recipe.trainer, recipe.rollout
    threads = trainer.ranks * trainer.threads + rollout.workers * rollout.threads
    return f"{trainer.ranks} trainer ranks, {rollout.workers} rollout workers, {threads} CPU threads"


def _print_table(rows: list[RecipeRow]) -> None:
    table = Table(title=f"{len(rows)} recipes")
    for heading in ("name", "what", "needs", "tested"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        about = Text(row.about) if row.error is None else Text("not valid", style="bold red")
        table.add_row(Text(row.name), about, Text(row.needs), Text(row.tested))
    Console().print(table)


def _print_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")
