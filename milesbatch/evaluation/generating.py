"""What generation takes, made with the rollout role's own parts. Imports torch only when it is called."""

from __future__ import annotations

from milesbatch.engines.protocol import RolloutEngine
from milesbatch.evaluation.asking import Asking
from milesbatch.evaluation.evaluator import Generating
from milesbatch.rollout.episodes import EpisodeRunner, Recorder
from milesbatch.store.run import OpenRun


def prepare_generating(
    run: OpenRun, asking: Asking, recorder: Recorder, engine: RolloutEngine | None = None
) -> Generating:
    """The recipe's engine with the run's model (``engine``, if it was made before), and the episodes of ``asking``.

    Raises:
        ModelError: the model cannot be loaded.
        ExtensionError: the reward function cannot be loaded.
    """
    from milesbatch.models.load import load_tokenizer, stop_token_ids
    from milesbatch.rollout.engine import open_engine

    model = run.layout.model
    tokenizer = load_tokenizer(model)
    runner = EpisodeRunner(run.recipe, asking.held_out, tokenizer, stop_token_ids(model), recorder, asking.rules)
    return Generating(engine or open_engine(model, run.recipe, tokenizer), runner)
