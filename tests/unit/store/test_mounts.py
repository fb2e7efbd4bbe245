"""The kind of filesystem that a directory is on, from a mount table."""

from __future__ import annotations

from pathlib import Path

import pytest

from milesbatch.store.mounts import filesystem_kind, is_local

TABLE = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:2 - nfs4 server:/export/home rw,vers=4.2
31 30 0:41 / /home/me/fast rw - tmpfs tmpfs rw
32 22 0:42 / /scratch rw shared:4 master:2 - lustre mgs@tcp:/scratch rw
33 22 0:43 / /beegfs rw - beegfs beegfs_nodev rw
34 22 0:44 / /with\040space rw - fuse.sshfs host: rw
35 22 8:2 / /twice rw - ext4 /dev/sdb1 rw
36 22 0:45 / /twice rw - nfs server:/twice rw
a line that is not understood
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/var/lib/x", "ext4"),
        ("/home/me/runs/tiny", "nfs4"),
        ("/home/me/fast/runs", "tmpfs"),
        ("/homework", "ext4"),
        ("/scratch", "lustre"),
        ("/beegfs/runs", "beegfs"),
        ("/with space/runs", "fuse.sshfs"),
        ("/twice/runs", "nfs"),
    ],
)
def test_the_nearest_mount_counts(table: Path, place: str, kind: str) -> None:
    assert filesystem_kind(Path(place), table) == kind


def test_what_is_not_known_counts_as_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_kind(tmp_path, tmp_path / "no table") is None
    for kind in (None, "nfs4", "lustre", "beegfs", "fuse.sshfs", "9p", "virtiofs", "gpfs", "something new"):
        monkeypatch.setattr("milesbatch.store.mounts.filesystem_kind", lambda path, kind=kind: kind)
        assert not is_local(tmp_path)
    monkeypatch.setattr("milesbatch.store.mounts.filesystem_kind", lambda path: "xfs")
    assert is_local(tmp_path)


def test_this_machine_has_a_table() -> None:
    assert filesystem_kind(Path("/proc")) == "proc"
