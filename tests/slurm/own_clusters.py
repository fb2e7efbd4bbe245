"""Clusters for tests: made in short folders, ended by a later session when the one that made them was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from devcluster.cluster import Cluster, Settings
from devcluster.processes import look

# Folders of clusters are short, for sockets are in them, and open to other users, as whom tests submit too.
_PREFIX = "milesbatch-cluster-"
SETTINGS = Settings()


def new_cluster() -> Cluster:
    """A cluster of its own, not started."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    own = look(os.getpid())
    assert own is not None
    made = Cluster(folder)
    with made.folder.locked():
        (folder / "owner").write_text(f"{own.pid} {own.started}")
    return made


def end_abandoned() -> None:
    """End the clusters of test processes that were killed."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            pid, started = map(int, (folder / "owner").read_text().split())
        except FileNotFoundError:  # another session was quicker
            continue
        owner = look(pid)
        if owner is None or owner.started != started:
            Cluster(folder).down()
            shutil.rmtree(folder, ignore_errors=True)
