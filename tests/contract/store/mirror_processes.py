"""One push and one pull, to be run in processes that are killed: imports without torch, so that they start quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milesbatch.store.layout import RunLayout
from milesbatch.store.object_requests import Retries
from milesbatch.store.object_store import ObjectOptions, ObjectStore
from milesbatch.weights.mirror_pull import Pull, Pulled
from milesbatch.weights.mirror_push import Push, Pushed

OPTIONS = ObjectOptions(part_bytes=8 << 20, retries=Retries(3, 0.01, 0.02), connect_timeout_s=2.0, read_timeout_s=10.0)


def push_all(run: RunLayout, url: str, client: dict[str, Any]) -> list[Pushed]:
    push = Push(run, ObjectStore(url, client, OPTIONS))
    push.begin()
    return list(push.versions())


def pull_one(url: str, client: dict[str, Any], directory: Path, version: int) -> Pulled:
    pull = Pull(ObjectStore(url, client, OPTIONS), directory)
    with pull.taken():
        return pull.bring(version)
