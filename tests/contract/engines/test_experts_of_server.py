"""Mixture-of-experts models in a real server: their weights arrive, and each token's experts are those of its router."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_server import (
    EXPERTS,
    ROUTED,
    RealServer,
    Weights,
    make_experts_model,
    reference_logprobs,
    replayed_logprobs,
    request,
    results,
    start_server,
)

from milesbatch.engines.protocol import Completion, GenerationRequest
from milesbatch.engines.sglang.engine import SGLangEngine
from milesbatch.engines.sglang.groups import ByGroup
from milesbatch.engines.sglang.weights import PauseMode
from milesbatch.errors import EngineError, InputError
from milesbatch.models.experts import FileNames

EXACT = 1e-5
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass
class Moe:
    """One server of a mixture of experts, and what is served."""

    server: RealServer
    models: list[Any]
    names: FileNames
    memory: Path

    def engine(self, **options: Any) -> SGLangEngine:
        """Versions are sent to it, for they hold the experts of a layer in one tensor."""
        given = {"way": ByGroup("127.0.0.1", 2**20), "routed": ROUTED, "in_files": self.names.of}
        return self.server.attach(self.memory, **{**given, **options})


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moe]:
    directory = tmp_path_factory.mktemp("experts")
    models = [make_experts_model(seed) for seed in range(4)]
    Weights(0, models[0]).write_model(directory / "names")
    names = FileNames.of_model(directory / "names")
    server = start_server(directory, models[0], engine={"in_files": names.of}, routed_experts=True)
    yield Moe(server, models, names, directory / "staged")
    server.owner.close()


def numbers_of(done: Completion) -> list[list[list[int]] | None]:
    """For each token the experts by layer, sorted; None where they are not known."""
    assert done.experts is not None
    found: list[list[list[int]] | None] = []
    for entry in done.experts.entries():
        numbers = np.frombuffer(entry, "<u2").reshape(ROUTED)
        found.append(None if (numbers == 65535).all() else np.sort(numbers, axis=1).tolist())
        assert found[-1] is None or numbers.max() < EXPERTS
    return found


def routed(model: Any, tokens: tuple[int, ...]) -> list[list[list[int]]]:
    """Experts of each token by one full forward of transformers."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    best = torch.stack([layer.view(len(tokens), EXPERTS).topk(ROUTED[1]).indices for layer in logits], dim=1)
    return best.sort(dim=2).values.tolist()  # type: ignore[no-any-return]


def test_experts_are_those_of_the_router(moe: Moe) -> None:
    """Prompts that a server has in its cache, too: their experts are those of the first time."""
    engine = moe.engine()
    engine.activate(Weights(0, moe.models[0]))
    asked = [request(5 + 9 * (i % 3), salt=i % 3, seed=i, max_new_tokens=30) for i in range(9)]
    for wanted, done in zip(asked, results(engine.submit(asked)), strict=True):
        assert done.logprobs == pytest.approx(reference_logprobs(moe.models[0], wanted, done), abs=EXACT)
        found = numbers_of(done)
        assert found[-1] is None
        assert found[:-1] == routed(moe.models[0], wanted.prompt_tokens + done.tokens)[:-1]
    engine.close()


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_each_entry_is_of_the_weights_that_drew_the_next_token(moe: Moe, pause: PauseMode) -> None:
    engine = moe.engine(pause=pause)
    engine.activate(Weights(10, moe.models[0]))
    asked = [request(7, salt=i, max_new_tokens=150) for i in range(3)]
    moe.server.slowly(0.02)
    try:
        futures = engine.submit(asked)
        for number in (1, 2, 3):
            time.sleep(0.6)
            engine.activate(Weights(10 + number, moe.models[number]))
    finally:
        moe.server.slowly(None)
    models = {10 + number: model for number, model in enumerate(moe.models)}
    for wanted, done in zip(asked, results(futures), strict=True):
        assert [span.version for span in done.versions] == [10, 11, 12, 13]
        check_experts(models, wanted, done, pause)
    engine.close()


def check_experts(models: Mapping[int, Any], wanted: GenerationRequest, done: Completion, pause: str) -> None:
    whole, found = wanted.prompt_tokens + done.tokens, numbers_of(done)
    assert found.pop() is None
    prompt, last = len(wanted.prompt_tokens), done.versions[-1].start
    if pause == "retract":  # what was put back was computed again: of older tokens nobody knows any more
        assert found[: prompt + last - 1] == [None] * (prompt + last - 1)
        assert found[prompt + last - 1 :] == routed(models[13], whole)[prompt + last - 1 : -1]
        return
    assert None not in found
    if pause == "in_place":
        expected: list[Any] = []
        assert done.logprobs == pytest.approx(replayed_logprobs(models, wanted, done, expected), abs=EXACT)
        assert found == [[sorted(layer) for layer in entry] for entry in expected]
        return
    by_version = {version: routed(model, whole) for version, model in models.items()}
    for place, entry in enumerate(found):
        drawn = max(place + 1 - prompt, 0)
        version = next(span.version for span in reversed(done.versions) if span.start <= drawn)
        assert entry == by_version[version][place], (place, version)


def test_what_was_begun_keeps_its_experts_out_of_the_answer(moe: Moe) -> None:
    engine = moe.engine()
    engine.activate(Weights(0, moe.models[0]))
    asked = request(6, temperature=0.0, max_new_tokens=20)
    (whole,) = results(engine.submit([asked]))
    (rest,) = results(engine.submit([replace(asked, begun=whole.tokens[:8])]))
    assert rest.tokens == whole.tokens[8:]
    assert numbers_of(rest) == [None] * 13 + numbers_of(whole)[13:]
    engine.close()


def test_sent_and_from_disk_they_are_the_same(moe: Moe) -> None:
    found = []
    for options in ({}, {"way": None}):
        engine = moe.engine(**options)
        engine.activate(Weights(2, moe.models[2]))
        answer = moe.server.post("weights_checker", action="checksum").json()
        found.append(answer["ranks"][0]["checksums"])
        engine.close()
    assert found[0] == found[1]
    assert any("experts.w13_weight" in name for name in found[0])


def test_weights_that_the_server_does_not_know_by_name_are_no_silent_loss(moe: Moe) -> None:
    engine = moe.engine(in_files=None)
    with pytest.raises(EngineError, match=r"does not say that it has model\.layers\.0\.mlp\.experts\.down_proj"):
        engine.activate(Weights(3, moe.models[3]))
    engine.close()


def test_a_server_that_does_not_tell_experts_is_not_used(real: RealServer, tmp_path: Path) -> None:
    engine = real.attach(tmp_path, routed=ROUTED)
    with pytest.raises(InputError, match=r"does not tell which experts(.|\n)*--enable-return-routed-experts"):
        engine.await_server()
    engine.close()
