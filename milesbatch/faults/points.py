"""Named moments in the roles' work at which a fault can be injected. No I/O; imported by everything.

``point("trainer.recorded")`` is one comparison when no plan is set. The names in ``POINTS`` are an interface: fault plans use
them. Mutations of files are points of their own, named ``operation:kind`` (see :mod:`milesbatch.faults.operations`).
"""

from __future__ import annotations

from collections.abc import Callable

POINTS: dict[str, str] = {
    "controller.taken_over": "the incarnation record is committed; nothing was started yet",
    "controller.look": "the controller looks after its processes (many times a second)",
    "trainer.loaded": "the state is loaded, nothing was replayed yet",
    "trainer.recorded": "the batch record of a step is committed; the step has not computed",
    "trainer.trained": "the optimizer step is done; its version is not published",
    "trainer.published": "the policy version is published; no checkpoint of it exists",
    "trainer.checkpoint_started": "the state is copied; its shards are being written",
    "trainer.checkpoint_written": "the shards are written; the manifest is not committed",
    "trainer.checkpoint_committed": "the checkpoint's manifest is committed",
    "rollout.leased": "a lease was taken; nothing was generated",
    "rollout.activated": "new weights are active in the engine",
    "rollout.generated": "all samples of a lease are generated; nothing was written",
    "rollout.written": "the trajectory file is committed; the controller was not told",
    "rollout.committed": "the controller was told of the trajectory file",
    "rollout.saved": "unfinished episodes of a block are saved; earlier files of the block are still there",
    "broadcast.sending": "a bucket of a broadcast is about to be sent (trainer rank 0)",
    "broadcast.receiving": "a bucket of a broadcast was received; nothing of it is in use",
    "broadcast.received": "a broadcast version is proven and kept; the trainer was not told",
    "evaluation.generated": "all answers of an evaluation are generated; nothing was written",
    "wire.send": "a role is about to send a message to the controller",
}

_hook: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Say that the process is at ``name``."""
    if _hook is not None:
        _hook(name)


def set_hook(hook: Callable[[str], None] | None) -> None:
    """What happens at points from now on; None: nothing."""
    global _hook
    _hook = hook
