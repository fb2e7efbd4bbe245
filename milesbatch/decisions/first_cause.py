"""Which of several deaths is the cause and which are symptoms, and what a person can try. Pure.

Ranks of one torch.distributed job take each other along: the one that was killed says nothing, the others say that a peer went
away. A death by signal or by refused input therefore comes before one that ended with an error of its own, and where only
such errors are seen, the others get a moment to show theirs (:func:`may_be_symptom`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from milesbatch.errors import EXIT_NO_RESTART, EXIT_USAGE

_ANY_CASE = re.IGNORECASE
_REMEDIES: tuple[tuple[str, re.RegexFlag, str], ...] = (
    (
        r"(CUDA|HIP) out of memory",
        _ANY_CASE,
        "the GPU is too small for this: fewer rollout.max_concurrent_samples, trainer.gradient_checkpointing: true, more"
        " ranks, or shorter responses",
    ),
    (
        r"out of memory|oom[ _-]?kill|can't allocate memory|\bMemoryError\b",
        _ANY_CASE,
        "the machine's memory is too small for this: more of it (slurm.trainer.memory_gib, slurm.rollout.memory_gib),"
        " fewer processes on a node, or fewer rollout.max_concurrent_samples",
    ),
    (
        r"No space left|no space or quota",
        re.NOFLAG,
        "make room on that filesystem, or raise the quota; the same run then goes on",
    ),
    (r"Read-only file system", re.NOFLAG, "have the filesystem mended; the same run then goes on"),
    (
        r"ModuleNotFoundError|No module named",
        re.NOFLAG,
        "install the package in the environment of the compute nodes (`python` in the site file)",
    ),
    (
        r"\bNCCL\b|nccl(System|Internal)Error",
        re.NOFLAG,
        "`milesbatch doctor --site SITE --gpus N` tests NCCL; NCCL_DEBUG=INFO in the site's environment says more",
    ),
    (
        r"no kernel image|CUDA driver version|CUDA error",
        re.NOFLAG,
        "torch's CUDA build and the node's driver or GPU do not fit: see `milesbatch doctor --site SITE --gpus N`",
    ),
    (
        r"SIGBUS",
        re.NOFLAG,
        "a file that was mapped into memory was cut or could not be read: look for a full or broken disk, /dev/shm too",
    ),
    (
        r"SIGSEGV|SIGABRT|SIGILL|SIGFPE",
        re.NOFLAG,
        "a native library crashed: its stack is in the log; another version of that library may help",
    ),
    (r"Permission denied", re.NOFLAG, "give the user of the job the right to that path"),
    (
        r"no heartbeat|no progress",
        re.NOFLAG,
        "it hung, or its node did: see the end of its log; a longer slurm.hang_s if it was only slow",
    ),
)


def first_cause(ended: Mapping[str, int]) -> list[str]:
    """Names of processes that were found dead together, exit status by name: the likeliest cause first.

    >>> first_cause({"trainer-0": 1, "trainer-1": -9})
    ['trainer-1', 'trainer-0']
    """

    def rank(name: str) -> int:
        code = ended[name]
        return 0 if code < 0 else 1 if code in (EXIT_USAGE, EXIT_NO_RESTART) else 2

    return sorted(ended, key=rank)


def may_be_symptom(code: int) -> bool:
    """An error of its own, which a lost peer causes too."""
    return code > 0 and code not in (EXIT_USAGE, EXIT_NO_RESTART)


def what_to_try(*texts: str) -> str:
    """A remedy for what the reason and the log's lines say; empty when nothing in them is known."""
    for text in texts:
        for pattern, flags, remedy in _REMEDIES:
            if re.search(pattern, text, flags):
                return remedy
    return ""
