"""A replay whose trajectory files are damaged: route around it, or say exactly why that is not possible.

In bitwise mode a group is a pure function of (weights of its version, seeds), so it can be generated again; that the new
content is what was trained on is proven by the content digest in the batch record. In relaxed mode nothing can give
the same samples again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from milesbatch.errors import CorruptArtefactError, DivergenceError
from milesbatch.records import BatchRecord, GroupRef
from milesbatch.store.durable import move_to_quarantine
from milesbatch.store.layout import RunLayout
from milesbatch.store.sight import AT_ONCE, Sight
from milesbatch.trajectories.groups import replacement
from milesbatch.trajectories.reader import verify_trajectories


def restore_groups(
    layout: RunLayout,
    record: BatchRecord,
    is_bitwise: bool,
    regenerate: Callable[[tuple[int, ...]], tuple[GroupRef, ...]],
    sight: Sight = AT_ONCE,
) -> tuple[GroupRef, ...]:
    """The trained groups of ``record`` as references to whole files, in its order.

    A damaged file is moved to quarantine; a missing one, or a part of one, is looked at for as long as ``sight`` says before
    it is lost. ``regenerate`` has groups generated again and returns where they are.

    Raises:
        CorruptArtefactError: a file is lost and the run is not bitwise; names the file.
        DivergenceError: a group that was generated again is not what was trained on.
    """
    lost = _lost_files(layout, record, sight)
    if not lost:
        return record.trained
    missing = [group for group in record.trained if group.path in lost]
    if not is_bitwise:
        raise CorruptArtefactError(
            f"step {record.step} cannot be replayed: {'; '.join(lost.values())}",
            mend="put the file back from a copy; without `determinism: bitwise` its samples cannot be generated again",
        )
    found = {group.group_id: replacement(layout, group) for group in missing}
    wanted = tuple(group_id for group_id, ref in found.items() if ref is None)
    if wanted:
        found.update({ref.group_id: ref for ref in regenerate(wanted)})
    return tuple(_same(record.step, group, found.get(group.group_id, group)) for group in record.trained)


def _same(step: int, recorded: GroupRef, found: GroupRef | None) -> GroupRef:
    if found is None or found.content != recorded.content:
        raise DivergenceError(
            f"group {recorded.group_id} of step {step} was generated again, but its content is"
            f" {None if found is None else found.content}, not {recorded.content} that was trained on",
            mend=f"put {recorded.path} back from a copy; look for a changed environment (processor, torch, reward)",
        )
    return found


def _lost_files(layout: RunLayout, record: BatchRecord, sight: Sight) -> dict[str, str]:
    """Files of the record that are missing or damaged, and how; damaged ones are moved out of the way."""
    lost: dict[str, str] = {}
    for name, digest in {(group.path, group.digest) for group in record.trained}:
        path = layout.trajectory(name)
        try:
            sight.until_seen(partial(verify_trajectories, path, digest))
        except CorruptArtefactError as error:
            lost[name] = error.what
            if path.exists():
                move_to_quarantine(path, layout.quarantine, error.what)
    return lost
