"""Make the pictures of docs/gallery.md from a real run with two injected faults: ``python tools/gallery.py`` (`make gallery`).

Trains RECIPE for a minute or two while a worker and a trainer rank are killed, writes its report, and takes pictures of the
page in headless Chromium and of what commands print. ``--run RUN`` takes pictures of a run that is there already.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, headless  # noqa: E402

RECIPE = ROOT / "recipes" / "tiny.yaml"
IMAGES = ROOT / "docs" / "images" / "gallery"
MOST_BYTES = 200_000
COLUMNS = 104
GROUP = "88"
"""Of an early step, so that its samples differ."""
FAULTS = """faults:
  - {name: worker, role: rollout-1, point: rollout.generated, nth: 12, action: kill}
  - {name: rank, role: trainer-0, point: trainer.recorded, nth: 33, action: kill}
"""
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


def milesbatch(*words: str, **environment: str) -> None:
    command = [sys.executable, "-m", "milesbatch.cli.main", *words]
    subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=ROOT)


def make_run(recipe: Path, directory: Path) -> Path:
    """A finished run; both faults have fired."""
    plan, run = directory / "faults.yaml", directory / recipe.stem
    plan.write_text(FAULTS)
    milesbatch("run", str(recipe), "--run-dir", str(run), MILESBATCH_FAULTS=str(plan))
    fired = sorted(path.name for path in (run / "events").glob("fault.*.fired"))
    if len(fired) != 2:
        raise SystemExit(f"error: two faults should have fired, found {fired}")
    return run


def on_a_terminal(words: list[str], cwd: Path, rows: int = 60) -> str:
    """What a command prints on a terminal of ``COLUMNS`` columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "milesbatch.cli.main", *words]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.DEVNULL, cwd=cwd, env=environment)
    os.close(its)
    said = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        said += data
    process.wait()
    os.close(ours)
    return said.decode(errors="replace").replace("\r\n", "\n")


def picture_of_terminal(browser: Browser, words: list[str], cwd: Path, name: str, most_lines: int) -> None:
    """A picture of the first lines of what ``milesbatch WORDS`` prints, below the command itself."""
    lines = on_a_terminal(words, cwd).splitlines()[:most_lines]
    console = Console(width=COLUMNS, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text(f"$ milesbatch {' '.join(words)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "terminal.html"
        page.write_text(console.export_html(theme=THEME, code_format=PAGE))
        browser.look(1280, 900)
        browser.open(page)
        save(browser, name, selector="#terminal")


def save(browser: Browser, name: str, selector: str | None = None, margin: int = 0) -> None:
    """A PNG with few colours, small enough for a repository."""
    path = browser.screenshot(IMAGES / f"{name}.png", selector=selector, margin=margin)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"error: {path} has {path.stat().st_size} bytes, more than {MOST_BYTES}")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def pictures_of_report(browser: Browser, page: Path) -> None:
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
        while not browser.run("return document.documentElement.dataset.drawn > 0"):
            browser.settle()
        if name == "timeline":  # around the death of the trainer's rank
            browser.run("document.querySelectorAll('#faults button')[1].click()")
            browser.settle()
        save(browser, name, section, margin=20 if section else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--run", type=Path, help="a run that is there already")
    options = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="milesbatch-gallery-"))
    try:
        run = options.run.resolve() if options.run else make_run(options.recipe.resolve(), work)
        page = work / "report.html"
        milesbatch("report", str(run), "-o", str(page))
        with headless() as browser:
            pictures_of_report(browser, page)
            picture_of_terminal(browser, ["status", run.name], run.parent, "status", 16)
            picture_of_terminal(browser, ["traj", "show", run.name, GROUP], run.parent, "traj-show", 32)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
