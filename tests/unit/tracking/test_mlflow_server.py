"""A real MLflow server that dies in the middle and comes back: nothing is lost, nothing is logged twice."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from mlflow import MlflowClient
from test_follow_events import logged, run, write_steps  # noqa: F401 - a fixture

from milesbatch.store.run import OpenRun
from milesbatch.tracking import follow as following
from milesbatch.tracking.mlflow_tracker import MlflowTracker


class Server:
    """``mlflow server`` on one port and one database."""

    def __init__(self, place: Path) -> None:
        self._place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        database, artefacts = f"sqlite:///{self._place / 'server.db'}", self._place / "artefacts"
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", database, "--artifacts-destination", str(artefacts)]
        log = (self._place / "server.log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError((self._place / "server.log").read_text())

    def kill(self) -> None:
        subprocess.run(["pkill", "-KILL", "--session", str(self._process.pid)], check=False)
        self._process.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_server_that_dies_and_comes_back(
    run: OpenRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "_PAUSE_S", 0.5)
    server = Server(tmp_path)
    server.start()
    try:
        write_steps(run, 1, range(1, 4), range(0), None)
        follower = threading.Thread(
            target=following.follow, args=(run.layout, 1, lambda: MlflowTracker(run, 1, server.uri)), daemon=True
        )
        follower.start()
        client = MlflowClient(tracking_uri=server.uri)

        def steps() -> list[int]:
            experiment = client.get_experiment_by_name("milesbatch")
            runs = client.search_runs([experiment.experiment_id]) if experiment else []
            return [step for step, _ in logged(client, runs[0].info.run_id, "reward_mean")] if runs else []

        deadline_s = time.monotonic() + 120
        while steps() != [1, 2, 3]:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        server.kill()
        write_steps(run, 1, range(4, 7), range(0), None)
        time.sleep(5.0)
        server.start()
        write_steps(run, 1, range(7, 8), range(0), "finished")
        follower.join(120)
        assert not follower.is_alive()
        assert steps() == [1, 2, 3, 4, 5, 6, 7]
    finally:
        server.kill()
