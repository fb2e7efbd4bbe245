"""The report as a document: made from what there is, below its size, and nothing in a run becomes markup or script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from builders import evaluate_version, flip, grow, make_layout, make_run, make_settings, past_incarnation
from hostile_run import hostile_run, write_events
from long_run import make_long_run
from typer.testing import CliRunner

from milesbatch.cli.main import app
from milesbatch.report.page.document import chart_library, page
from milesbatch.report.page.html import Html, safe_json, table, tag, text
from milesbatch.report.page.make import write_page, write_trace
from milesbatch.report.page.material import gather
from milesbatch.store.layout import RunLayout

MADE_AT = "2026-03-02T00:00:00.000000Z"
LIBRARY = "window.vegaEmbed = null;"


class Reader(HTMLParser):
    """Elements with their attributes, and texts by the element that they are in."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "hr", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> while {self._open[-3:]} are open"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def all_text(self) -> str:
        return " ".join(words for where, words in self.texts if where not in ("script", "style"))


def made(layout: RunLayout, library: str | None = LIBRARY, *, with_audit: bool = False) -> str:
    return page(gather(layout, MADE_AT, with_audit=with_audit, tell_progress=lambda _: None), library)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return make_long_run(tmp_path_factory.mktemp("long") / "long")


@pytest.fixture
def small(tmp_path: Path) -> RunLayout:
    layout = make_run(tmp_path / "run")
    past_incarnation(layout)
    grow(layout, 3)
    figures = {"reward_mean": 0.5, "loss": 0.1}
    write_events(layout, "trainer-0", 1, *({"event": "train_step", "step": n, "metrics": figures} for n in (1, 2, 3)))
    return layout


# -- size and content -----------------------------------------------------------------------------------------------------


def test_a_thousand_steps_are_below_five_megabytes(long_run: RunLayout, tmp_path: Path) -> None:
    written = write_page(long_run, tmp_path / "r.html", with_audit=False, tell_progress=lambda _: None)
    assert written.bytes == (tmp_path / "r.html").stat().st_size < 5_000_000 and written.gaps == ()
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_the_two_questions_have_their_answers_on_the_page(long_run: RunLayout) -> None:
    reader = Reader(made(long_run))
    words = reader.all_text()
    data = json.loads(next(text for where, text in reader.texts if where == "script" and text.startswith("{")))
    (mark,) = data["charts"][0]["jumps"]
    assert abs(mark["x"] - 600) <= 2 and f"show step {mark['x']} in all curves" in str(reader.named("button"))
    assert "rollout-1" in words and "killed by SIGKILL" in words and "out of memory" in words
    assert "started again after 5.0 s (start 2), ready after 20.0 s" in words


def test_all_sections_are_there_and_reachable(small: RunLayout) -> None:
    reader = Reader(made(small, with_audit=True))
    ids = [attributes.get("id") for _, attributes in reader.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    links = [str(attributes["href"]) for attributes in reader.named("a")]
    assert links[0] == "#main" and all(link[1:] in ids for link in links) and len(links) == 15
    words = reader.all_text()
    assert "sound" in words and "3 rebuilt" not in words and "policy version" in words.lower()


def test_evaluations_have_a_curve_and_a_table(small: RunLayout) -> None:
    assert "No policy version was evaluated" in Reader(made(small)).all_text()
    evaluate_version(small, 0, (0.0, 0.25))
    evaluate_version(small, 3, (1.0, 0.5), finish_reason="length")
    evaluate_version(small, 3, (0.0, 0.0), name="<b>hard</b>", settings=make_settings(2, prompts=b"hard"))
    reader = Reader(made(small, with_audit=True))
    words = " ".join(reader.all_text().split())
    assert "Best: version 3 with 0.75." in words and "Prompts of <b>hard</b>" in words and "100 %" in words
    data = json.loads(next(text for where, text in reader.texts if where == "script" and text.startswith("{")))
    assert data["tables"]["evaluations"] == {"version": [0, 3], "reward": [0.125, 0.75]}
    (chart,) = [chart for chart in data["charts"] if chart["element"] == "chart-evaluation"]
    assert (chart["table"], chart["x"]) == ("evaluations", "version")
    assert any(element.get("id") == "chart-evaluation" for element in reader.named("div"))
    record = evaluate_version(small, 1)
    flip(small.evaluation_record(1, record.tag), 50)
    assert f"evaluations/000001/{record.tag}.json" in Reader(made(small)).all_text(), "told among what is missing"


def test_a_page_refers_to_nothing_outside(small: RunLayout) -> None:
    document = made(small)
    reader = Reader(document)
    for _, attributes in reader.elements:
        assert not attributes.get("src") and not str(attributes.get("style", "")).count("url(")
        assert str(attributes.get("href", "#")).startswith(("#", "data:,"))
    assert "@import" not in document and "url(" not in "".join(t for where, t in reader.texts if where == "style")


def test_without_the_library_the_tables_are_there_and_it_is_said(small: RunLayout) -> None:
    words = Reader(made(small, None)).all_text()
    assert "Made without charts" in words and "0.5" in words


def test_the_library_is_bundled_from_the_installed_package() -> None:
    told: list[str] = []
    library = chart_library(told.append)
    assert library is not None and 100_000 < len(library) < 1_500_000 and told == []
    assert "window.vegaEmbed" in library and "</script" not in library and "\r" not in library


def test_the_library_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    told: list[str] = []
    assert chart_library(told.append) is None and "milesbatch[analysis]" in told[0]


# -- escaping -------------------------------------------------------------------------------------------------------------


def test_nothing_in_a_run_becomes_markup(tmp_path: Path) -> None:
    layout = hostile_run(tmp_path / "a<b>&\"'c")
    data = made(layout).encode("utf-8", "replace").decode()
    reader = Reader(data)
    assert len(reader.named("script")) == 3 and not reader.named("img")
    for _, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on")]
    assert reader.all_text().count("window.owned=1") > 10
    assert "\x00" not in data and "\ud800" not in data


def test_the_policy_lets_no_other_script_run(tmp_path: Path) -> None:
    reader = Reader(made(hostile_run(tmp_path / "run")))
    policy = str(next(a["content"] for a in reader.named("meta") if a.get("http-equiv")))
    assert "default-src 'none'" in policy and "'unsafe-inline'" not in policy.partition("style-src")[0]
    scripts = [t for where, t in reader.texts if where == "script"][1:]
    for code in scripts:
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy


def test_specifications_hold_no_text_of_the_run(tmp_path: Path) -> None:
    reader = Reader(made(hostile_run(tmp_path / "run")))
    data = json.loads(next(t for where, t in reader.texts if where == "script"))
    specs = [chart["spec"] for chart in data["charts"]] + [data["timeline"]["spec"]]
    assert len(specs) > 5 and "owned" not in json.dumps(specs)


def test_escaping() -> None:
    assert text("<a b='c' d=\"e\">&") == "&lt;a b=&#x27;c&#x27; d=&quot;e&quot;&gt;&amp;"
    assert text("a\x00\x1b[31m\ud800\n\tb") == "a\ufffd\ufffd[31m\ufffd\n\tb"
    assert tag("a", "<", Html("<b>"), None, href='"', hidden=True, title=None) == '<a href="&quot;" hidden>&lt;<b></a>'
    assert tag("br") == "<br>" and tag("i", data_step=3) == '<i data-step="3"></i>'
    assert "</script" not in safe_json({"a": "</script><!--"}) and json.loads(safe_json(["<&>\u2028"])) == ["<&>\u2028"]
    made_table = table(("a", "<"), [("1", "<x>")], label="l", numbers=(0,), identify={0: "r"}, is_stacked=True)
    assert '<tr id="r"><td class="n" data-label="a">1</td><td data-label="&lt;">&lt;x&gt;</td></tr>' in made_table


# -- what is missing ------------------------------------------------------------------------------------------------------


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    words = Reader(made(layout, with_audit=True)).all_text()
    assert (
        "0 steps, without a restart" in words
        and "There are too few steps" in words
        and "could not be read" not in words
    )


BREAKS = {
    "run.json": "run.json",
    "recipe.yaml": "recipe.yaml",
    "incarnations/000001.json": "000001.json",
    "batches/000002.json": "000002.json",
    "weights/000001/manifest.json": "weights/000001/manifest.json",
    "events/trainer-0.i000001.jsonl": None,
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("how", ["missing", "garbage", "directory"])
def test_what_is_missing_or_damaged_is_said_and_the_page_is_made(small: RunLayout, name: str, how: str) -> None:
    path = small.root / name
    path.unlink()
    if how == "garbage":
        path.write_bytes(b'{"kind": \xff\n')
    if how == "directory":
        path.mkdir()
    reader = Reader(made(small, with_audit=True))
    wanted = BREAKS[name]
    is_hint = wanted is None or (how == "missing" and name.startswith(("batches", "weights", "incarnations")))
    assert "not sound" in reader.all_text() or is_hint
    if not is_hint:
        assert wanted is not None and wanted in reader.all_text()
    assert "Every step" in reader.all_text()


@pytest.mark.parametrize("name", ["events", "batches", "trajectories", "weights", "incarnations", "checkpoints"])
@pytest.mark.parametrize("as_file", [False, True])
def test_whole_directories_may_be_missing(small: RunLayout, name: str, as_file: bool) -> None:
    shutil.rmtree(small.root / name)
    if as_file:
        (small.root / name).write_text("not a directory")
    assert "Every step" in Reader(made(small)).all_text()


def test_the_cause_of_a_bad_end_is_at_the_top(small: RunLayout) -> None:
    died = {"event": "process_ended", "name": "trainer-0", "exit_code": -9, "reason": "killed by SIGKILL", "host": "n4"}
    failed = {"event": "failed", "error": "trainer-0 died too often\nwhat to do: look", "exit_code": 1}
    write_events(small, "controller-0", 1, died, failed)
    small.log("trainer-0", 1).write_text("starting\nerror: CUDA out of memory\n")
    document = made(small)
    top = document[: document.index('id="reward"')]
    for words in (
        "What stopped it",
        "trainer-0 died too often",
        "trainer-0 on n4",
        "error: CUDA out of memory",
        "failed",
    ):
        assert words in top


def test_a_run_that_goes_on_says_so(small: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    from milesbatch.report import status as module

    real = module.run_status
    going = {"state": "running", "note": None}
    monkeypatch.setattr("milesbatch.report.page.material.run_status", lambda layout: real(layout) | going)
    assert "still going on when the page was made (2026-03-02T00:00:00Z)" in Reader(made(small)).all_text()


# -- the command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_changes_nothing_in_the_run(small: RunLayout, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small.root.rglob("*")}
    out = tmp_path / "out.html"
    out.write_text("old")
    result = CliRunner().invoke(app, ["report", str(small.root), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "page: " in result.output and "<!doctype html>" in out.read_text()
    assert {path: path.stat().st_mtime_ns for path in small.root.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "run"]


def test_the_default_name_is_of_the_run(small: RunLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", str(small.root), "--no-audit"]).exit_code == 0
    assert (tmp_path / "run-report.html").exists()


def test_the_trace_alone_or_with_the_page(small: RunLayout, tmp_path: Path) -> None:
    trace, out = tmp_path / "t.json", tmp_path / "o.html"
    result = CliRunner().invoke(app, ["report", str(small.root), "--trace", str(trace), "--json"])
    body = json.loads(result.stdout)
    assert list(body) == ["trace"] and body["trace"]["bytes"] == trace.stat().st_size
    assert json.loads(trace.read_text())["otherData"]["run"] == "run"
    both = CliRunner().invoke(
        app, ["report", str(small.root), "--trace", str(trace), "-o", str(out), "--no-audit", "--json"]
    )
    assert list(json.loads(both.stdout)) == ["trace", "page"] and out.exists()


def test_the_samples_beside_the_page(small: RunLayout, tmp_path: Path) -> None:
    out, samples = tmp_path / "o.html", tmp_path / "s.jsonl"
    words = ["report", str(small.root), "-o", str(out), "--samples", str(samples), "--no-audit", "--json"]
    body = json.loads(CliRunner().invoke(app, words).stdout)
    assert list(body) == ["page", "samples"] and body["samples"]["bytes"] == samples.stat().st_size
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    cards = Reader(out.read_text()).named("article")
    assert len(found) == len(cards) >= 3 and found[0]["kind"] == "best" and found[0]["reward"] == 1.0


def test_a_place_that_cannot_be_written(small: RunLayout, tmp_path: Path) -> None:
    for place in (tmp_path / "no" / "x.html", tmp_path):
        with pytest.raises(Exception, match="directory"):
            write_page(small, place, with_audit=False, tell_progress=lambda _: None)
        with pytest.raises(Exception, match="directory"):
            write_trace(small, place)


def test_the_style_and_script_are_part_of_the_package() -> None:
    import tomllib

    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["milesbatch"]
    assert {"report/page/*.css", "report/page/*.js"} <= set(data)
    script = (root / "milesbatch/report/page/page.js").read_text()
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|outerHTML", script)


def test_no_events_at_all(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "run")
    assert "no run" in str(CliRunner().invoke(app, ["report", str(layout.root)]).exception)
