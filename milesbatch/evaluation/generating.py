"""What generation takes, made with the rollout role's own parts. Imports torch only when it is called.

    rollout.engine: embedded    the model in this process
    rollout.engine: sglang      a server of the evaluator's own, as the recipe's section says, or running ones (``urls``)

Owns the choice of engine and follower for an evaluator. Invariant: no server of training is touched: those follow their
workers, and have the weights that training wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.errors import UsageError
from milesbatch.evaluation.asking import Asking
from milesbatch.evaluation.evaluator import Generating
from milesbatch.rollout.episodes import EpisodeRunner, Recorder
from milesbatch.store.run import OpenRun

if TYPE_CHECKING:
    from milesbatch.rollout.servers import Servers
    from milesbatch.rollout.staged import StagedFollower
    from milesbatch.weights.follower import Follower


@dataclass(frozen=True, slots=True)
class Evaluating:
    """Who evaluates, and what it says meanwhile."""

    recorder: Recorder
    name: str
    """Of its servers; with ``life`` it tells this process from all others that evaluate the run."""
    life: str = ""
    urls: tuple[str, ...] = ()
    """SGLang servers that run already, for this evaluator alone."""
    tell: Callable[[str], None] = lambda text: None
    """Hears what is waited for."""
    listener: FleetListener = field(default_factory=FleetListener)
    """Hears of its servers."""


@dataclass(frozen=True, slots=True)
class Means:
    """The follower, and how to come to the engine; ``close`` ends both."""

    follower: Follower | StagedFollower
    prepare: Callable[[], Generating]
    close: Callable[[], None]


def open_means(run: OpenRun, asking: Asking, who: Evaluating) -> Means:
    """The recipe's engine with the run's model, and the episodes of ``asking``; the engine is made by ``prepare``.

    Raises:
        UsageError: there are ``urls``, and the recipe's engine is not SGLang.
        CorruptArtefactError, StorageError: the run, or the directory for weights, cannot be used.
    """
    from milesbatch.rollout.reaching import open_follower

    if run.recipe.rollout.engine == "sglang":
        return _with_servers(run, asking, who)
    if who.urls:
        raise UsageError(
            f"the engine of {run.recipe.name} is {run.recipe.rollout.engine}: it uses no server such as {who.urls[0]}",
            mend="leave --url out",
        )
    made: list[Generating] = []

    def prepare() -> Generating:
        from milesbatch.models.load import load_tokenizer
        from milesbatch.rollout.engine import open_engine

        model = run.layout.model
        made.append(Generating(open_engine(model, run.recipe, load_tokenizer(model)), _runner(run, asking, who)))
        return made[-1]

    def close() -> None:
        for one in made:
            one.engine.close()

    return Means(open_follower(run, who.recorder.incarnation, who.tell), prepare, close)


def _with_servers(run: OpenRun, asking: Asking, who: Evaluating) -> Means:
    from milesbatch.models.load import load_tokenizer
    from milesbatch.rollout.servers import Owner, Servers

    owner = Owner.evaluator(who.name, who.recorder.incarnation, who.life, who.urls)
    servers: Servers = Servers(run, owner, who.listener)

    def prepare() -> Generating:
        return Generating(servers.open_engine(load_tokenizer(run.layout.model)), _runner(run, asking, who))

    return Means(servers.follower, prepare, servers.close)


def _runner(run: OpenRun, asking: Asking, who: Evaluating) -> EpisodeRunner:
    from milesbatch.models.load import load_tokenizer, stop_token_ids

    model = run.layout.model
    stops = stop_token_ids(model)
    return EpisodeRunner(run.recipe, asking.held_out, load_tokenizer(model), stops, who.recorder, asking.rules)
