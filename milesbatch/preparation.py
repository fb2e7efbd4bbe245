"""Everything that is checked and made before a run exists, in a process of its own: ``python -m milesbatch.preparation``.

It imports torch, the data and the user's reward function, so that the controller need not; what is wrong with any of them
is said here, before anything was started. The last line on stdout is the fingerprints as JSON.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milesbatch.cluster.context import cache_directory, child_environment
from milesbatch.cluster.last_words import own_error
from milesbatch.errors import DataError, InputError, MilesbatchError, RunFailedError, StorageError
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import Recipe
from milesbatch.recipe.sglang import TESTED, python_of_servers
from milesbatch.store.layout import RunLayout
from milesbatch.store.run import read_fork

if TYPE_CHECKING:
    from milesbatch.environments.held_out import HeldOut
    from milesbatch.environments.prompts import Prompt

_MARK = "fingerprints "
_LOOK_S = 60.0
_VERSION = re.compile(r"\d+(\.\w+)+\S*")


def prepare(layout: RunLayout, report: Callable[[str], None], python: Sequence[str] = ()) -> dict[str, str]:
    """Fill ``model/`` and check data and reward, in a subprocess; returns the run's fingerprints.

    ``python`` is the command that runs Python where torch is (a job step, a container); empty: this interpreter.

    Raises:
        InputError: something that the recipe names cannot be used; says what.
        StorageError: the run directory or the cache cannot be used.
        RunFailedError: the subprocess died.
    """
    command = [*(python or (sys.executable,)), "-m", "milesbatch.preparation", str(layout.root), str(cache_directory())]
    fingerprints: dict[str, str] | None = None
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(2, {})
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        for line in process.stdout:
            if line.startswith(_MARK):
                fingerprints = json.loads(line.removeprefix(_MARK))
            else:
                report(line.rstrip())
        said = process.stderr.read()
    expected = own_error(said)  # with what to do about it
    if process.returncode == InputError.exit_code and expected:
        raise InputError(expected)
    if process.returncode == StorageError.exit_code and expected:
        raise StorageError(expected)
    if process.returncode or fingerprints is None:
        raise RunFailedError(
            f"preparing the run ended with exit status {process.returncode}; it said:\n{said.strip()[-2000:]}",
            mend=f"`{shlex.join(command)}` must work on that node: see container, `python` and modules of the site file",
        )
    return fingerprints


def check_and_make(layout: RunLayout, recipe: Recipe, cache: Path, report: Callable[[str], None]) -> dict[str, str]:
    """Make the model directory and check that the first prompts can be asked and judged; returns the fingerprints.

    Raises:
        ModelError, DataError, ExtensionError: what the recipe names cannot be used.
    """
    from milesbatch.environments.judge import reward_fingerprint
    from milesbatch.environments.prompts import encode_prompt, open_prompts
    from milesbatch.models.experts import recorded_shape
    from milesbatch.models.fingerprint import model_fingerprints
    from milesbatch.models.load import context_length, load_tokenizer
    from milesbatch.models.prepare import prepare_model

    check_servers_environment(recipe, report)
    prompts = open_prompts(recipe)
    held_out = _held_out(recipe)
    reward = reward_fingerprint(recipe.environment.reward)
    if read_fork(layout) is None:  # a fork has its parent's
        prepare_model(recipe, layout.model, cache, report)
    recorded_shape(recipe, layout.model)
    tokenizer = load_tokenizer(layout.model)
    limit, longest_response = context_length(layout.model), recipe.rollout.sampling.max_new_tokens

    def check_room(asked: Iterable[Prompt], response: int, field: str) -> None:
        longest = max(len(encode_prompt(tokenizer, recipe.model, prompt)) for prompt in asked)
        if longest + response > limit:
            raise DataError(
                f"a prompt of {longest} tokens and {field} ({response}) need {longest + response} tokens; the model has room"
                f" for {limit}",
                mend=f"lower {field}, shorten the prompts, or use a model with a longer context",
            )

    check_room((prompts.prompt(group) for group in range(16)), longest_response, "rollout.sampling.max_new_tokens")
    if held_out is not None and recipe.evaluation is not None:
        response = recipe.evaluation.max_new_tokens or longest_response
        check_room(held_out.prompts, response, "evaluation.max_new_tokens")
    return {**model_fingerprints(recipe, layout.model), "data": prompts.fingerprint(), "reward": reward}


def check_servers_environment(recipe: Recipe, report: Callable[[str], None]) -> None:
    """With SGLang as the engine: is it there? Before anything is made; servers that run elsewhere are not asked, and an
    evaluator starts its own. Another version than the tested one is reported.

    Raises:
        InputError: it is not.
    """
    section = recipe.rollout.sglang
    evaluates_here = recipe.evaluation is not None and section.device == "cpu"
    if recipe.rollout.engine != "sglang" or (section.urls and not evaluates_here):
        return
    question = "import importlib.metadata as m; print(m.version('sglang'))"
    mend = (
        "name the Python of an environment in which SGLang is installed (rollout.sglang.python); `make sglang-cpu` makes one"
        " for machines without a GPU"
    )
    python = python_of_servers(section.python)
    try:
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"rollout.sglang.python: {python} cannot be run: {error}", mend=mend) from error
    if answer.returncode:
        raise InputError(f"rollout.sglang.python: there is no SGLang beside {python}", mend=mend)
    version = answer.stdout.strip()
    if not _VERSION.fullmatch(version):
        raise InputError(
            f"rollout.sglang.python: {python} is no Python: asked for the version of SGLang, it said {version[:200]!r}",
            mend=mend,
        )
    if version != TESTED:
        report(f"warning: SGLang {version} beside {python} is not the tested version, {TESTED}")


def _held_out(recipe: Recipe) -> HeldOut | None:
    """The evaluation's prompts, which training must never ask; before the model is made, which takes longer.

    Raises:
        DataError: it does.
    """
    from milesbatch.environments.held_out import check_held_out, open_held_out

    if recipe.evaluation is None:
        return None
    found = open_held_out(recipe.evaluation.prompts, recipe.evaluation.num_prompts, recipe.seed)
    check_held_out(found, recipe)
    return found


def main(arguments: list[str]) -> int:
    """``RUN_DIR CACHE_DIR``; progress on stdout, fingerprints last; errors on stderr."""
    layout, cache = RunLayout(Path(arguments[0])), Path(arguments[1])
    try:
        recipe = load_recipe(layout.recipe)
        fingerprints = check_and_make(layout, recipe, cache, lambda line: print(line, flush=True))
    except MilesbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(_MARK + json.dumps(fingerprints), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
