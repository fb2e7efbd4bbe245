"""The report in headless Chromium: nothing in the console, readable at two widths, light and dark, and by keyboard alone.

Screenshots are kept in ``build/screenshots``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, headless
from hostile_run import hostile_run
from long_run import make_long_run
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from milesbatch.report.page.make import write_page

SHOTS = Path(__file__).parents[3] / "build" / "screenshots"
STEPS = 240
JUMP_AT = 140
TAB = 9
LEFT, RIGHT = ("ArrowLeft", 37), ("ArrowRight", 39)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("browser")
    layout = make_long_run(directory / "nightly", steps=STEPS, jump_at=JUMP_AT, workers=4)
    write_page(layout, directory / "r.html", with_audit=False, tell_progress=lambda _: None)
    return directory / "r.html"


def open_drawn(browser: Browser, page: Path, width: int = 1280, *, is_dark: bool = False) -> None:
    """Open it and wait until the last chart is drawn."""
    browser.look(width, is_dark=is_dark)
    browser.open(page)
    wait_for(browser, "return document.documentElement.dataset.drawn > 0")


def wait_for(browser: Browser, script: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not browser.run(script):
        assert time.monotonic() < deadline, script
        time.sleep(0.05)
    browser.settle()


def background(browser: Browser) -> str:
    return str(browser.run("return getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        ("dark", 390),
        *(pytest.param(*other, marks=pytest.mark.long) for other in (("dark", 1280), ("light", 390))),
    ],
)
def test_readable_and_quiet(browser: Browser, report: Path, width: int, scheme: str) -> None:
    open_drawn(browser, report, width, is_dark=scheme == "dark")
    SHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SHOTS / f"report-{width}-{scheme}.png", whole=True)
    assert browser.console() == []
    assert not browser.scrolls_sideways()
    assert browser.run("return document.querySelectorAll('canvas').length") >= 17
    assert background(browser) == ("rgb(20, 23, 26)" if scheme == "dark" else "rgb(247, 248, 248)")
    too_wide = browser.run(
        "return [...document.querySelectorAll('canvas')].filter(c => c.getBoundingClientRect().right > innerWidth).length"
    )
    assert too_wide == 0
    hint = "getComputedStyle(document.querySelector('nav .hint')).display !== 'none'"
    assert browser.run(f"return {hint}") is (width == 390), (
        "where sections are out of sight it is said how to come to them"
    )


def test_text_has_contrast(browser: Browser, report: Path) -> None:
    """Quiet text on the page and on its cards, as WCAG counts it: at least 4.5 to 1."""
    script = """
      const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number).map(channel)
        .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
      const colour = (selector, what) => light(getComputedStyle(document.querySelector(selector))[what]);
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const page = colour('body', 'backgroundColor'), card = colour('.card', 'backgroundColor');
      return [['.quiet', page], ['.quiet', card], ['.lead', page], ['.kind.died', card], ['td button', card], ['.pill', null]]
        .map(([s, b]) => ratio(colour(s, 'color'), b === null ? colour(s, 'backgroundColor') : b));
    """
    for is_dark in (False, True):
        open_drawn(browser, report, is_dark=is_dark)
        assert min(browser.run(script)) >= 4.5


def test_pointing_at_a_curve_tells_the_step_in_all_of_them(browser: Browser, report: Path) -> None:
    open_drawn(browser, report)
    canvas = browser.driver.find_element(By.CSS_SELECTOR, "#chart-reward canvas")
    ActionChains(browser.driver).move_to_element_with_offset(canvas, 100, 0).perform()
    browser.settle()
    said = str(browser.run("return document.getElementById('readout').textContent"))
    assert said.startswith("Step 1") and "reward 0." in said and "entropy 1." in said
    assert browser.run("return document.querySelectorAll('tr.here').length") == 1
    assert browser.console() == []


def test_which_step_made_the_reward_jump(browser: Browser, report: Path) -> None:
    open_drawn(browser, report)
    button = browser.driver.find_element(By.CSS_SELECTOR, "#reward tbody tr button")
    step = int(button.text)
    assert abs(step - JUMP_AT) <= 2
    button.click()
    browser.settle()
    assert f"Step {step} " in browser.run("return document.getElementById('readout').textContent")


def test_why_did_worker_1_restart(browser: Browser, report: Path) -> None:
    open_drawn(browser, report, 390)
    row = browser.run(
        "return [...document.querySelectorAll('#faults tbody tr')].find(r => r.textContent.includes('rollout-1')).innerText"
    )
    assert "killed by SIGKILL" in row and "out of memory" in row and "ready after 20.0 s" in row
    browser.run("[...document.querySelectorAll('#faults button')][0].click()")
    browser.settle()
    assert browser.run("return document.activeElement.id") == "chart-timeline"
    browser.screenshot(SHOTS / "report-timeline-390.png")


def test_looking_closer_at_the_timeline(browser: Browser, report: Path) -> None:
    open_drawn(browser, report)
    canvas = browser.driver.find_element(By.CSS_SELECTOR, "#chart-timeline canvas")
    browser.run("document.getElementById('timeline').scrollIntoView()")
    actions = ActionChains(browser.driver)
    actions.move_to_element_with_offset(canvas, -50, 0).click_and_hold().move_by_offset(120, 5).release().perform()
    browser.settle()
    browser.screenshot(SHOTS / "report-timeline.png", selector="#timeline")
    actions.move_to_element_with_offset(canvas, 60, -10).perform()
    browser.settle()
    assert browser.run("return document.getElementById('tip').hidden") is False
    for what in ("in", "left", "right", "out", "whole"):
        browser.driver.find_element(By.CSS_SELECTOR, f"[data-zoom={what}]").click()
    assert browser.console() == []


def test_everything_is_reached_by_the_keyboard(browser: Browser, report: Path) -> None:
    open_drawn(browser, report)
    reached: list[str] = []
    name = (
        "const e = document.activeElement; return e === document.body ? '' : e.id || e.dataset.zoom || e.dataset.at || "
        "e.getAttribute('href') || (e.dataset.step && 'step') || e.getAttribute('aria-label') || e.tagName"
    )
    for _ in range(70):
        browser.press("Tab", TAB)
        reached.append(str(browser.run(name)))
    assert reached[0] == "#main" and reached[1] == "#reward"
    wanted = ["chart-reward", "step", "faults, restarts and interruptions", "whole", "in", "chart-timeline"]
    places = [reached.index(element) for element in wanted]
    assert places == sorted(places)
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    missing = browser.run(
        "return [...document.querySelectorAll('a, button, summary, [tabindex]')].filter(e => e.tabIndex < 0).length"
    )
    assert missing == 0


def test_arrow_keys_read_the_curve(browser: Browser, report: Path) -> None:
    open_drawn(browser, report)
    browser.run("document.getElementById('chart-reward').focus()")
    for key in (LEFT, LEFT, LEFT, RIGHT):
        browser.press(*key)
    browser.settle()
    assert browser.run("return document.getElementById('readout').textContent").startswith(f"Step {STEPS - 1} ")
    browser.press("Escape", 27)
    assert browser.run("return document.getElementById('readout').textContent").startswith("Point at")
    assert browser.console() == []


def test_the_colour_scheme_may_change_while_it_is_open(browser: Browser, report: Path) -> None:
    open_drawn(browser, report)
    pixel = (
        "const c = document.querySelector('#chart-reward canvas'), x = c.getContext('2d');"
        "return [...x.getImageData(0, 0, c.width, c.height).data].reduce((a, b) => (a * 31 + b) % 1000003, 7)"
    )
    before = browser.run(pixel)
    browser.run("delete document.documentElement.dataset.drawn")
    browser.look(1280, is_dark=True)
    wait_for(browser, "return document.documentElement.dataset.drawn > 0")
    assert browser.run(pixel) != before and browser.console() == []


def test_a_hostile_run_stays_text(browser: Browser, tmp_path: Path) -> None:
    layout = hostile_run(tmp_path / "a<b>&\"'c")
    write_page(layout, tmp_path / "hostile.html", with_audit=True, tell_progress=lambda _: None)
    for width in (1280, 390):
        open_drawn(browser, tmp_path / "hostile.html", width)
        browser.screenshot(SHOTS / f"report-hostile-{width}.png", whole=True)
        assert browser.run("return window.owned === undefined && document.images.length === 0")
        assert not browser.scrolls_sideways()
        assert browser.console() == []


def test_the_console_is_heard(browser: Browser, tmp_path: Path) -> None:
    """A script that the policy does not name is refused, and that is seen: the checks above can fail."""
    layout = hostile_run(tmp_path / "run")
    write_page(layout, tmp_path / "p.html", with_audit=False, tell_progress=lambda _: None)
    document, end, rest = (tmp_path / "p.html").read_text().rpartition("</body>")
    (tmp_path / "p.html").write_text(f"{document}<script>window.owned = 1</script>{end}{rest}")
    open_drawn(browser, tmp_path / "p.html")
    assert any("Content Security Policy" in line for line in browser.console())
    assert browser.run("return window.owned === undefined")
