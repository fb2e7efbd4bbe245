"""The doctor on a real Slurm: a healthy cluster, mistakes in a site file, a directory that nodes do not see, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from devcluster.cluster import Cluster

SITE = """name: dev
trainer: {partition: trainer}
rollout: {partition: rollout}
warning_s: 30
environment: {GLOO_SOCKET_IFNAME: lo}
"""


@pytest.fixture
def shared(cluster: Cluster, tmp_path: Path) -> Path:
    """A directory that is the same on all nodes, for they are one machine."""
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def start(cluster: Cluster, shared: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "milesbatch.cli.main", "doctor", "--run-dir", str(shared), *words]
    if "--site" not in words:
        command += ["--site", str(shared.parent / "site.yaml")]
    return subprocess.Popen(
        command,
        env={**os.environ, **cluster.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job's children ignore Ctrl-C; a person's do not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def checks(cluster: Cluster, shared: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the checks by name."""
    process = start(cluster, shared, "--json", *words)
    said, errors = process.communicate(timeout=240)
    assert said, errors
    return process.returncode, {check["name"]: check for check in json.loads(said)["checks"]}


def names(found: dict[str, dict[str, Any]], levels: Sequence[str]) -> set[str]:
    return {name for name, check in found.items() if check["area"] in ("slurm", "nodes") and check["level"] in levels}


def is_clean(cluster: Cluster, shared: Path) -> bool:
    """Nothing of the doctor is left: no job, no process of one, no file."""
    return not list(shared.iterdir()) and all(job.has_ended for job in cluster.jobs())


def test_a_healthy_cluster(cluster: Cluster, shared: Path) -> None:
    code, found = checks(cluster, shared)
    assert names(found, ["bad", "not checked"]) == set()
    assert names(found, ["warn"]) <= {"throughput from node to node"}, "this machine may be busy"
    assert code == 0
    assert {"jobs of shape het", "jobs of shape single", "jobs of shape separate", "rollout partition rollout"} <= set(
        found
    )
    assert "30 races, one winner each" in found["exclusive creation from two nodes"]["found"]
    assert found["a sum over both nodes"]["found"].startswith("gloo: ")
    assert is_clean(cluster, shared)


def test_settings_of_the_cluster_are_seen(cluster: Cluster, shared: Path) -> None:
    from dataclasses import replace

    cluster.up(replace(cluster.settings, send_user_signal=False, cred_expire_s=77))
    code, found = checks(cluster, shared, "--no-job")
    assert found["preemption"]["level"] == "warn" and "after 77 s" in found["requeue"]["found"]
    assert names(found, ["not checked"]) == {"two nodes"} and code == 0


def test_a_partition_that_does_not_exist(cluster: Cluster, shared: Path) -> None:
    (shared.parent / "site.yaml").write_text(SITE.replace("partition: rollout", "partition: nosuch"))
    code, found = checks(cluster, shared)
    assert code == 1
    assert names(found, ["bad"]) == {"rollout partition nosuch", "jobs of shape het", "jobs of shape separate"}
    assert "high, rollout, rollout_cancel, trainer" in found["rollout partition nosuch"]["meaning"]


def test_nodes_without_milesbatch(cluster: Cluster, shared: Path) -> None:
    bare = shared.parent / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S -c "import $1" \n')
    bare.chmod(0o755)
    (shared.parent / "site.yaml").write_text(SITE + f"python: {bare}\n")
    code, found = checks(cluster, shared)
    assert code == 1 and "No module named 'milesbatch'" in found["two nodes"]["found"]
    assert is_clean(cluster, shared)


def test_no_node_is_free(cluster: Cluster, shared: Path) -> None:
    for name in cluster.settings.node_names:
        cluster.drain_node(name)
    code, found = checks(cluster, shared, "--wait", "3")
    assert code == 0 and names(found, ["warn"]) == {
        "jobs of shape het",
        "jobs of shape single",
        "jobs of shape separate",
    }
    assert found["two nodes"]["level"] == "not checked" and "did not start within 3 s" in found["two nodes"]["found"]
    assert is_clean(cluster, shared)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_takes_the_job_away(cluster: Cluster, shared: Path, number: signal.Signals) -> None:
    process = start(cluster, shared)
    assert process.stderr is not None
    while "it runs" not in process.stderr.readline():
        assert process.poll() is None, "it ended before its job ran"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert is_clean(cluster, shared)
