"""What ``make gallery`` refuses: each thing that its readers rely on may be missing, and is then named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parents[3]
VERDICT: dict[str, Any] = {"ok": True, "violations": [], "groups": {"trained": 8, "lost": 0, "repeated": 0}}
TILES = ["0.404 → 0.920", "sound", "2", "20,480", "0 %", "98 %"]
FAULTS = [
    "12:00:01\nrollout-1\ndied\nkilled by SIGKILL (injected fault “worker”)\nstarted again after 0.1 s, ready after 4 s",
    "12:00:09\ntrainer-0\ndied\nkilled by SIGKILL (injected fault “rank”)\nstarted again after 0.1 s, ready after 5 s",
]


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery"] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_well_is_accepted(gallery: ModuleType) -> None:
    gallery.check_status({"state": "finished"})
    gallery.check_audit(VERDICT)
    gallery.check_console([], "report")
    gallery.check_tiles(TILES)
    gallery.check_faults(FAULTS)


@pytest.mark.parametrize(
    ("check", "argument", "named"),
    [
        ("check_status", {"state": "stopped"}, "stopped"),
        ("check_audit", {**VERDICT, "ok": False, "violations": [{"kind": "lost"}]}, "not clean"),
        ("check_audit", {**VERDICT, "groups": {"trained": 8, "lost": 1, "repeated": 0}}, "lost or repeated"),
        ("check_audit", {**VERDICT, "groups": {"trained": 0, "lost": 0, "repeated": 0}}, "no trained group"),
        ("check_tiles", [*TILES[:5], "–"], "is missing"),  # noqa: RUF001 - the dash that the page shows
        ("check_tiles", TILES[:5], "5 figures"),
        ("check_tiles", ["not sound" if tile == "sound" else tile for tile in TILES], "sound"),
        ("check_faults", FAULTS[:1], "injected fault of trainer-0"),
        ("check_faults", [FAULTS[0], FAULTS[1].replace(" (injected fault “rank”)", "")], "injected fault of trainer-0"),
        ("check_faults", [FAULTS[0].replace("started again after 0.1 s, ready after 4 s", ""), FAULTS[1]], "rollout-1"),
    ],
)
def test_what_is_missing_is_named(gallery: ModuleType, check: str, argument: Any, named: str) -> None:
    with pytest.raises(SystemExit, match=named):
        getattr(gallery, check)(argument)


def test_a_message_in_the_console_is_named_with_the_picture(gallery: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"at the picture timeline: \['boom'\]"):
        gallery.check_console(["boom"], "timeline")


def test_a_fault_that_did_not_fire(gallery: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "fault.worker.fired").write_text("{}")
    with pytest.raises(SystemExit, match=r"two faults should have fired, found \['fault.worker.fired'\]"):
        gallery.check_run(tmp_path)


def test_an_empty_picture(gallery: ModuleType) -> None:
    with pytest.raises(SystemExit, match="the picture status is empty"):
        gallery.check_picture(Image.new("P", (200, 100)), "status")
    image = Image.new("RGB", (200, 100))
    for column in range(200):
        image.putpixel((column, 5), (column, 0, 0))
    gallery.check_picture(image.quantize(256), "status")


def test_the_pictures_are_those_of_the_page(gallery: ModuleType, tmp_path: Path) -> None:
    text = "![a](images/gallery/a.png) and ![b](images/gallery/b.png)"
    (tmp_path / "a.png").touch()
    with pytest.raises(SystemExit, match=r"not made: \['b.png'\]"):
        gallery.check_gallery(text, tmp_path)
    (tmp_path / "b.png").touch()
    gallery.check_gallery(text, tmp_path)
    (tmp_path / "c.png").touch()
    with pytest.raises(SystemExit, match=r"does not show \['c.png'\]"):
        gallery.check_gallery(text, tmp_path)


def test_the_tracked_pictures_are_those_of_the_page(gallery: ModuleType) -> None:
    gallery.check_gallery(gallery.GALLERY.read_text(), gallery.IMAGES)


def test_old_pictures_go_when_new_ones_are_there(gallery: ModuleType, tmp_path: Path) -> None:
    made, folder = tmp_path / "made", tmp_path / "folder"
    made.mkdir()
    folder.mkdir()
    (made / "new.png").write_bytes(b"new")
    (folder / "old.png").write_bytes(b"old")
    assert gallery.put_in_place(made, folder) == 1
    assert [path.name for path in folder.iterdir()] == ["new.png"]


def test_a_command_that_fails_ends_it(gallery: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="milesbatch status ended with 2"):
        gallery.milesbatch("status", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="milesbatch status none ended with 2"):
        gallery.on_a_terminal(["status", "none"], tmp_path)


def test_ci_makes_the_gallery_where_nothing_is_tracked() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("make gallery")]
    folder = line.partition("GALLERY=")[2]
    assert any(entry.rstrip("/") == Path(folder).parts[0] for entry in (ROOT / ".gitignore").read_text().split())
