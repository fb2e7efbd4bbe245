"""Whose a job is, said in its comment: how a run's jobs are found in a queue that has many.

Owns the text of the comment. Never asks Slurm. Invariant: one directory and role have one mark, by whatever path they
are reached.
"""

from __future__ import annotations

from milesbatch.records import digest_bytes
from milesbatch.store.layout import RunLayout
from milesbatch.store.places import true_path


def mark(layout: RunLayout, role: str) -> str:
    """What the comment says. The directory's path may hold anything, so its digest stands for it."""
    tag = digest_bytes(str(true_path(layout.root)).encode()).removeprefix("xxh128:")[:16]
    return f"milesbatch:{tag}:{role}"
