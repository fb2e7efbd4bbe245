"""Tokens per second of a rollout worker over one real SGLang server against a bare client of the same server.

Run: ``python benchmarks/sglang_worker.py [--python .venv-sglang/bin/python] [--device cpu]``

Both sides ask the same server for the same groups, in alternating rounds of one process; medians are printed. The bare
client posts all requests at once with aiohttp, as the engine does, and reads the JSON. The worker's side is what a
worker does with its leases: requests from prompts, the engine with its checks and policy versions, text, reward, and
trajectories committed to disk; the next leases are asked for while the earlier ones are being written.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import torch

from milesbatch.engines.sglang.engine import EngineLimits, SGLangEngine
from milesbatch.engines.sglang.fleet import FleetOptions
from milesbatch.engines.sglang.listener import FleetListener
from milesbatch.engines.sglang.response import Response
from milesbatch.engines.sglang.serving import StartedServer
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.engines.sglang.weights import FromDisk, Prover, written_to
from milesbatch.environments.prompts import open_prompts
from milesbatch.models.made import make_model
from milesbatch.models.tokenizer import make_tokenizer
from milesbatch.recipe.load import load_recipe
from milesbatch.recipe.models import MadeModel, Recipe
from milesbatch.rollout.episodes import EpisodeRunner, Recorder
from milesbatch.store.layout import RunLayout
from milesbatch.trajectories.schema import FileMetadata
from milesbatch.trajectories.writer import write_trajectories

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny-sglang.yaml"
DIGEST = "xxh128:" + "0" * 32


@dataclass(frozen=True)
class OwnWeights:
    """A model as policy version 0."""

    model: Any
    tokenizer: Any
    version: int = 0
    weights_digest: str = DIGEST

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}

    def write_model(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(".venv-sglang/bin/python"), help="of SGLang's environment")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--groups", type=int, default=16, help="prompt groups of a round (default 16)")
    parser.add_argument("--groups-per-lease", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="samples of each group (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="tokens of each response (default 48)")
    parser.add_argument(
        "--running", type=int, default=64, help="sequences that the server decodes at once (default 64)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side, after one to warm up (default 5)")
    return parser.parse_args()


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    overrides = [
        f"rollout.samples_per_group={arguments.samples}",
        f"rollout.sampling.max_new_tokens={arguments.max_new_tokens}",
    ]
    return load_recipe(RECIPE, overrides)


class Bench:
    """One server, and both sides of the comparison."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self.arguments = arguments
        self.recipe = recipe_of(arguments)
        section = self.recipe.model
        assert isinstance(section, MadeModel)
        self.tokenizer = make_tokenizer(section.alphabet, section.max_length)
        weights = OwnWeights(make_model(section, 0), self.tokenizer)
        weights.write_model(directory / "model")
        settings = ServerSettings(
            arguments.python.absolute(),
            directory / "model",
            arguments.device,
            "float32",
            section.max_length,
            arguments.running,
            max_total_tokens=16384,
        )
        self.place = StartedServer("server-0", settings, directory / "server.log", directory / "memory")
        options = FleetOptions("retract", 600.0, 120.0, 600.0, 600.0, FleetListener(print))
        limits = EngineLimits(section.max_length, len(self.tokenizer))
        way = FromDisk(written_to(directory / "staged"))
        self.engine = SGLangEngine([self.place], way, Prover(arguments.device == "cpu"), options, limits)
        self.engine.activate(weights)
        self.layout = RunLayout(directory / "run")
        self.layout.trajectories.mkdir(parents=True)
        # Without stop tokens every response is of the same length, so that both sides draw the same number of tokens.
        self.runner = EpisodeRunner(
            self.recipe, open_prompts(self.recipe), self.tokenizer, (), Recorder("rollout-0", 1)
        )

    def bare(self, first: int) -> tuple[int, float]:
        """Tokens and seconds of a bare client for the groups from ``first`` on."""
        episodes = self.runner.episodes(range(first, first + self.arguments.groups))
        bodies = [
            Response(episode.request, len(self.tokenizer)).body(f"bare-{first}-{i}.", "bare", None)
            for i, episode in enumerate(episodes)
        ]

        async def ask() -> int:
            headers = {"authorization": f"Bearer {self.place.key}"}
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(600)
            ) as session:

                async def one(body: Mapping[str, Any]) -> int:
                    async with session.post(f"{self.place.url}/generate", json=body) as response:
                        return len((await response.json())["output_ids"])

                return sum(await asyncio.gather(*map(one, bodies)))

        began_s = time.monotonic()
        tokens = asyncio.run(ask())
        return tokens, time.monotonic() - began_s

    def worker(self, first: int) -> tuple[int, float]:
        """The same of a worker, up to and with the committed trajectories."""
        began_s = time.monotonic()
        tokens = 0
        leases = []
        for group in range(first, first + self.arguments.groups, self.arguments.groups_per_lease):
            episodes = self.runner.episodes(range(group, group + self.arguments.groups_per_lease))
            futures = self.engine.submit([episode.request for episode in episodes])
            leases.append((episodes, futures, datetime.now(UTC)))
        while leases:
            running = [future for _, futures, _ in leases for future in futures if not future.done()]
            wait(running, timeout=0.05)
            for lease in [lease for lease in leases if all(future.done() for future in lease[1])]:
                leases.remove(lease)
                tokens += self._commit(*lease)
        return tokens, time.monotonic() - began_s

    def _commit(self, episodes: Any, futures: Any, started: datetime) -> int:
        done = [future.result() for future in futures]
        rows = self.runner.record(episodes, done, {0: DIGEST}, started, datetime.now(UTC))
        write_trajectories(
            self.layout,
            rows,
            incarnation=1,
            worker="rollout-0",
            metadata=FileMetadata("bench", DIGEST),
            before_commit=lambda: None,
        )
        return sum(len(each.tokens) for each in done)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(arguments, Path(directory))
        try:
            speeds: dict[str, list[float]] = {"bare client": [], "worker": []}
            busy: dict[str, list[float]] = {"bare client": [], "worker": []}
            for number in range(arguments.rounds + 1):
                sides = [("bare client", bench.bare), ("worker", bench.worker)]
                for place, (name, ask) in enumerate(sides if number % 2 else sides[::-1]):
                    # Other prompts each time: neither side finds the other's in the prefix cache.
                    before_s = time.process_time()
                    tokens, seconds = ask((2 * number + place) * arguments.groups)
                    if number:
                        speeds[name].append(tokens / seconds)
                        busy[name].append((time.process_time() - before_s) / tokens * 1e6)
        finally:
            bench.engine.close()
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, found in speeds.items():
        print(
            f"{name:12} {medians[name]:8.0f} tokens/s   ({min(found):.0f} to {max(found):.0f})"
            f"   {statistics.median(busy[name]):.0f} us of this process's CPU per token"
        )
    print(f"worker / bare client: {medians['worker'] / medians['bare client']:.3f}")


if __name__ == "__main__":
    main()
