"""Real Slurm for tests: ``cluster`` is a development cluster that belongs to this test process alone.

Tests that ask for it get healthy, idle nodes each time, and may break them in any way. It needs Debian's packages, and
installs them when they are missing (as root). A module whose tests share running jobs overrides ``healthy_nodes``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parents[2] / "slurm"))

from command import QUICK, milesbatch
from devcluster.cluster import Cluster, Settings
from own_clusters import SETTINGS, end_abandoned, new_cluster
from slurm_run import STEPS, SlurmRun


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes on a machine of unknown load: a time limit only ends what hangs."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Nodes ``n1`` to ``n8`` of 4 CPUs and 4 fake GPUs; partitions ``trainer``, ``rollout``, ``rollout_cancel``, ``high``."""
    end_abandoned()
    made = new_cluster()
    try:
        made.up(SETTINGS)
        yield made
    finally:
        made.down()
        if request.session.testsfailed:
            print(f"logs of the development cluster: {made.folder.root}", file=sys.stderr)
        else:
            shutil.rmtree(made.folder.root)


@pytest.fixture(autouse=True)
def healthy_nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that had the cluster: no job, all nodes idle, settings as at the start."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").clean(SETTINGS)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A local run that nothing happened to, with as many steps as those on the cluster."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    ended = milesbatch("run", QUICK, "--run-dir", run, "--set", f"steps={STEPS}", cache=cache)
    assert ended.code == 0, ended.err
    return run


@pytest.fixture
def new_run(cluster: Cluster, cache: Path, tmp_path: Path) -> Callable[..., SlurmRun]:
    """Makes a run that is not submitted yet, on the cluster with these settings (those that can be switched)."""

    def make(settings: Settings = SETTINGS) -> SlurmRun:
        cluster.up(settings)
        return SlurmRun(cluster, tmp_path / "run", cache)

    return make


@pytest.fixture
def slow_run(cache: Path, tmp_path: Path) -> Iterator[SlurmRun]:
    """A run on a cluster of its own that takes minutes to give a silent node up, as real ones do."""
    made = new_cluster()
    try:
        made.up(replace(SETTINGS, slurmd_timeout_s=120))
        yield SlurmRun(made, tmp_path / "run", cache)
    finally:
        made.down()
        shutil.rmtree(made.folder.root)
