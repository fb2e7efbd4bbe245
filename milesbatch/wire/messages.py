"""The controller's small HTTP interface: one frozen model for each message, shared by both ends. No I/O.

All requests are POST with JSON and the headers ``x-milesbatch-token`` and ``x-milesbatch-incarnation``; a process of
another incarnation gets 409 and stops. Requests that wait (``lease``, ``batch``, ``rendezvous``) are answered after a few
seconds at most; an empty answer means: ask again. Every request may be repeated safely.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from milesbatch.records import GroupRef, Rejection


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Heartbeat(Message):
    """Sent every ``slurm.heartbeat_s`` by every role process."""

    name: str
    attempt: int
    """Which start of this role it is; an older one than the controller's last is refused: it was given up."""
    host: str
    state: str
    """What it does: ``starting``, ``generating``, ``training``, ``waiting`` …; ``waiting`` is never a hang."""
    policy_version: int
    samples_in_flight: int
    activity: int
    """A counter that grows with progress of any kind; when it stands still for ``slurm.hang_s``, the process hangs."""
    warned: bool = False
    """Slurm has sent this process a SIGTERM: its job may be about to end. The controller asks Slurm about it."""
    trouble: str = ""
    """What it waits for that a person must mend (space on a disk), in words; empty when nothing."""
    servers: str = ""
    """Which of its inference servers do not work, and why (they are starting, say); empty when all do, or when it has none."""


class HeartbeatAnswer(Message):
    stop: bool
    published: int
    """Newest published policy version."""


class LeaseRequest(Message):
    name: str
    wait_s: float
    """How long the controller may hold the request; 0 asks without waiting."""
    holding: tuple[int, ...]
    """Blocks that the worker is at work on. One that it holds without knowing (the reply was lost) is given again."""
    policy_version: int = -1
    """What the worker goes on from; -1 before its first weights. Heard here sooner than with the next heartbeat, so that what
    an idle worker was about to begin with does not hold weights back that nobody needs."""


class LeaseAnswer(Message):
    """A block to work on, or nothing for now (``groups`` empty), or the end (``stop``)."""

    stop: bool = False
    is_over: bool = False
    """With ``stop``: the run is finished, and nobody needs what is begun."""
    block: int = -1
    groups: tuple[int, ...] = ()
    version: int = -1
    """Bitwise mode: the one version to use. Relaxed: the newest published one, to begin with."""
    step: int = 0
    """The first step that may train on these groups."""
    saved: tuple[str, ...] = ()
    """Relaxed mode: files in ``inflight/`` with what earlier incarnations began of this block, the first to be tried first."""


class CommitRequest(Message):
    """A block's trajectory file is durable and visible."""

    name: str
    block: int
    groups: tuple[GroupRef, ...]
    response_tokens: int
    generated_s: float
    errors: tuple[str, ...]
    """Errors of failed episodes, one text each."""
    episodes: int


class CommitReply(Message):
    accepted: bool


class BatchRequest(Message):
    """The trainer asks for the groups of its next step."""

    step: int
    wait_s: float


class BatchAnswer(Message):
    ready: bool
    stop: bool = False
    """Make no new record: take a checkpoint and end."""
    trained: tuple[GroupRef, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    missing: int = 0
    """Groups that are still missing."""
    unreachable: tuple[int, ...] = ()
    """Policy versions that a worker needs and cannot rebuild from the files: publish them again."""


class Recorded(Message):
    """Batch record ``step`` is committed: these groups have their fates."""

    step: int
    group_ids: tuple[int, ...]


class Published(Message):
    """Policy version is published (its manifest is committed)."""

    version: int


class StepDone(Message):
    """A train step is done: figures for people. ``replayed`` steps were computed before."""

    step: int
    replayed: bool
    metrics: dict[str, float]


class Checkpointed(Message):
    """A checkpoint is committed."""

    step: int
    seconds: float
    """From the beginning of the save to its commit: what a warning before the end of a job must leave time for."""


class CheckpointedAnswer(Message):
    oldest_held: int | None
    """Smallest policy version that a live rollout worker holds or goes on from; null while one is just starting: then
    nothing may be retired."""


class Finished(Message):
    """The last step is trained and its checkpoint is committed."""

    step: int


class RegenerateRequest(Message):
    """The trainer replays a step whose trajectory file is lost: these groups must be generated again (bitwise mode)."""

    groups: tuple[int, ...]
    wait_s: float


class RegenerateAnswer(Message):
    groups: tuple[GroupRef, ...]
    """The groups, once all of them are there; empty: ask again."""
    unreachable: tuple[int, ...] = ()
    """As in :class:`BatchAnswer`: perhaps the very version that must make these groups."""


class Unreachable(Message):
    """A worker cannot rebuild a policy version (damage on every way to it), or asks again whether that is mended."""

    name: str
    version: int
    what: str
    """What was found; empty: only asks."""
    wait_s: float


class UnreachableAnswer(Message):
    pending: bool
    """The version has not been published again yet: ask again."""


class UnreachableRequest(Message):
    """The trainer asks, when it starts, which policy versions it must publish again."""


class UnreachableVersions(Message):
    versions: tuple[int, ...]
    recorded: int
    """Newest batch record that this controller knows to be committed: a starting trainer looks for it until it sees it."""
    published: int
    """Newest policy version that it knows to be published."""


class PendingRequest(Message):
    """The trainer asks which groups are finished and have no fate, to name them in a checkpoint."""


class PendingAnswer(Message):
    groups: tuple[GroupRef, ...]


class Rendezvous(Message):
    """Ranks of one attempt meet: rank 0 says where its store listens, the others ask."""

    attempt: int
    address: str | None
    wait_s: float


class RendezvousAnswer(Message):
    address: str | None


class BroadcastPoll(Message):
    """A worker says that it can take part in a broadcast of weights, and asks for the next one."""

    process: str
    """``NAME.ATTEMPT``: a new start is another member."""
    after: int
    """The last round that it has heard of; -1: none."""
    wait_s: float


class BroadcastCall(Message):
    """Take part in this round; or nothing for now (``round`` -1): ask again."""

    round: int = -1
    generation: int = -1
    """Of the group: another one than the last means that a new group is made."""
    store: str = ""
    """``host:port`` of the group's store."""
    rank: int = 0
    size: int = 0
    """Workers and the trainer."""
    version: int = -1
    within_s: float = 0.0
    """When it must be over."""


class BroadcastMembersRequest(Message):
    """The trainer has published ``version`` and asks who can take it by broadcast."""

    version: int


class BroadcastMembers(Message):
    processes: tuple[str, ...]
    """``NAME.ATTEMPT`` of the workers that can, in a fixed order; empty when nobody needs the version that way."""


class BroadcastBegin(Message):
    """The trainer begins a round with these workers, as ranks 1, 2, 3 … of the group."""

    version: int
    processes: tuple[str, ...]
    generation: int
    """Of a group that exists; -1 for a new one."""
    store: str
    within_s: float


class BroadcastBegun(Message):
    round: int
    generation: int


class BroadcastEnd(Message):
    """The round is over, well or not."""

    round: int
    confirmed: tuple[str, ...] = ()
    """Processes that have the version now, and are ready for the next round."""


class BroadcastQuestion(Message):
    """A worker is to use a version: is it on its way to this process by broadcast?"""

    process: str
    version: int


class BroadcastAnswer(Message):
    round: int = -1
    """The round that brings it; -1: none does."""
    within_s: float = 0.0


class Ok(Message):
    ok: Literal[True] = True


class StatusAnswer(Message):
    """What only the controller knows, for `status` and the display."""

    state: str
    workers: tuple[dict[str, Any], ...]
    waiting_for: str
    ready_groups: int
    """Finished groups that wait for training."""
    stale_groups: int
    """How many of them are too old for the next step, which will reject them."""
    leased_groups: int
    """Handed out and not committed."""
    leases: int
    tokens_per_s: float
