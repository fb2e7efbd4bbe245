"""Make the pictures of docs/gallery.md from a real run with two injected faults: ``python tools/gallery.py`` (`make gallery`).

Trains RECIPE for a minute while a worker and a trainer rank are killed, audits it, writes its report, and takes pictures of
the page in headless Chromium and of what commands print. It ends with an error, and names it, when anything that a reader
of the gallery relies on is missing: a fault that did not fire, an audit that is not clean, a message in the console, a figure
that the page does not know, a picture that is empty or that docs/gallery.md does not show. ``--images DIR`` is where the
pictures go (CI gives a folder that is not tracked); ``--run RUN`` takes pictures of a run that is there already.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, headless  # noqa: E402

RECIPE = ROOT / "recipes" / "tiny.yaml"
GALLERY = ROOT / "docs" / "gallery.md"
IMAGES = ROOT / "docs" / "images" / "gallery"
MOST_BYTES = 200_000
FEWEST_COLOURS = 12
"""An empty page, or a terminal without a line, has fewer."""
COLUMNS = 104
RUN_S, COMMAND_S, DRAWN_S = 900.0, 240.0, 120.0
"""Limits that only something that hangs reaches, also where the machine is busy: of the run, of any other command, and of the
drawing of a page."""
GROUP = "88"
"""Of an early step, so that its samples differ."""
FAULTS = """faults:
  - {name: worker, role: rollout-1, point: rollout.generated, nth: 12, action: kill}
  - {name: rank, role: trainer-0, point: trainer.recorded, nth: 33, action: kill}
"""
KILLED = ("rollout-1", "trainer-0")
"""Whom the faults kill, in this order."""
_PLAIN = "3c4248 eb7870 6ec48e deb45e 6eaae8 ba94e0 5ec0c4 dee2e6"
_BRIGHT = "828a92 f58c82 82d6a0 ecc676 86bcf4 ccaaee 7ad4d6 f5f6f8"
PAGE = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body {{ margin: 0; background: #fff; }}
div {{ display: inline-block; background: #181b1f; border-radius: 10px; padding: 18px 22px; }}
pre {{ margin: 0; font: 14px/1.45 "DejaVu Sans Mono", monospace; color: #dee2e6; }}
</style><div id="terminal"><pre>{code}</pre></div>"""


def colours(text: str) -> list[tuple[int, int, int]]:
    return [tuple(bytes.fromhex(word)) for word in text.split()]  # type: ignore[misc]


THEME = TerminalTheme((24, 27, 31), (222, 226, 230), colours(_PLAIN), colours(_BRIGHT))


def require(holds: bool, what: str) -> None:
    """Raises:
    SystemExit: it does not hold; ``what`` is the error.
    """
    if not holds:
        raise SystemExit(f"error: {what}")


# -- the run --------------------------------------------------------------------------------------------------------------


def milesbatch(*words: str, limit_s: float = COMMAND_S, **environment: str) -> str:
    """What a command writes to standard output; its standard error is ours."""
    command = [sys.executable, "-m", "milesbatch.cli.main", *words]
    process = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=limit_s
    )
    require(process.returncode == 0, f"milesbatch {words[0]} ended with {process.returncode}")
    return process.stdout


def make_run(recipe: Path, directory: Path) -> Path:
    """A run to the end, with the faults on its way."""
    plan, run = directory / "faults.yaml", directory / recipe.stem
    plan.write_text(FAULTS)
    milesbatch("run", str(recipe), "--run-dir", str(run), limit_s=RUN_S, MILESBATCH_FAULTS=str(plan))
    return run


def check_run(run: Path) -> None:
    """Both faults fired, the run is finished, and the audit proves that nothing was lost or repeated."""
    fired = sorted(path.name for path in (run / "events").glob("fault.*.fired"))
    require(len(fired) == 2, f"two faults should have fired, found {fired}")
    check_status(json.loads(milesbatch("status", str(run), "--json")))
    check_audit(json.loads(milesbatch("audit", str(run), "--json")))


def check_status(status: dict[str, Any]) -> None:
    """The run is finished."""
    require(status["state"] == "finished", f"the run is {status['state']}, not finished")


def check_audit(verdict: dict[str, Any]) -> None:
    """The verdict of ``milesbatch audit --json`` is clean, and is about something."""
    require(verdict["ok"] and not verdict["violations"], f"the audit is not clean: {verdict['violations'][:3]}")
    groups = verdict["groups"]
    require(groups["trained"] > 0, "the audit found no trained group")
    require(not groups["lost"] and not groups["repeated"], f"groups were lost or repeated: {groups}")


# -- pictures of commands -------------------------------------------------------------------------------------------------


def on_a_terminal(words: list[str], cwd: Path, rows: int = 60) -> str:
    """What a command prints on a terminal of ``COLUMNS`` columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "milesbatch.cli.main", *words]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.DEVNULL, cwd=cwd, env=environment)
    os.close(its)
    said = b""
    ends_s = time.monotonic() + COMMAND_S
    while select.select([ours], [], [], max(0.0, ends_s - time.monotonic()))[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        said += data
    else:
        process.kill()
    code = process.wait()
    os.close(ours)
    require(code == 0, f"milesbatch {' '.join(words)} ended with {code}")
    return said.decode(errors="replace").replace("\r\n", "\n")


def picture_of_terminal(pictures: Pictures, words: list[str], cwd: Path, name: str, most_lines: int) -> None:
    """A picture of the first lines of what ``milesbatch WORDS`` prints, below the command itself."""
    lines = on_a_terminal(words, cwd).splitlines()[:most_lines]
    require(any(line.strip() for line in lines), f"milesbatch {' '.join(words)} printed nothing")
    console = Console(width=COLUMNS, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text(f"$ milesbatch {' '.join(words)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "terminal.html"
        page.write_text(console.export_html(theme=THEME, code_format=PAGE))
        pictures.browser.look(1280, 900)
        pictures.browser.open(page)
        pictures.save(name, selector="#terminal")


# -- pictures of the report -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """Takes pictures of what a browser shows, into one folder."""

    browser: Browser
    folder: Path

    def save(self, name: str, selector: str | None = None, margin: int = 0) -> None:
        """A PNG with few colours, small enough for a repository; and nothing was written to the console."""
        check_console(self.browser.console(), name)
        path = self.browser.screenshot(self.folder / f"{name}.png", selector=selector, margin=margin)
        with Image.open(path) as image:
            found = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        check_picture(found, name)
        found.save(path, optimize=True)
        size = path.stat().st_size
        require(size <= MOST_BYTES, f"{path} has {size} bytes, more than {MOST_BYTES}")
        print(f"{path.name}: {size:,} bytes")


def check_console(lines: list[str], name: str) -> None:
    """A page writes nothing to the console."""
    require(not lines, f"the console says, at the picture {name}: {lines[:3]}")


def check_picture(image: Image.Image, name: str) -> None:
    """There is something to be seen."""
    colours_ = len(image.getcolors(256) or ())
    require(colours_ >= FEWEST_COLOURS, f"the picture {name} is empty: it has {colours_} colours")


def check_page(browser: Browser) -> None:
    """Every figure at the top is known, and the table of faults says who was killed by which fault, and what came of it."""
    tiles = browser.run("return [...document.querySelectorAll('.tiles dd')].map(e => e.firstChild.textContent)")
    check_tiles(tiles)
    rows = browser.run("return [...document.querySelectorAll('#faults tbody tr')].map(row => row.innerText)")
    check_faults(rows)


def check_tiles(tiles: list[str]) -> None:
    """None is missing, and none is the dash that stands for a figure that is not known."""
    require(len(tiles) >= 6, f"the top of the page has {len(tiles)} figures")
    require(
        not [text for text in tiles if not re.search(r"\w", text)],
        f"a figure at the top of the page is missing: {tiles}",
    )
    require("sound" in tiles, f"the page does not say that the run is sound: {tiles}")


def check_faults(rows: list[str]) -> None:
    """Both deaths, with their faults and what came of them."""
    for who in KILLED:
        own = [row for row in rows if who in row and "injected fault" in row]
        require(bool(own), f"the page does not name the injected fault of {who}")
        require(any("ready after" in row or "started again" in row for row in own), f"what came of the death of {who}?")


def wait_until_drawn(browser: Browser) -> None:
    ends_s = time.monotonic() + DRAWN_S
    while not browser.run("return document.documentElement.dataset.drawn > 0"):
        require(
            time.monotonic() < ends_s, f"the page's charts are not drawn after {DRAWN_S:.0f} s: {browser.console()}"
        )
        time.sleep(0.05)
    browser.settle()


def pictures_of_report(pictures: Pictures, page: Path) -> None:
    browser = pictures.browser
    for name, width, height, is_dark, section in (
        ("report", 1280, 860, False, None),
        ("report-dark", 1280, 860, True, None),
        ("faults", 1280, 0, False, "#faults"),
        ("timeline", 1280, 0, False, "#timeline"),
        ("curves-dark", 1280, 0, True, "#curves"),
        ("samples", 1280, 0, False, "#samples"),
        ("report-phone", 390, 844, False, None),
    ):
        browser.look(width, height or 900, is_dark=is_dark)
        browser.open(page)
        wait_until_drawn(browser)
        check_page(browser)
        if name == "timeline":  # around the death of the trainer's rank
            browser.run("document.querySelectorAll('#faults button')[1].click()")
            browser.settle()
        pictures.save(name, section, margin=20 if section else 0)


def check_gallery(text: str, folder: Path) -> None:
    """The pictures in ``folder`` are those that docs/gallery.md, whose text is given, shows."""
    shown = {Path(target).name for target in re.findall(r"!\[[^]]*\]\((images/gallery/[^)]+)\)", text)}
    made = {path.name for path in folder.glob("*.png")}
    require(bool(shown), "docs/gallery.md shows no picture")
    require(shown <= made, f"docs/gallery.md shows pictures that were not made: {sorted(shown - made)}")
    require(made <= shown, f"docs/gallery.md does not show {sorted(made - shown)}")


def put_in_place(made: Path, folder: Path) -> int:
    """Exchange the pictures in ``folder`` for those in ``made``; returns how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    paths = sorted(made.glob("*.png"))
    for path in paths:
        shutil.copy(path, folder)
    return len(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--images", type=Path, default=IMAGES, help="the folder of the pictures; others go")
    parser.add_argument("--run", type=Path, help="a run that is there already")
    options = parser.parse_args()
    began_s = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="milesbatch-gallery-"))
    folder = work / "images"
    folder.mkdir()
    try:
        run = options.run.resolve() if options.run else make_run(options.recipe.resolve(), work)
        check_run(run)
        page = work / "report.html"
        written = json.loads(milesbatch("report", str(run), "-o", str(page), "--json"))
        require(not written["page"]["gaps"], f"the report could not read {written['page']['gaps']}")
        with headless() as browser:
            pictures = Pictures(browser, folder)
            pictures_of_report(pictures, page)
            picture_of_terminal(pictures, ["status", run.name], run.parent, "status", 16)
            picture_of_terminal(pictures, ["traj", "show", run.name, GROUP], run.parent, "traj-show", 32)
        check_gallery(GALLERY.read_text(), folder)
        number = put_in_place(folder, options.images)
    finally:
        shutil.rmtree(work)
    print(f"the gallery is complete: {number} pictures in {options.images}, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
