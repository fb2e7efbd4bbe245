"""Was a process killed for want of memory? Asked after its death; nothing is decided by it.

Two witnesses: the kernel's count of such kills on this machine (``oom_kill`` in ``/proc/vmstat``, Linux 4.13 and later; it
names nobody), and what Slurm's daemons write into the log of a step whose node is elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

_SLURM_SAYS = re.compile(r"^(srun|slurmstepd)\S*: .*(out of memory|oom[ _-]?kill)", re.IGNORECASE | re.MULTILINE)


class MemoryKills:
    """The kernel's count on this machine, and whether it has grown."""

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._vmstat = vmstat
        self._seen = self._count()

    def have_grown(self) -> bool:
        """Since the last time that this was asked."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        try:
            found = re.search(r"^oom_kill (\d+)$", self._vmstat.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0


def slurm_says_out_of_memory(log: str) -> bool:
    """Do Slurm's words in a step's log say so?"""
    return _SLURM_SAYS.search(log) is not None
