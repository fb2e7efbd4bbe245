"""Cheap, exact stand-ins for what computes: tokenizer, engine, trainer backend, shard files. Nothing of the protocol is here.

Everything is a pure function of its inputs, and sensitive to all of them: a missing, repeated or different sample, a wrong
checkpoint or other weights at the rollout change every later weights digest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import xxhash
from builders import make_recipe

from milesbatch.algorithm.samples import TrainSample
from milesbatch.backends.protocol import StepMetrics, do_nothing
from milesbatch.engines.protocol import Completion, GenerationRequest, PolicyWeights
from milesbatch.ids import VersionSpan
from milesbatch.recipe.models import Recipe
from milesbatch.store.durable import storage_error
from milesbatch.store.operations import current

STEPS = 7
_ALPHABET = "0123456789+-*="
_BOS, _UNKNOWN, _FIRST_CHARACTER = 0, 1, 2


def crash_recipe() -> Recipe:
    """7 steps of 4 groups in blocks of 2; checkpoints every 2 steps, 2 kept; keyframes 0, 2, 4 and 6.

    Staleness 1: once checkpoints 4 and 6 are the newest, versions 0 and 1 may go; with 6 and 7, all below version 4.
    """
    return make_recipe(
        steps=STEPS,
        seed=15,
        rollout={"workers": 2},
        environment={"reward": "milesbatch.environments.rewards:digit_match"},
        algorithm={"group_filter": "zero_variance"},
        weights={"keyframe_every": 2},
        checkpoint={"every": 2, "keep": 2},
        tracking={"kind": "none"},
    )


class CharacterTokenizer:
    """One token for each character of arithmetic."""

    bos_token_id, unk_token_id = _BOS, _UNKNOWN

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.get_vocab().get(character, _UNKNOWN) for character in text]}

    def get_vocab(self) -> dict[str, int]:
        return {character: _FIRST_CHARACTER + index for index, character in enumerate(_ALPHABET)}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(_ALPHABET[token - _FIRST_CHARACTER] for token in tokens if token >= _FIRST_CHARACTER)


class HashEngine:
    """Draws tokens from (weights digest, prompt, seed)."""

    samples_in_flight = 0

    def __init__(self) -> None:
        self.policy_version = -1
        self.tokens_generated = 0
        self.cached_share = None
        self._digest = ""

    def activate(self, weights: PolicyWeights) -> float:
        # Over the tensors, not what the manifest says: other bytes must give other tokens.
        hasher = xxhash.xxh3_64()
        for name, tensor in weights.tensors().items():
            hasher.update(name.encode() + tensor.numpy().tobytes())
        self.policy_version, self._digest = weights.version, hasher.hexdigest()
        return 0.0

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        futures = []
        for request in requests:
            future: Future[Completion] = Future()
            future.set_result(self._complete(request))
            futures.append(future)
        return futures

    def _complete(self, request: GenerationRequest) -> Completion:
        draw = random.Random(f"{self._digest}/{request.prompt_tokens}/{request.seed}")
        tokens = tuple(_FIRST_CHARACTER + draw.randrange(10) for _ in range(draw.randint(1, 3)))
        logprobs = tuple(-draw.randrange(1, 64) / 16 for _ in tokens)
        self.tokens_generated += len(tokens)
        return Completion(tokens, logprobs, "stop", (VersionSpan(0, self.policy_version),))

    def close(self) -> None:
        return


class HashBackend:
    """A few hundred weights, changed by a hash over all that was ever trained on. The optimizer's state is that hash."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._chain = torch.zeros(1, dtype=torch.int64)
        self._weights = {
            "embed.weight": torch.arange(384, dtype=torch.float32).reshape(24, 16),
            "frozen.weight": torch.ones(32),
            "head.weight": torch.zeros(16, 8),
        }

    def train_step(
        self, step: int, samples: Sequence[TrainSample], before_update: Callable[[], None] = do_nothing
    ) -> StepMetrics:
        before_update()
        hasher = xxhash.xxh3_64(f"{self._chain.item()}/{step}".encode())
        for sample in samples:
            hasher.update(repr(sample).encode())
        self._chain[0] = hasher.intdigest() >> 1
        draw = random.Random(hasher.intdigest())
        for name in ("embed.weight", "head.weight"):
            flat = self._weights[name].view(-1)
            for _ in range(24):
                flat[draw.randrange(flat.numel())] += draw.randrange(1, 9)
        return StepMetrics(step, 0.5, 1.0, 1e-3, None, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, len(samples), 1, 1, 1, 0.0)

    def logprobs(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        return [torch.tensor(sample.rollout_logprobs) for sample in samples]

    def named_weights(
        self, dtype: torch.dtype, owners: Mapping[str, int] | None = None, *, on_device: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.items():
            yield name, tensor.to(dtype).clone()

    def weight_sizes(self) -> dict[str, int]:
        return {name: tensor.numel() for name, tensor in self._weights.items()}

    def tied_names(self) -> dict[str, str]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._chain, **self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class Late:
    """Publishes as late as it may, or at once: what goes on beside the training, in the one thread that there is.

    Late is the longest that a version can stay behind: the next step's record is committed before it is.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._job: Callable[[], None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        assert self._job is None
        self._job = job
        if self._at_once:
            self.finish()

    def finish(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job()

    @property
    def is_idle(self) -> bool:
        return self._job is None


class SlowSaver:
    """Copies a state as late as it may and writes half of it then, and the rest when it is asked again, as a background save
    would.

    It leaves all syncing to what is done afterwards (``sync_tree``).
    """

    def __init__(self) -> None:
        self._live: dict[Path, torch.Tensor] = {}
        self._waiting: list[tuple[Path, bytes]] = []
        self._has_been_asked = False
        self._afterwards: Callable[[], None] | None = None

    def start(self, state_dict: Mapping[str, Any], directory: Path, afterwards: Callable[[], None] | None) -> None:
        self._afterwards = afterwards
        self._live = {directory / f"{name}.distcp": tensor for name, tensor in sorted(state_dict.items())}
        self._has_been_asked = False

    def await_copy(self) -> None:
        if self._live:
            self._waiting = [(path, tensor.numpy().tobytes()) for path, tensor in self._live.items()]
            self._live = {}
            self._write(len(self._waiting) // 2)

    def later(self, action: Callable[[], None]) -> None:
        action()

    @property
    def is_done(self) -> bool:
        if self._has_been_asked:
            self.wait()
        self._has_been_asked = True
        return not self._waiting and not self._live

    def wait(self) -> None:
        self.await_copy()
        self._write(len(self._waiting))
        afterwards, self._afterwards = self._afterwards, None
        if afterwards is not None:
            afterwards()

    def load(self, state: dict[str, Any], directory: Path) -> None:
        for name, tensor in state.items():
            data = bytearray((directory / f"{name}.distcp").read_bytes())
            tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape))

    def _write(self, count: int) -> None:
        for path, data in self._waiting[:count]:
            try:
                with current().create(path) as stream:
                    stream.write(data[: len(data) // 2])
                    stream.flush()
                    stream.write(data[len(data) // 2 :])
            except OSError as error:  # as the real one says it
                raise storage_error(path, error) from error
        del self._waiting[:count]
