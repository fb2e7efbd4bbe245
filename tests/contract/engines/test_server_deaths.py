"""Two real servers of one engine, which are killed, stopped and starved; and what is left when it is over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import (
    Weights,
    make_engine,
    make_model,
    reference_logprobs,
    request,
    results,
    settings_of,
    start_server,
)

from milesbatch.engines.sglang import serving
from milesbatch.engines.sglang.engine import SGLangEngine
from milesbatch.engines.sglang.serving import StartedServer
from milesbatch.errors import EngineError, InputError

EXACT = 1e-5
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
_UP_S = 400.0


class Pair:
    """An engine over two servers of its own, with little room for keys and values."""

    def __init__(self, directory: Path, model: Any) -> None:
        Weights(0, model).write_model(directory / "model")
        settings = settings_of(directory / "model", max_total_tokens=700)
        self.memory = directory / "memory"
        self.places = [
            StartedServer(f"server-{i}", settings, directory / f"server-{i}.log", self.memory) for i in range(2)
        ]
        self.told: list[str] = []
        self.engine: SGLangEngine = make_engine(
            self.places, directory / "staged", told=self.told, health_timeout_s=25.0, update_timeout_s=50.0
        )

    def processes(self, place: int) -> dict[int, str]:
        """Living processes of one server, its guard first: id -> command line or title."""
        process = self.places[place].process
        assert process is not None
        return descendants(process.guard.pid)

    def until_told(self, words: str, count: int) -> None:
        deadline_s = time.monotonic() + _UP_S
        while sum(words in text for text in self.told) < count:
            assert time.monotonic() < deadline_s, self.told
            time.sleep(0.2)

    def until_both_serve(self) -> None:
        deadline_s = time.monotonic() + _UP_S
        while any(server.state != "serving" for server in self.engine._fleet.servers):
            assert time.monotonic() < deadline_s, self.told
            time.sleep(0.2)


def descendants(root: int) -> dict[int, str]:
    parents, words = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, IndexError):
                continue
            if status[0] != "Z":
                parents[int(entry.name)], words[int(entry.name)] = int(status[1]), line
    found = {root: words.get(root, "")}
    while more := {pid: words[pid] for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, models: list[Any]) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"), models[0])
    pair.engine.activate(Weights(0, models[0]))
    pair.until_both_serve()
    yield pair
    pair.engine.close()


def server_of(processes: dict[int, str]) -> list[int]:
    return [pid for pid, words in processes.items() if "launch_server" in words and "guard" not in words]


def scheduler_of(processes: dict[int, str]) -> list[int]:
    return [pid for pid, words in processes.items() if words.startswith("sglang::scheduler")]


def all_of(processes: dict[int, str]) -> list[int]:
    return list(processes)[1:]


@pytest.mark.parametrize(
    ("victims", "number"),
    [(server_of, signal.SIGKILL), (scheduler_of, signal.SIGKILL), (all_of, signal.SIGSTOP)],
    ids=["server killed", "scheduler killed", "all stopped"],
)
def test_a_server_that_dies_under_requests_costs_no_token(
    pair: Pair, models: list[Any], victims: Callable[[dict[int, str]], list[int]], number: signal.Signals
) -> None:
    version = pair.engine.policy_version + 1
    pair.engine.activate(Weights(version, models[version % 4]))
    ups = sum("is up after" in text for text in pair.told)
    asked = [request(5, salt=i, seed=i, max_new_tokens=120) for i in range(16)]
    futures = pair.engine.submit(asked)
    time.sleep(0.5)
    processes = pair.processes(0)
    found = victims(processes)
    assert found, processes
    for pid in found:
        os.kill(pid, number)
    for wanted, done in zip(asked, results(futures, 300), strict=True):
        assert (len(done.tokens), done.finish_reason) == (120, "length")
        assert [span.version for span in done.versions] == [version]
        assert done.logprobs == pytest.approx(reference_logprobs(models[version % 4], wanted, done), abs=EXACT)
    pair.until_told("is up after", ups + 1)
    pair.until_both_serve()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes), "nothing of the old server is left"
    server = pair.engine._fleet.servers[0]
    assert server.version == version, "it has caught up"


def test_a_server_that_hangs_while_its_weights_change_is_told_and_replaced(pair: Pair, models: list[Any]) -> None:
    """Stopped is what computes: what answers HTTP does not notice."""
    version = pair.engine.policy_version + 1
    ups = sum("is up after" in text for text in pair.told)
    processes = pair.processes(0)
    for pid in scheduler_of(processes):
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    pair.engine.activate(Weights(version, models[version % 4]))
    assert time.monotonic() - began_s < pair.engine._options.update_timeout_s, "the other one serves them"
    asked = [request(5, salt=i, seed=i) for i in range(8)]
    for wanted, done in zip(asked, results(pair.engine.submit(asked), 30), strict=True):
        assert [span.version for span in done.versions] == [version]
        assert done.logprobs == pytest.approx(reference_logprobs(models[version % 4], wanted, done), abs=EXACT)
    pair.until_told(f"server-0 has been changing its weights to policy version {version} for", 1)
    pair.until_told("is up after", ups + 1)
    pair.until_both_serve()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes), "nothing of the old server is left"
    assert pair.engine._fleet.servers[0].version == version, "it has caught up"


def test_out_of_room_for_keys_and_values_requests_are_put_back_and_come_out_whole(
    pair: Pair, models: list[Any]
) -> None:
    version = pair.engine.policy_version + 1
    pair.engine.activate(Weights(version, models[0]))
    asked = [request(5, salt=i % 2, seed=i, max_new_tokens=240) for i in range(16)]
    for wanted, done in zip(asked, results(pair.engine.submit(asked), 300), strict=True):
        assert len(done.tokens) == 240
        assert done.logprobs == pytest.approx(reference_logprobs(models[0], wanted, done), abs=EXACT)


def test_requests_with_one_prompt_go_to_one_server(pair: Pair, models: list[Any]) -> None:
    pair.engine.activate(Weights(pair.engine.policy_version + 1, models[0]))
    before = pair.engine._prompted, pair.engine._cached
    for _ in range(3):
        results(pair.engine.submit([request(60, salt=i, max_new_tokens=2) for i in range(4)]))
    sticky = pair.engine._fleet._sticky
    homes = [sticky[request(60, salt=i).prompt_tokens].name for i in range(4)]
    assert sorted(homes) == ["server-0", "server-0", "server-1", "server-1"], "new ones go to the one with fewer"
    prompted, cached = pair.engine._prompted - before[0], pair.engine._cached - before[1]
    assert cached > 0.5 * prompted, "two of three found their prompt in the cache"


def test_closing_leaves_no_process_and_no_memory(tmp_path: Path, pair: Pair) -> None:
    """The last one of the module: ends the pair."""
    processes = {**pair.processes(0), **pair.processes(1)}
    assert len(processes) >= 6
    pair.engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert not pair.memory.exists()


def test_a_start_that_fails_says_why_in_the_servers_words(tmp_path: Path, models: list[Any]) -> None:
    model = make_model(0)
    Weights(0, model).write_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such"}')
    place = StartedServer("server-0", settings_of(tmp_path / "model"), tmp_path / "log", tmp_path / "memory")
    told: list[str] = []
    engine = make_engine([place], tmp_path / "staged", told=told)
    with pytest.raises(EngineError, match=r"server-0 ended \(exit status 1\): (.|\n)*no_such"):
        engine.await_server()
    assert sum("ended (exit status 1)" in text for text in told) == 3, "it was tried three times"
    engine.close()


def test_without_the_environment_it_says_what_to_do(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    place = StartedServer("server-0", settings, tmp_path / "log", tmp_path / "memory")
    object.__setattr__(settings, "python", tmp_path / "nowhere" / "python")
    engine = make_engine([place], tmp_path / "staged")
    with pytest.raises(InputError, match=r"nowhere/python is not there(.|\n)*make sglang-cpu"):
        engine.await_server()
    engine.close()


def test_a_port_that_is_taken_meanwhile_is_given_up(
    tmp_path: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another SGLang server sits at the first port: it has another key, and is not taken for the new one."""
    first = start_server(tmp_path / "first", models[0])
    taken = int(first.place.url.rpartition(":")[2])
    ports = iter([taken])
    real_choice = serving.free_port
    monkeypatch.setattr(serving, "free_port", lambda: next(ports, None) or real_choice())
    second = start_server(tmp_path / "second", models[1])
    assert second.place.url != first.place.url
    asked = request(temperature=0.0)
    for server, model in ((first, models[0]), (second, models[1])):
        (done,) = results(server.owner.submit([asked]))
        assert done.logprobs == pytest.approx(reference_logprobs(model, asked, done), abs=EXACT)
    first.owner.close()
    second.owner.close()
