"""Weights pushed to a real S3 server and pulled from it, over a wire that breaks, by processes that are killed."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from mirror_processes import pull_one, push_all
from mirror_runs import assert_holds, make_weights_run
from object_server import Environ, Server, is_commit
from typer.testing import CliRunner

from milesbatch.cli.weights import app
from milesbatch.errors import StorageError
from milesbatch.store.layout import RunLayout
from milesbatch.weights.listing import verify

ROWS = 90_000
"""A full copy has about 11 MiB: two parts of an upload, two ranges of a read."""
SPAWN = multiprocessing.get_context("spawn")
_count = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    fsspec.filesystem("s3", **server.client, skip_instance_cache=True).call_s3("create_bucket", Bucket="weights")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Versions 0 to 5 with keyframes at 0 and 4."""
    return make_weights_run(tmp_path_factory.mktemp("runs") / "run", range(6), ROWS)


@pytest.fixture
def url(server: Server) -> str:
    server.wire.requests.clear()
    return f"s3://weights/runs/{next(_count)}"


def gets(part: str) -> Callable[[Environ], bool]:
    return lambda environ: environ["REQUEST_METHOD"] == "GET" and part in environ["PATH_INFO"]


def slow(environ: Environ) -> bool:
    """Never breaks anything, but gives time to kill who asks."""
    if "safetensors" in environ["PATH_INFO"]:
        time.sleep(0.05)
    return False


def objects(server: Server, url: str) -> list[str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = fsspec.filesystem("s3", **server.client).call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)
    return [entry["Key"].removeprefix(f"{prefix}/") for entry in found.get("Contents", [])]


def test_there_and_back(server: Server, run: RunLayout, url: str, tmp_path: Path) -> None:
    assert [one.version for one in push_all(run, url, server.client)] == list(range(6))
    assert any("uploadId" in request for request in server.wire.requests), "in parts"
    server.wire.requests.clear()
    found = pull_one(url, server.client, tmp_path / "here", 5)
    assert (found.files, found.damage) == (2, ())
    read = [request for request in server.wire.requests if ".safetensors" in request]
    assert len([request for request in read if "000004/keyframe" in request]) == 2, "in ranges"
    assert {request.split("/")[-2] for request in read} == {"000004", "000005"}, "nothing else is fetched"
    assert_holds(tmp_path / "here", 5, ROWS)
    assert list(verify(RunLayout(tmp_path / "here"))) == []
    server.wire.requests.clear()
    assert all(one.was_there for one in push_all(run, url, server.client))
    assert not any(request.startswith(("PUT", "POST", "DELETE")) for request in server.wire.requests)


def test_lost_replies_of_commits_change_nothing(server: Server, run: RunLayout, url: str, tmp_path: Path) -> None:
    with server.wire.trouble("cut_after", lambda e: is_commit(e) and next(flips) % 2 == 0, 1000) as trouble:
        flips = itertools.count()
        push_all(run, url, server.client)
    assert trouble.fired > 5
    pull_one(url, server.client, tmp_path / "here", 5)
    assert_holds(tmp_path / "here", 5, ROWS)


@pytest.mark.parametrize("action", ["cut_before", "reset_after", "503_before"])
def test_a_server_that_stops_in_the_middle_is_asked_again(
    server: Server, run: RunLayout, url: str, tmp_path: Path, action: str
) -> None:
    push_all(run, url, server.client)
    with server.wire.trouble(action, gets("safetensors"), 2) as trouble:
        pull_one(url, server.client, tmp_path / "here", 5)
    assert trouble.fired == 2
    assert_holds(tmp_path / "here", 5, ROWS)


def test_a_server_that_stays_away_gives_one_error_and_the_next_pull_goes_on(
    server: Server, run: RunLayout, url: str, tmp_path: Path
) -> None:
    push_all(run, url, server.client)
    with (
        server.wire.trouble("cut_before", gets("000005/delta"), 1000),
        pytest.raises(StorageError, match=r"000005/delta"),
    ):
        pull_one(url, server.client, tmp_path / "here", 5)
    assert not RunLayout(tmp_path / "here").weights_manifest(5).exists()
    assert list(verify(RunLayout(tmp_path / "here"))) == []
    assert pull_one(url, server.client, tmp_path / "here", 5).files == 1, "the keyframe was there"
    assert_holds(tmp_path / "here", 5, ROWS)


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_object_is_named_and_gone_around(
    server: Server, run: RunLayout, url: str, tmp_path: Path, how: str
) -> None:
    push_all(run, url, server.client)
    (key,) = [key for key in objects(server, url) if key.startswith("weights/000004/keyframe")]
    content = bytearray((run.root / key).read_bytes())
    content[9 << 20] ^= 1
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    arguments: dict[str, Any] = {"Bucket": bucket, "Key": f"{prefix}/{key}"}
    filesystem = fsspec.filesystem("s3", **server.client)
    if how == "gone":
        filesystem.call_s3("delete_object", **arguments)
    else:
        filesystem.call_s3("put_object", Body=bytes(content if how == "flipped" else content[:-1]), **arguments)
    found = pull_one(url, server.client, tmp_path / "here", 5)
    assert len(found.damage) == 1 and f"{url}/{key}" in found.damage[0]
    assert_holds(tmp_path / "here", 5, ROWS)


def kill_when(process: Any, is_time: Callable[[], bool]) -> None:
    """SIGKILL to a process once something has happened, or at its end."""
    process.start()
    deadline_s = time.monotonic() + 120
    while process.is_alive() and not is_time() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it was killed before it ended"


@pytest.mark.parametrize("part", ["partNumber=2", "000002/delta"])
def test_a_killed_push_is_gone_on_with(server: Server, run: RunLayout, url: str, tmp_path: Path, part: str) -> None:
    with server.wire.trouble("", slow):
        kill_when(
            SPAWN.Process(target=push_all, args=(run, url, server.client)),
            lambda: any(part in request for request in server.wire.requests),
        )
    there = set(objects(server, url))
    for key in [key for key in there if key.endswith("manifest.json")]:
        refs = json.loads((run.root / key).read_bytes())["files"]
        assert {key.replace("manifest.json", ref["path"]) for ref in refs} <= there
    before = [key for key in there if key.endswith(".safetensors")]
    server.wire.requests.clear()
    push_all(run, url, server.client)
    sent = [request for request in server.wire.requests if request.startswith(("PUT", "POST"))]
    assert not [key for key in before for request in sent if key in request], "what is there is not sent again"
    pull_one(url, server.client, tmp_path / "here", 5)
    assert_holds(tmp_path / "here", 5, ROWS)


@pytest.mark.parametrize("part", ["000004/keyframe", "000005/delta"])
def test_a_killed_pull_is_gone_on_with(server: Server, run: RunLayout, url: str, tmp_path: Path, part: str) -> None:
    push_all(run, url, server.client)
    server.wire.requests.clear()
    with server.wire.trouble("", slow):
        kill_when(
            SPAWN.Process(target=pull_one, args=(url, server.client, tmp_path / "here", 5)),
            lambda: any(part in request for request in server.wire.requests),
        )
    assert list(verify(RunLayout(tmp_path / "here"))) == []
    pull_one(url, server.client, tmp_path / "here", 5)
    assert_holds(tmp_path / "here", 5, ROWS)
    assert not [path for path in (tmp_path / "here").rglob(".tmp-*") if "weights" in path.parts]


def test_as_commands_with_the_credentials_of_the_environment(
    server: Server, run: RunLayout, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    endpoint = ["--endpoint", f"http://127.0.0.1:{server.port}"]
    result = CliRunner().invoke(app, ["push", str(run.root), url, *endpoint])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["pull", url, str(tmp_path / "here"), "--version", "4", "--json", *endpoint])
    assert result.exit_code == 0 and json.loads(result.stdout)["pulled"][0]["version"] == 4
    assert_holds(tmp_path / "here", 4, ROWS)
