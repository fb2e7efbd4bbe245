"""``run.json``, the frozen recipe and ``model/`` against their digests; from them, what the rest of a run must obey.

Owns nothing but reading; never needs a recipe that loads: rules that cannot be known are not checked, and that is noted.
The page behind it is ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milesbatch.audit.findings import Findings
from milesbatch.decisions.batching import BatchRule
from milesbatch.decisions.origin import BEGINNING, Origin, origin_of
from milesbatch.errors import InputError
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.yaml_text import parse_yaml
from milesbatch.records import ForkedFrom, RunRecord, canonical_json, digest_bytes
from milesbatch.store.entries import listed
from milesbatch.store.layout import RunLayout


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run's artefacts must obey. Fields that decide on recorded work cannot change while a run lives."""

    batching: BatchRule
    samples_per_group: int
    seed: int
    keep_every: int | None
    """``checkpoint.keep_every`` as the run began with; the one rule here that an incarnation may change."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the run says that it is; None and empty where its own record is damaged."""

    run_id: str | None
    fingerprints: Mapping[str, str]
    rules: Rules | None
    origin: Origin = BEGINNING
    """Where it begins; that of a fork whose ``run.json`` is damaged is not known."""
    forked_from: ForkedFrom | None = None


def check_identity(layout: RunLayout, findings: Findings) -> Identity:
    """Check ``run.json`` and every file that it names."""
    record = findings.read_record(RunRecord, layout.run_record)
    if record is None:
        if not layout.run_record.exists():
            findings.violate("missing", layout.run_record, f"{layout.run_record} is missing")
    else:
        for ref in record.files:
            findings.verify(layout.root / ref.path, ref)
        named = {layout.root / ref.path for ref in record.files}
        for path in listed(layout.model):
            if path.is_file() and path not in named:
                findings.note("stranger", path, "run.json does not name it; nothing was checked")
        if layout.recipe not in named:
            findings.violate("mismatch", layout.run_record, "it does not name recipe.yaml")
    recipe = _recipe(layout, record, findings)
    if recipe is None:
        findings.note("diagnosis", layout.recipe, "its rules (staleness, samples, seeds) were not checked")
    origin = origin_of(record)
    rules = None if recipe is None else _rules(recipe, origin)
    if record is None:
        return Identity(None, {}, rules)
    return Identity(record.run_id, record.fingerprints, rules, origin, record.forked_from)


def _recipe(layout: RunLayout, record: RunRecord | None, findings: Findings) -> Recipe | None:
    if findings.has_trouble(layout.recipe):
        return None
    try:
        text = layout.recipe.read_text()
        # Over the text, not the loaded recipe: that has the fields that this version added, with their defaults.
        found = digest_bytes(canonical_json(parse_yaml(text, str(layout.recipe)).value))
        recipe = load_recipe(layout.recipe)
    except FileNotFoundError:
        findings.violate("missing", layout.recipe, f"{layout.recipe} is missing")
        return None
    except (InputError, UnicodeDecodeError, OSError) as error:
        detail = f"{layout.recipe} cannot be read as a recipe: {error}"
        if record is None:
            findings.violate("damaged", layout.recipe, detail)
        else:  # whole, but not one that this version understands
            findings.note("diagnosis", layout.recipe, detail)
        return None
    if record is not None and found != record.recipe_digest:
        detail = f"it states recipe digest {record.recipe_digest}, recipe.yaml has {found}"
        findings.violate("mismatch", layout.run_record, detail)
    return recipe


def _rules(recipe: Recipe, origin: Origin) -> Rules:
    is_bitwise = recipe.determinism == "bitwise"
    batching = BatchRule(recipe.trainer.groups_per_step, recipe.rollout.staleness, is_bitwise, origin)
    return Rules(batching, recipe.rollout.samples_per_group, recipe.seed, recipe.checkpoint.keep_every)
