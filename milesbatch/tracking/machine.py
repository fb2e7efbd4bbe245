"""Figures of the machine that the tracking process runs on: beside the controller, so the trainer's first node in a job.

Source of the values: https://psutil.readthedocs.io/
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def machine_figures(run_directory: Path) -> dict[str, float]:
    """Named ``system/…``: CPU and memory in percent, GiB free where the run lies; without what cannot be read."""
    memory = psutil.virtual_memory()
    figures = {
        "system/cpu_percent": psutil.cpu_percent(interval=None),
        "system/memory_percent": float(memory.percent),
        "system/memory_available_gib": memory.available / 2**30,
    }
    try:
        disk = os.statvfs(run_directory)
    except OSError:
        return figures
    return figures | {"system/disk_free_gib": disk.f_bavail * disk.f_frsize / 2**30}
