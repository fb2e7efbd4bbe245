"""A real server that splits the model over two processes: weights from disk and sent, proven alike in both ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import RealServer, Weights, reference_logprobs, request, results, start_server

from milesbatch.engines.sglang.groups import ByGroup
from milesbatch.engines.sglang.weights import FromDisk, Way, written_to

EXACT = 1e-5
RANKS = 2
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, models: list[Any]) -> Iterator[RealServer]:
    options: dict[str, Any] = {"tensor_parallel": RANKS, "max_running": 8}
    server = start_server(tmp_path_factory.mktemp("split"), models[0], engine={"expects": False}, **options)
    yield server
    server.owner.close()


def ways(memory: Path) -> dict[str, Way]:
    return {"disk": FromDisk(written_to(memory)), "sent": ByGroup("127.0.0.1", 20_000, RANKS)}


def checksums(server: RealServer) -> list[dict[str, str]]:
    """Of each rank."""
    ranks = server.post("weights_checker", action="checksum").json()["ranks"]
    return [dict(rank["checksums"]) for rank in ranks]


def test_from_disk_and_sent_both_ranks_have_the_same(split: RealServer, models: list[Any], tmp_path: Path) -> None:
    found: dict[tuple[str, int], list[dict[str, str]]] = {}
    for name, way in ways(tmp_path).items():
        engine = split.attach(tmp_path, way=way, expects=False)
        for version in (1, 2):
            engine.activate(Weights(version, models[version]))
            found[name, version] = checksums(split)
            asked = [request(9, salt=salt, temperature=0.0, max_new_tokens=20) for salt in range(3)]
            for wanted, done in zip(asked, results(engine.submit(asked)), strict=True):
                assert [span.version for span in done.versions] == [version]
                assert done.logprobs == pytest.approx(reference_logprobs(models[version], wanted, done), abs=EXACT)
        engine.close()
    for version in (1, 2):
        assert found["disk", version] == found["sent", version]
        first, second = found["disk", version]
        assert set(first) == set(second)
        split_up = {name for name in first if first[name] != second[name]}
        assert any("qkv_proj" in name for name in split_up), "each rank has a part of its own"
        assert any("norm" in name for name in set(first) - split_up), "what is not split is the same in both"
    assert found["disk", 1] != found["disk", 2]


def test_new_weights_in_the_middle_reach_both_ranks(split: RealServer, models: list[Any], tmp_path: Path) -> None:
    engine = split.attach(tmp_path, way=ways(tmp_path)["sent"], expects=False, pause="in_place")
    engine.activate(Weights(10, models[0]))
    split.slowly(0.02)
    asked = request(7, max_new_tokens=120)
    (future,) = engine.submit([asked])
    time.sleep(1.0)
    engine.activate(Weights(11, models[1]))
    split.slowly(None)
    done = future.result(120)
    assert [span.version for span in done.versions] == [10, 11]
    before = done.versions[1].start
    assert done.logprobs[:before] == pytest.approx(reference_logprobs(models[0], asked, done)[:before], abs=EXACT)
    engine.close()
