"""How weights get into a real server, and that it is not used before it has proven them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_server import (
    RealServer,
    Weights,
    make_model,
    reference_logprobs,
    replayed_logprobs,
    request,
    results,
    start_server,
)

from milesbatch.engines.protocol import GenerationRequest, PolicyWeights
from milesbatch.engines.sglang.client import ServerClient
from milesbatch.engines.sglang.groups import ByGroup
from milesbatch.engines.sglang.weights import FromDisk, PauseMode, Way, written_to
from milesbatch.errors import EngineError
from milesbatch.ids import VersionSpan

EXACT = 1e-5
pytestmark = pytest.mark.timeout(600)


def checksums(real: RealServer) -> dict[str, str]:
    answer = real.post("weights_checker", action="checksum").json()
    return dict(answer["ranks"][0]["checksums"])


def by_group(bucket_bytes: int = 2**20) -> Way:
    return ByGroup("127.0.0.1", bucket_bytes)


def by_disk(memory: Path) -> Way:
    return FromDisk(written_to(memory))


@pytest.mark.parametrize("bucket_bytes", [2**20, 5000], ids=["one bucket", "many"])
def test_by_broadcast_it_is_the_same_as_from_disk(
    real: RealServer, models: list[Any], tmp_path: Path, bucket_bytes: int
) -> None:
    found = []
    for way, seed in (
        (by_disk(tmp_path), 0),
        (by_disk(tmp_path), 1),
        (by_group(bucket_bytes), 0),
        (by_group(bucket_bytes), 1),
    ):
        engine = real.attach(tmp_path, way=way)
        engine.activate(Weights(seed, models[seed]))
        found.append(checksums(real))
        asked = request(temperature=0.0)
        (done,) = results(engine.submit([asked]))
        assert done.versions == (VersionSpan(0, seed),)
        assert done.logprobs == pytest.approx(reference_logprobs(models[seed], asked, done), abs=EXACT)
        engine.close()
    assert found[0] == found[2] != found[1] == found[3]


def test_a_group_is_used_again_for_the_next_version(real: RealServer, models: list[Any], tmp_path: Path) -> None:
    way = by_group()
    engine = real.attach(tmp_path, way=way)
    engine.activate(Weights(1, models[1]))
    began_s = time.monotonic()
    for version in (2, 3):
        engine.activate(Weights(version, models[version]))
    assert time.monotonic() - began_s < 20
    assert isinstance(way, ByGroup)
    assert len(way._groups) == 1
    engine.close()


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
@pytest.mark.parametrize("pause", ["retract", "in_place", pytest.param("abort", marks=pytest.mark.long)])
def test_one_sequence_lives_through_three_updates(
    real: RealServer, models: list[Any], tmp_path: Path, pause: PauseMode, transport: str
) -> None:
    """Every token has the version that drew it, and its logprob is what a trainer computes under that version."""
    way = by_disk(tmp_path) if transport == "disk" else by_group()
    engine = real.attach(tmp_path, way=way, pause=pause)
    engine.activate(Weights(10, models[0]))
    asked = [request(7, salt=i, max_new_tokens=150) for i in range(3)]
    real.slowly(0.02)
    try:
        futures = engine.submit(asked)
        for number in (1, 2, 3):
            time.sleep(0.6)
            engine.activate(Weights(10 + number, models[number]))
    finally:
        real.slowly(None)
    by_version = {10 + number: model for number, model in enumerate(models)}
    for wanted, done in zip(asked, results(futures), strict=True):
        assert len(done.tokens) == 150
        assert [span.version for span in done.versions] == [10, 11, 12, 13]
        if pause == "in_place":  # keys and values of older versions stay
            expected = replayed_logprobs(by_version, wanted, done)
        else:  # all that was there is computed again under the new version
            ends = [*(span.start for span in done.versions[1:]), len(done.tokens)]
            expected = []
            for span, end in zip(done.versions, ends, strict=True):
                expected += reference_logprobs(by_version[span.version], wanted, done)[span.start : end]
        assert done.logprobs == pytest.approx(expected, abs=EXACT)
        wrong = reference_logprobs(models[0], wanted, done)
        assert max(abs(a - b) for a, b in zip(wrong, done.logprobs, strict=True)) > 0.1, "versions must matter here"
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("spread", "head", "within"),
    [(0.008, torch.float32, 2e-3), (0.05, torch.bfloat16, 2e-2)],
    ids=["small logits, head in float32", "larger logits, all in bfloat16"],
)
def test_in_bfloat16_the_trainers_logprobs_agree_within_what_the_type_can_hold(
    tmp_path: Path, spread: float, head: torch.dtype, within: float
) -> None:
    """Both sides round to eight bits after other sums: what is left of it grows with the logits. A head in bfloat16 rounds
    these too, from 1 on to 0.008."""
    models = {version: make_model(version, torch.bfloat16, initializer_range=spread) for version in range(4)}
    arguments = ("--enable-fp32-lm-head",) if head == torch.float32 else ()
    server = start_server(tmp_path, models[0], dtype="bfloat16", arguments=arguments)
    engine = server.attach(tmp_path / "staged", pause="in_place")
    try:
        engine.activate(Weights(0, models[0]))
        asked = [request(7, salt=i, max_new_tokens=150) for i in range(3)]
        server.slowly(0.02)
        futures = engine.submit(asked)
        for version in (1, 2, 3):
            time.sleep(0.6)
            engine.activate(Weights(version, models[version]))
        server.slowly(None)
        for wanted, done in zip(asked, results(futures), strict=True):
            assert [span.version for span in done.versions] == [0, 1, 2, 3]
            assert done.logprobs == pytest.approx(replayed_logprobs(models, wanted, done, head=head), abs=within)
            wrong = reference_logprobs(models[0], wanted, done)
            assert max(abs(a - b) for a, b in zip(wrong, done.logprobs, strict=True)) > 0.02, (
                "versions must matter here"
            )
    finally:
        engine.close()
        server.owner.close()


def test_siblings_do_not_use_what_older_weights_left_in_the_cache(
    real: RealServer, models: list[Any], tmp_path: Path
) -> None:
    engine = real.attach(tmp_path, pause="in_place")
    asked = request(60, temperature=0.0)
    for version in (20, 21, 22):
        engine.activate(Weights(version, models[version % 3]))
        for _ in range(2):
            (done,) = results(engine.submit([asked]))
            assert done.logprobs == pytest.approx(reference_logprobs(models[version % 3], asked, done), abs=EXACT)
    assert engine.cached_share is not None
    assert engine.cached_share > 0.3, "the second of each pair had its prompt in the cache"
    engine.close()


class Spoiled:
    """A way that does something else than it should, the first time."""

    def __init__(self, way: Way, spoil: Callable[[ServerClient, PolicyWeights], Any]) -> None:
        self.way, self.spoil, self.times = way, spoil, 0

    async def load(
        self, client: ServerClient, weights: PolicyWeights, name: str, *, keep_cache: bool, limit_s: float
    ) -> None:
        self.times += 1
        if self.times == 1:
            weights = await self.spoil(client, weights) or weights
        owner, _, number = name.split(".")
        name = f"{owner}.{weights.version}.{number}"
        await self.way.load(client, weights, name, keep_cache=keep_cache, limit_s=limit_s)

    def forget(self, client: ServerClient) -> None:
        self.way.forget(client)


async def _other_weights(client: ServerClient, weights: PolicyWeights) -> PolicyWeights:
    return Weights(weights.version, make_model(77))


async def _one_bit(client: ServerClient, weights: PolicyWeights) -> PolicyWeights:
    model = make_model(1)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    return Weights(weights.version, model)


async def _other_version(client: ServerClient, weights: PolicyWeights) -> PolicyWeights:
    return Weights(weights.version + 1, make_model(1))


async def _refused(client: ServerClient, weights: PolicyWeights) -> None:
    await client.post("update_weights_from_disk", {"model_path": "/nowhere", "load_format": "auto"}, 30)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_other_weights, "has checksum"),
        (_one_bit, "layers.1.mlp.gate_up_proj.weight has checksum"),
        (_other_version, ".32.2' after an update to policy version 31, which is"),
        (_refused, "update_weights_from_disk answered 400"),
    ],
    ids=["other weights", "one element", "other version", "refused"],
)
def test_a_server_that_did_not_take_the_weights_is_not_used_before_it_has(
    real: RealServer, models: list[Any], tmp_path: Path, spoil: Any, why: str
) -> None:
    told: list[str] = []
    engine = real.attach(tmp_path, way=Spoiled(by_disk(tmp_path), _nothing), told=told)
    engine.activate(Weights(30, models[0]))
    spoiled = Spoiled(by_disk(tmp_path), spoil)
    engine._fleet._way = spoiled
    real.slowly(0.02)
    asked = [GenerationRequest(request(6).prompt_tokens, replace(request().sampling, max_new_tokens=80), 0)]
    futures = engine.submit(asked)
    time.sleep(0.5)
    engine.activate(Weights(31, models[1]))
    real.slowly(None)
    assert spoiled.times == 2
    assert any(why in text and "did not take policy version 31" in text for text in told), told
    (done,) = results(futures)
    # What was being drawn when the update failed is not used: the whole response is of weights that were proven.
    assert (len(done.tokens), done.versions) == (80, (VersionSpan(0, 31),))
    assert done.logprobs == pytest.approx(reference_logprobs(models[1], asked[0], done), abs=EXACT)
    engine.close()


async def _nothing(client: ServerClient, weights: PolicyWeights) -> None:
    """Spoils nothing."""


def test_when_no_server_ever_takes_the_weights_it_says_so(real: RealServer, models: list[Any], tmp_path: Path) -> None:
    class Never(Spoiled):
        async def load(
            self, client: ServerClient, weights: PolicyWeights, name: str, *, keep_cache: bool, limit_s: float
        ) -> None:
            await _refused(client, weights)

    engine = real.attach(tmp_path, way=Never(by_disk(tmp_path), _refused))
    with pytest.raises(EngineError, match=r"did not take policy version 40: .* answered 400"):
        engine.activate(Weights(40, models[0]))
    engine.close()
    done = real.post("generate", input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
    assert done.status_code == 200, "it was continued all the same"
