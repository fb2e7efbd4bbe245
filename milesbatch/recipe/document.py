"""``docs/recipe.md``, made from the recipe models: ``python -m milesbatch.recipe.document [--check] docs/recipe.md``.

Owns: the page's form. Never: descriptions, types or limits (``models.py`` has them). Invariant: the page is a pure
function of the models, so that ``--check`` can compare it byte for byte.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from milesbatch.recipe.fields import kinds_of, limits_text, type_text
from milesbatch.recipe.freeze import MAY_CHANGE
from milesbatch.recipe.models import Recipe

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


def page() -> str:
    """The whole page as Markdown."""
    allowed = ", ".join(f"`{name}*`" if name.endswith(".") else f"`{name}`" for name in MAY_CHANGE)
    parts = [_OPENING.replace("{may_change}", allowed), "## Top level\n", _about(Recipe), _table(Recipe)]
    for name, field in Recipe.model_fields.items():
        parts.extend(_section(name, field))
    return "\n".join(part for part in parts if part).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` compare it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m milesbatch.recipe.document", description="Write docs/recipe.md.")
    parser.add_argument("path", type=Path, help="the page, for example docs/recipe.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when the file differs")
    options = parser.parse_args(arguments)
    wanted = page()
    if not options.check:
        options.path.write_text(wanted, encoding="utf-8")
        return 0
    found = options.path.read_text(encoding="utf-8") if options.path.exists() else ""
    if found == wanted:
        return 0
    lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(options.path), "models", lineterm="", n=1)
    print(f"{options.path} is not what the models say; write it again with", file=sys.stderr)
    print(f"  python -m milesbatch.recipe.document {options.path}", *lines, sep="\n", file=sys.stderr)
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
