"""Whole runs with real SGLang servers on the CPU: they learn, are killed at random, go on, and audit clean."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from command import QUICK, Command, digests, events, fates, kill, milesbatch, wait_until
from site_router import SiteRouter
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from milesbatch.engines.sglang.serving import StartedServer
from milesbatch.engines.sglang.settings import ServerSettings
from milesbatch.models.tokenizer import make_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "tiny-sglang.yaml"
PYTHON_OF_SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
PYTHON = f"rollout.sglang.python={PYTHON_OF_SGLANG}"
pytestmark = pytest.mark.long


def processes_of(run: Path) -> dict[int, str]:
    """Living processes with the run's directory in their environment, and what they started: id -> command line.

    SGLang's processes write their title over their environment; they are found by their parents.
    """
    found, words, parents = {}, {}, {}
    wanted = f"MILESBATCH_ROLE_RUN_DIRECTORY={run}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                pid, line = int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if status[0] != "Z":
                    parents[pid], words[pid] = int(status[1]), line
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[pid] = line
            except (OSError, IndexError):
                continue
    while more := {pid: words[pid] for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def is_the_same(pid: int, line: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() == line != ""
    except OSError:
        return False


def steps(run: Path) -> int:
    return len(list((run / "batches").glob("[0-9]*.json")))


def rewards(run: Path) -> list[float]:
    return [event["metrics"]["reward_mean"] for event in events(run, "trainer-0", "train_step")]


def check_sound(run: Path, cache: Path, count: int) -> None:
    audited = milesbatch("audit", run, cache=cache)
    assert audited.code == 0, audited.out
    assert "sound: no violation" in audited.out
    assert len(digests(run)) == count + 1
    assert fates(run)
    for path in (run / "trajectories").glob("*.arrow"):
        for row in rows_of(path):
            check_row(row)


def check_row(row: dict[str, Any]) -> None:
    assert row["finish_reason"] in ("stop", "length")
    assert row["response_tokens"] == len(row["tokens"]) - row["prompt_tokens"] > 0
    assert row["versions"][0]["start"] == row["prompt_tokens"]
    assert all(logprob < 0 for logprob in row["logprobs"][row["prompt_tokens"] :])


def check_nothing_left(run: Path, before: Mapping[int, str]) -> None:
    """``before``: processes of the run when it was still running."""
    wait_until(lambda: not processes_of(run), "no process of the run is left", timeout_s=60)
    wait_until(lambda: not [pid for pid in before if is_the_same(pid, before[pid])], "none of before is", timeout_s=60)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    left = [path for path in Path("/dev/shm").glob(f"milesbatch-*/{run_id}.*")]
    assert left == []


@pytest.mark.timeout(3000)
def test_it_learns_though_killed_at_random(cache: Path, tmp_path: Path) -> None:
    """Everything by SIGKILL, then a server, a scheduler and a worker: it goes on, and the policy has learned in the end."""
    run = tmp_path / "run"
    moments = random.Random(4)
    arguments = ("run", TINY, "--run-dir", run, "--set", PYTHON, "--set", "steps=32")
    for _ in range(2):
        command = Command(*arguments, cache=cache)
        before = steps(run)
        wait_until(lambda before=before: steps(run) > before + 2, "some steps more", timeout_s=900)
        time.sleep(moments.uniform(0, 15))
        running = processes_of(run)
        command.kill_everything()
        check_nothing_left(run, running)
    command = Command(*arguments, cache=cache)
    for words in ("sglang::scheduler", "-m sglang.launch_server", "-m milesbatch.rollout"):
        before = steps(run)
        wait_until(lambda before=before: steps(run) > before + 2, "some steps more", timeout_s=900)
        time.sleep(moments.uniform(0, 10))
        victims = [pid for pid, line in processes_of(run).items() if words in line and "sglang.guard" not in line]
        assert victims, processes_of(run)
        kill(moments.choice(victims))
    running = processes_of(run)
    ended = command.wait(2000)
    assert ended.code == 0, ended.err
    check_nothing_left(run, running)
    check_sound(run, cache, 32)
    found = rewards(run)
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + 0.15, found
    told = [event["text"] for index in (0, 1) for event in events(run, f"rollout-{index}", "engine_server")]
    assert any("ended (killed by signal" in text or "generated nothing" in text for text in told), told


EVALUATION = """
evaluation:
  prompts: {kind: arithmetic, min_operand: 10, max_operand: 19}
  num_prompts: 6
  every_steps: 4
  max_new_tokens: 8
"""


def shorter(place: Path, more: str = "", **rollout: Any) -> Path:
    """The quick recipe with one worker that has a server on the CPU."""
    path = place / "recipe.yaml"
    section = {"workers": 1, "staleness": 0, "engine": "sglang", "sglang": {"device": "cpu", "max_total_tokens": 4096}}
    section["sglang"] |= {"python": str(PYTHON_OF_SGLANG), **rollout}  # type: ignore[operator]
    path.write_text(
        f"extends: {QUICK}\nname: quick-sglang\ndeterminism: relaxed\nrollout: {json.dumps(section)}\n{more}"
    )
    return path


def check_trainer_agrees(run: Path, count: int) -> None:
    """Without staleness each step trains on what its own policy drew: what differs is the arithmetic of the two sides."""
    seen = events(run, "trainer-0", "train_step")
    assert len(seen) == count
    for event in seen:
        assert event["metrics"]["lag_max"] == 0
        assert event["metrics"]["logprob_difference_max"] < 1e-5, event["metrics"]
        assert event["metrics"]["ratio_max"] == pytest.approx(1, abs=1e-5)


def rows_of(path: Path) -> list[dict[str, Any]]:
    with pa.OSFile(str(path)) as source:
        return pa.ipc.open_file(source).read_all().to_pylist()  # type: ignore[no-any-return]


def policy(run: Path, version: int, place: Path, cache: Path) -> Any:
    """A policy version as transformers loads it."""
    directory = place / f"version-{version}"
    ended = milesbatch("weights", "materialize", run, "--version", str(version), "-o", directory, cache=cache)
    assert ended.code == 0, ended.err
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def logprobs_of(model: Any, row: dict[str, Any]) -> list[float]:
    ids = torch.tensor([row["tokens"]])
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], dim=-1)
    return table[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[row["prompt_tokens"] - 1 :].tolist()  # type: ignore[no-any-return]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("transport", "parallel"), [("delta", 1), ("both", 2)])
def test_the_trainers_logprobs_are_the_servers(cache: Path, tmp_path: Path, transport: str, parallel: int) -> None:
    """A short run with evaluation, split over two processes once; the logprobs that the trainer computes under the version
    that drew a token are those of the server."""
    run = tmp_path / "run"
    recipe = shorter(tmp_path, EVALUATION + f"weights: {{transport: {transport}}}\n", tensor_parallel=parallel)
    ended = milesbatch("run", recipe, "--run-dir", run, cache=cache)
    assert ended.code == 0, ended.err
    check_nothing_left(run, {})
    check_sound(run, cache, 8)
    check_trainer_agrees(run, 8)
    sources = {event["source"] for event in events(run, "rollout-0", "weights_activated")}
    assert sources == ({"files"} if transport == "delta" else {"files", "broadcast"})
    check_evaluations(run, tmp_path, cache)
    if transport == "delta":
        check_evaluation_by_hand(run, cache)


def check_evaluations(run: Path, place: Path, cache: Path) -> None:
    """Each was answered by a server of the evaluator's own, with the weights of its version, greedily."""
    texts = [event["text"] for event in events(run, "evaluation-0", "engine_server")]
    assert sum("evaluation-0.server-0 is up" in text for text in texts) == 1, texts
    assert [path.parent.name for path in sorted(run.glob("evaluations/*/*.json"))] == ["000000", "000004", "000008"]
    for version in (4, 8):  # the first is retired by then
        model = policy(run, version, place, cache)
        (path,) = run.glob(f"evaluations/{version:06d}/*.arrow")
        rows = rows_of(path)
        assert len(rows) == 6
        for row in rows:
            check_row(row)
            assert [span["version"] for span in row["versions"]] == [version]
            found = row["logprobs"][row["prompt_tokens"] :]
            assert found == pytest.approx(logprobs_of(model, row), abs=1e-5)


def check_evaluation_by_hand(run: Path, cache: Path) -> None:
    """What is missing is made again, and is what the run made."""
    (path,) = run.glob("evaluations/000008/*.json")
    before = json.loads(path.read_text())["figures"]
    for file in (run / "evaluations" / "000008").iterdir():
        file.unlink()
    ended = milesbatch("evaluate", run, "--json", cache=cache)
    assert ended.code == 0, ended.err
    assert ended.err.count("evaluating policy version") == 1
    (path,) = run.glob("evaluations/000008/*.json")
    after = json.loads(path.read_text())["figures"]
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
    check_nothing_left(run, {})
    ended = milesbatch("evaluate", run, "--every", "1", "--url", "http://127.0.0.1:9/x", cache=cache)
    assert ended.code == 2
    assert "is not the address of a server" in ended.err


def even_digits(place: Path) -> str:
    """Three steps of the model in ``place`` with a reward that random models differ in."""
    (place / "evenness.py").write_text(
        "def score(prompt, response):\n    return sum(c in '02468' for c in response) / (len(response) + 1)\n"
    )
    model = json.dumps({"kind": "pretrained", "path": str(place / "model")})
    return f"model: {model}\nsteps: 3\nenvironment: {{reward: 'evenness:score'}}\n"


@pytest.mark.timeout(1500)
def test_experts_are_trained_sampled_and_recorded(cache: Path, tmp_path: Path) -> None:
    """A mixture of experts: what the trainer publishes arrives in the server, and each token's experts are the router's."""
    run = tmp_path / "run"
    experts = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
    save_model(tmp_path / "model", Qwen3MoeForCausalLM, Qwen3MoeConfig, **experts)
    recipe = shorter(tmp_path, even_digits(tmp_path), routed_experts=True)
    ended = milesbatch("run", recipe, "--run-dir", run, cache=cache, path=tmp_path)
    assert ended.code == 0, ended.err
    check_sound(run, cache, 3)
    check_trainer_agrees(run, 3)
    assert len(set(digests(run))) == 4, "it learns something in each step"
    models = {version: policy(run, version, tmp_path, cache) for version in range(3)}
    seen = set()
    for path in sorted((run / "trajectories").glob("*.arrow")):
        for row in rows_of(path):
            version = row["versions"][0]["version"]
            check_experts(models[version], row)
            seen.add(version)
    assert seen == {0, 1, 2}
    shown = milesbatch("traj", "show", run, "--worst", "1", "--json", cache=cache)
    assert shown.code == 0, shown.err
    assert '"routed_experts": [' in shown.out


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def save_model(directory: Path, architecture: Any, config: Any, **more: Any) -> None:
    tokenizer = make_tokenizer("0123456789+-*= ", 64)
    torch.manual_seed(5)
    shape = SHAPE | {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    architecture(config(architectures=[architecture.__name__], **shape, **more)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def check_experts(model: Any, row: dict[str, Any]) -> None:
    entries = [np.frombuffer(entry, "<u2").reshape(2, 2) for entry in row["routed_experts"]]
    assert len(entries) == len(row["tokens"])
    assert (entries.pop() == 65535).all(), "after the last token nothing was drawn"
    with torch.no_grad():
        output = model(input_ids=torch.tensor([row["tokens"]]), use_cache=False, output_router_logits=True)
    best = torch.stack([layer.topk(2).indices for layer in output.router_logits], dim=1)[:-1]
    assert np.sort(np.stack(entries), axis=2).tolist() == best.sort(dim=2).values.tolist()


@pytest.mark.timeout(900)
def test_without_the_environment_nothing_starts(cache: Path, tmp_path: Path) -> None:
    ended = milesbatch(
        *("run", TINY, "--run-dir", tmp_path / "run", "--set", "rollout.sglang.python=/nowhere/python"), cache=cache
    )
    assert ended.code == 2
    assert "/nowhere/python cannot be run" in ended.err
    assert "make sglang-cpu" in ended.err
    assert not (tmp_path / "run" / "run.json").exists()
    assert not processes_of(tmp_path / "run")


KEY = "what-servers-of-the-site-want"


@contextmanager
def site_with_a_router(place: Path) -> Iterator[tuple[list[str], str]]:
    """Two servers with the model in ``place`` that somebody runs, and a router in front of them; their addresses."""
    settings = ServerSettings(
        PYTHON_OF_SGLANG, place / "model", "cpu", "float32", max_length=64, max_running=16, max_total_tokens=4096
    )
    servers = [StartedServer(f"site-{i}", settings, place / f"site-{i}.log", place / "site", key=KEY) for i in (0, 1)]

    async def start() -> None:
        clients = await asyncio.gather(*(server.open(900, lambda: None) for server in servers))
        await asyncio.gather(*(client.close() for client in clients))

    router = None
    try:
        asyncio.run(start())
        urls = [server.url for server in servers]
        router = SiteRouter.start(PYTHON_OF_SGLANG, urls, KEY, place / "router.log")
        yield urls, router.url
        assert all(server.process is not None and server.process.exit_code() is None for server in servers), (
            "servers of others are never ended"
        )
    finally:
        if router is not None:
            router.kill()
        for server in servers:
            server.leave(is_over=True)


@pytest.mark.timeout(1800)
def test_servers_and_a_router_that_a_site_runs(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_model(tmp_path / "model", Qwen3ForCausalLM, Qwen3Config, intermediate_size=48)
    (tmp_path / "key").write_text(KEY + "\n")
    with site_with_a_router(tmp_path) as (urls, router):
        where = {"urls": urls, "routers": [router], "key_file": str(tmp_path / "key")}
        evaluated = EVALUATION.replace("every_steps: 4", "every_steps: 3")
        recipe = shorter(tmp_path, even_digits(tmp_path) + evaluated, **where)
        ended = milesbatch("run", recipe, "--run-dir", run, cache=cache, path=tmp_path)
        assert ended.code == 0, ended.err
        check_sound(run, cache, 3)
        check_trainer_agrees(run, 3)
        for file in (run / "evaluations" / "000003").iterdir():
            file.unlink()
        ended = milesbatch("evaluate", run, "--url", urls[1], "--version", "3", cache=cache, path=tmp_path)
        assert ended.code == 0, ended.err
        (path,) = run.glob("evaluations/000003/*.arrow")
        assert len(rows_of(path)) == 6
    assert KEY not in "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())
