"""Changing the weights of one server: pause, load, prove, go on.

    pause ──> load: from a directory on this host, or by broadcast ──> checksums and version as they must be ──> continue

Owns that order for one server. Never: decides which servers take part, or what becomes of one that failed. Invariant:
generation is continued in the end, whatever happened in between; and when :func:`change` returns, the server has proven
the version.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from milesbatch.engines.protocol import PolicyWeights
from milesbatch.engines.sglang.checksums import Proof, checksums_of, compare
from milesbatch.engines.sglang.client import ServerClient, ServerRefusedError
from milesbatch.errors import EngineError
from milesbatch.store.durable import make_directory, remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

PauseMode = Literal["retract", "in_place", "abort"]
Materialise = Callable[[PolicyWeights], AbstractContextManager[Path]]
"""Gives a model directory with the weights, which holds still while the context is open."""

_PAUSE_S = 60.0


class SupersededError(EngineError):
    """The weights are not there any more, because newer ones are on their way; nothing is wrong with the server."""


class Way(Protocol):
    """How weights get into a server."""

    async def load(
        self, client: ServerClient, weights: PolicyWeights, name: str, *, keep_cache: bool, limit_s: float
    ) -> None:
        """Into one server, which is paused, and calls them ``name`` from then on.

        Raises:
            EngineError: it did not come about.
        """

    def forget(self, client: ServerClient) -> None:
        """This server is lost."""


@dataclass(slots=True)
class FromDisk:
    """``update_weights_from_disk`` from a directory on this host (tmpfs or NVMe)."""

    materialise: Materialise

    async def load(
        self, client: ServerClient, weights: PolicyWeights, name: str, *, keep_cache: bool, limit_s: float
    ) -> None:
        context = self.materialise(weights)
        directory = await asyncio.to_thread(context.__enter__)
        try:
            body = {
                "model_path": str(directory),
                "load_format": "auto",
                "weight_version": name,
                "flush_cache": not keep_cache,
            }
            try:
                await client.post("update_weights_from_disk", body, limit_s)
            except ServerRefusedError as error:
                raise ServerRefusedError(
                    f"{error.what} (it must be able to read {directory}, in rollout.sglang.memory_dir; where it cannot, weights"
                    " come to it by weights.transport: broadcast)"
                ) from error
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)

    def forget(self, client: ServerClient) -> None:
        """There is nothing to let go of."""


def written_to(memory: Path) -> Materialise:
    """Writes the whole model below ``memory`` and removes it again."""

    @contextmanager
    def materialise(weights: PolicyWeights) -> Iterator[Path]:
        make_directory(memory)
        directory = memory / f"{weights.version}-{time.monotonic_ns()}"
        weights.write_model(directory)
        try:
            yield directory
        finally:
            remove_tree(directory)

    return materialise


@dataclass(slots=True)
class Prover:
    """Knows what the servers of one engine must answer for one version after the other."""

    can_expect: bool
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names the engine in its weights' names: a server says by them whose weights it has."""
    versions: dict[str, int] = field(default_factory=dict)
    """Names of weights that servers have proven -> policy version. What is drawn under any other is worth nothing."""
    _named: int = 0
    _version: int = -1
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _others: Mapping[str, str] = field(default_factory=dict)

    def new_name(self, version: int) -> str:
        """What a server is to call a policy version: another name each time, so that weights that failed their proof, there or
        at another server, are never taken for those that passed."""
        self._named += 1
        return f"{self.owner}.{version}.{self._named}"

    async def prove(self, client: ServerClient, weights: PolicyWeights, name: str, limit_s: float) -> Proof:
        """Ask for the name of its weights and for checksums, and compare; from then on tokens under ``name`` count.

        Raises:
            EngineError: they are not those of ``weights``.
        """
        info = await client.get("model_info", limit_s)
        found_name = info.get("weight_version")
        if found_name != name:
            raise EngineError(
                f"{client.url} has weights {found_name!r} after an update to policy version {weights.version}, which is "
                f"{name!r} here; does somebody else change its weights?",
                mend="a server follows one worker of one run: give each its own in rollout.sglang.urls",
            )
        answer = await client.post("weights_checker", {"action": "checksum"}, limit_s)
        ranks = checksums_of(answer)
        if len(ranks) == 1:
            found = ranks[0]
        else:
            found = {f"rank {number}: {name}": text for number, rank in enumerate(ranks) for name, text in rank.items()}
        others = self._others if self._version == weights.version else {}
        tensors = weights.tensors() if self.can_expect else {}
        proof = await asyncio.to_thread(
            lambda: compare(found, tensors, can_expect=self.can_expect and len(ranks) == 1, others=others)
        )
        self._version, self._others = weights.version, found
        self.versions[name] = weights.version
        return proof


async def change(
    client: ServerClient,
    weights: PolicyWeights,
    way: Way,
    prover: Prover,
    name: str,
    *,
    pause: PauseMode,
    limit_s: float,
    on_failure: Callable[[], None] = lambda: None,
) -> float:
    """Make ``weights`` those of a server, which calls them ``name`` (:meth:`Prover.new_name`).

    Returns the seconds for which it was paused. ``on_failure`` is called before it goes on with weights that nobody knows.

    Raises:
        EngineError: it has not proven them; it must not be used before it has.
    """
    began_s = time.monotonic()
    try:
        await client.post("pause_generation", {"mode": pause}, min(_PAUSE_S, limit_s))
        await way.load(client, weights, name, keep_cache=pause == "in_place", limit_s=limit_s)
        await prover.prove(client, weights, name, limit_s)
    except BaseException:
        on_failure()
        await _go_on(client, quietly=True)
        raise
    await _go_on(client, quietly=False)
    return time.monotonic() - began_s


def _go_on(client: ServerClient, *, quietly: bool) -> Awaitable[None]:
    async def ask() -> None:
        await client.post("continue_generation", {}, _PAUSE_S)

    async def ask_quietly() -> None:
        with suppress(EngineError):
            await client.post("continue_generation", {}, 5.0)

    return ask_quietly() if quietly else ask()
