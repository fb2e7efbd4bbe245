"""What an evaluation asks, and how: from a recipe, or from a prompt file that a person gives. No files of the run.

Owns: the settings, and their opening (prompts are read, the reward function is loaded, and the prompts are compared
with those of training). Invariant: equal settings ask the same questions and draw with the same seeds. The page behind
it is ``docs/evaluation.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milesbatch.environments.held_out import HeldOut, check_held_out, open_held_out
from milesbatch.environments.judge import reward_fingerprint
from milesbatch.errors import UsageError
from milesbatch.evaluation.reader import OF_RECIPE
from milesbatch.evaluation.writer import Subject
from milesbatch.recipe.models import Evaluation, FileData, Recipe, Sampling
from milesbatch.records import EvaluationSettings
from milesbatch.rollout.episodes import EpisodeRules

_SEEDS = "evaluation"


@dataclass(frozen=True, slots=True)
class Asking:
    """Prompts that are held out, and how they are asked."""

    name: str
    held_out: HeldOut
    rules: EpisodeRules
    settings: EvaluationSettings

    def of(self, version: int, weights_digest: str) -> Subject:
        """The evaluation of one policy version."""
        return Subject(version, weights_digest, self.name, self.settings)


def section_of(recipe: Recipe, prompts: Path | None = None) -> Evaluation:
    """The recipe's section; with a file of ``prompts`` the same with these, all of them.

    Raises:
        UsageError: the recipe has none, and no file is given.
    """
    if prompts is None:
        if recipe.evaluation is None:
            raise UsageError(
                f"the recipe of {recipe.name} has no section evaluation",
                mend="give held-out prompts with --prompts FILE, or add the section: see docs/evaluation.md",
            )
        return recipe.evaluation
    # Columns are called as in the recipe's own file; ids are for people, and a file need not have any.
    like = recipe.evaluation.prompts if recipe.evaluation is not None else recipe.data
    columns = like.model_dump(exclude={"path", "id_field"}) if isinstance(like, FileData) else {"kind": "file"}
    data = FileData.model_validate({**columns, "path": str(prompts)})
    if recipe.evaluation is None:
        return Evaluation(prompts=data, num_prompts=None)
    return recipe.evaluation.model_copy(update={"prompts": data, "num_prompts": None})


def open_asking(recipe: Recipe, section: Evaluation, name: str = OF_RECIPE) -> Asking:
    """Read and check all that is asked.

    Raises:
        DataError: the prompts cannot be read, or are asked in training too.
        ExtensionError: the reward function cannot be loaded.
        RecipeError: the section is wrong.
    """
    held_out = open_held_out(section.prompts, section.num_prompts, recipe.seed)
    check_held_out(held_out, recipe)
    trained = recipe.rollout.sampling
    sampling = Sampling(
        max_new_tokens=section.max_new_tokens or trained.max_new_tokens,
        temperature=section.temperature,
        top_p=trained.top_p,
        top_k=trained.top_k,
        stop=trained.stop,
    )
    settings = EvaluationSettings(
        prompts=held_out.fingerprint(),
        num_prompts=len(held_out),
        samples_per_prompt=section.samples_per_prompt,
        seed=recipe.seed,
        reward=reward_fingerprint(recipe.environment.reward),
        **sampling.model_dump(),
    )
    rules = EpisodeRules(section.samples_per_prompt, sampling, _SEEDS)
    return Asking(name, held_out, rules, settings)


def due_versions(steps: int, every: int, first: int = 0) -> tuple[int, ...]:
    """Policy versions that an evaluation every ``every`` steps asks, ascending: the first and the last one always.

    ``first`` is the version that the run begins with; not 0 when it is a fork.
    """
    return tuple(sorted({first, *(version for version in range(0, steps, every) if version > first), steps}))
