// Draws the charts of a milesbatch report with Vega, and lets all curves be read at one step. Everything that comes from a run
// is data: it reaches the page through textContent and Vega datasets, never as markup or as an expression.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!window.vegaEmbed) return;
  const tip = document.getElementById("tip");
  const readout = document.getElementById("readout");
  const hint = readout ? readout.textContent : "";
  const curves = [];
  let timelineView = null;
  let at = null;
  const mostBars = 4000;
  const coarse = rows(data.timeline.bars);
  let isFine = false;
  const look = { from: data.timeline.from, to: data.timeline.to };

  function palette() {
    const style = getComputedStyle(document.documentElement);
    return (name) => name === "font" ? style.getPropertyValue("--font").trim() : style.getPropertyValue("--" + name).trim();
  }

  function coloured(value, colour) {
    if (typeof value === "string") return value.replace(/@([a-z][a-z0-9-]*)/g, (all, name) => colour(name) || all);
    if (Array.isArray(value)) return value.map((entry) => coloured(entry, colour));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, coloured(entry, colour)]));
    }
    return value;
  }

  function rows(columns) {
    const names = Object.keys(columns);
    const count = names.length ? columns[names[0]].length : 0;
    return Array.from({ length: count }, (_, n) => Object.fromEntries(names.map((name) => [name, columns[name][n]])));
  }

  async function make(spec, element, values, signals, colour) {
    const own = coloured(spec, colour);
    for (const source of own.data) if (values[source.name]) source.values = values[source.name];
    for (const signal of own.signals) if (signal.name in signals) signal.value = signals[signal.name];
    let place = element.querySelector(".place");
    if (!place) {
      place = document.createElement("div");
      place.className = "place";
      element.append(place);
    }
    const options = { mode: "vega", renderer: "canvas", actions: false, defaultStyle: false, hover: false, tooltip: () => {} };
    return (await window.vegaEmbed(place, own, options)).view;
  }

  async function drawCurve(chart, colour) {
    const element = document.getElementById(chart.element);
    const table = data.tables[chart.table];
    const xs = table[chart.x];
    if (!element || !xs.length) return;
    const points = [];
    for (const series of chart.series) {
      const column = table[series.column];
      xs.forEach((x, n) => points.push({ x: x, value: column[n], series: series.label, width: series.width, colour: coloured(series.colour, colour) }));
    }
    const known = points.map((point) => point.value).filter((value) => value !== null);
    if (!known.length) return;
    const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
    const room = high > low ? 0 : (Math.abs(high) || 1) * 0.5;
    const pad = xs.length === 1 ? 0.5 : 0;
    const marked = (list) => (chart.table === "steps" ? list.map((x) => ({ x: x })) : []);
    const breaks = marked(data.breaks), deaths = marked(data.deaths);
    const view = await make(chart.spec, element, { points: points, breaks: breaks, deaths: deaths, jumps: chart.jumps || [] },
      { at: chart.table === "steps" ? at : null, x0: xs[0] - pad, x1: xs[xs.length - 1] + pad, y0: low < 0 || room === 0 || low > 0 ? low - room : 0, y1: high + room }, colour);
    curves.push({ chart: chart, view: view, xs: xs, table: table, element: element });
  }

  async function drawParts(chart, colour) {
    const element = document.getElementById(chart.element);
    const parts = rows(chart.parts);
    if (!element || !parts.length) return;
    const view = await make(chart.spec, element, { parts: parts },
      { x0: parts[0].start, x1: parts[parts.length - 1].end }, colour);
    view.addEventListener("pointermove", (event, item) => showTip(event, item && item.datum && item.datum.text));
    view.addEventListener("pointerout", () => showTip(null, null));
    curves.push({ view: view });
  }

  async function drawTimeline(colour) {
    const element = document.getElementById("chart-timeline");
    if (!element || !data.timeline.lives.lane.length) return;
    const activities = data.timeline.activities.map((name) => ({ name: name, colour: colour("a-" + name) }));
    timelineView = await make(data.timeline.spec, element, {
      lanes: data.timeline.lanes.map((name) => ({ name: name })), activities: activities,
      bars: coarse, lives: rows(data.timeline.lives), marks: rows(data.timeline.marks),
    }, { t0: look.from, t1: look.to }, colour);
    isFine = false;
    refine();
    timelineView.addEventListener("pointermove", (event, item) => showTip(event, item && words(item.datum)));
    timelineView.addEventListener("pointerout", () => showTip(null, null));
  }

  function seconds(ms) {
    if (ms < 10000) return (ms / 1000).toPrecision(ms < 1000 ? 2 : 3) + " s";
    if (ms < 120000) return Math.round(ms / 1000) + " s";
    if (ms < 7200000) return Math.round(ms / 60000) + " min";
    return (ms / 3600000).toFixed(1) + " h";
  }

  function time(ms) { return new Date(ms).toISOString().slice(11, 19); }

  function words(datum) {
    if (!datum || datum.lane === undefined) return null;
    if (datum.at !== undefined) return time(datum.at) + "  " + datum.text + (datum.then ? "\n" + datum.then : "");
    const what = datum.activity ? datum.activity + (datum.text ? ": " : "") : "";
    return datum.lane + "  " + what + datum.text + "\n" + time(datum.start) + ", " + seconds(datum.end - datum.start);
  }

  function showTip(event, text) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    const below = event.clientY + 16;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (below + box.height > window.innerHeight ? event.clientY - box.height - 12 : below) + "px";
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
    return Math.abs(value) < 1e4 ? String(Number(value.toPrecision(4))) : Math.round(value).toLocaleString("en");
  }

  function last(column) {
    for (let n = column.length - 1; n >= 0; n--) if (column[n] !== null) return column[n];
    return null;
  }

  // -- one step in all curves ------------------------------------------------------------------------------------------

  function setAt(step) {
    at = step;
    const table = data.tables.steps;
    const place = step === null ? -1 : table.step.indexOf(step);
    for (const curve of curves) {
      if (curve.chart && curve.chart.table === "steps") curve.view.signal("at", step).runAsync();
    }
    for (const value of document.querySelectorAll("[data-series]")) {
      const column = table[value.dataset.series];
      if (column) value.textContent = number(place < 0 ? last(column) : column[place]);
    }
    tell(place);
    for (const row of document.querySelectorAll("tr.here")) row.classList.remove("here");
    const row = step === null ? null : document.getElementById("step-" + step);
    if (row) row.classList.add("here");
  }

  function tell(place) {
    if (!readout) return;
    readout.textContent = place < 0 ? hint : "";
    if (place < 0) return;
    const table = data.tables.steps;
    const shown = [["Step", table.step[place]], ["reward", table.reward_mean && table.reward_mean[place]],
      ["loss", table.loss && table.loss[place]], ["entropy", table.entropy && table.entropy[place]],
      ["length", table.length_mean && table.length_mean[place]], ["lag", table.lag_mean && table.lag_mean[place]]];
    for (const [name, value] of shown) {
      if (value === undefined || value === null) continue;
      readout.append(name + " ");
      const strong = document.createElement("b");
      strong.textContent = number(value);
      readout.append(strong, "   ");
    }
  }

  function nearest(xs, value) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < value) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? xs[low] : xs[high];
  }

  function pointAt(curve, event) {
    const canvas = curve.element.querySelector("canvas");
    if (!canvas) return null;
    const x = event.clientX - canvas.getBoundingClientRect().left - curve.view.origin()[0];
    return nearest(curve.xs, curve.view.scale("x").invert(x));
  }

  function find(element) { return curves.find((curve) => curve.element === element); }

  function listen(chart) {
    const element = document.getElementById(chart.element);
    if (!element) return;
    element.addEventListener("pointermove", (event) => {
      const curve = find(element);
      if (!curve) return;
      const x = pointAt(curve, event);
      if (chart.table === "steps") { if (x !== at) setAt(x); return; }
      curve.view.signal("at", x).runAsync();
      const place = curve.xs.indexOf(x);
      showTip(event, "version " + x + "\n" + chart.series.map((s) => s.label + " " + number(curve.table[s.column][place]) + chart.unit).join("\n"));
    });
    element.addEventListener("pointerleave", () => { showTip(null, null); });
    if (element.tabIndex === 0) element.addEventListener("keydown", (event) => {
      const xs = data.tables.steps.step;
      const place = at === null ? xs.length : xs.indexOf(at);
      const jump = event.shiftKey ? 10 : 1;
      const next = { ArrowLeft: place - jump, ArrowRight: place + jump, Home: 0, End: xs.length - 1 }[event.key];
      if (event.key === "Escape") setAt(null);
      else if (next !== undefined) setAt(xs[Math.max(0, Math.min(xs.length - 1, next))]);
      else return;
      event.preventDefault();
    });
  }

  // -- the part of the timeline that is looked at ------------------------------------------------------------------------

  function setLook(from, to) {
    const all = [data.timeline.from, data.timeline.to];
    const width = Math.min(Math.max(to - from, 50), (all[1] - all[0]) * 1.02);
    const middle = (from + to) / 2;
    look.from = middle - width / 2;
    look.to = middle + width / 2;
    if (look.from < all[0] - width * 0.5) { look.from = all[0] - width * 0.01; look.to = look.from + width; }
    if (look.to > all[1] + width * 0.5) { look.to = all[1] + width * 0.01; look.from = look.to - width; }
    if (!timelineView) return;
    refine();
    timelineView.signal("t0", look.from).signal("t1", look.to).runAsync();
  }

  // Where shares of time stand for very many slices, the slices themselves are shown as soon as few enough are in sight.
  function refine() {
    const fine = data.timeline.fine;
    if (!fine) return;
    const from = look.from - data.timeline.from, to = look.to - data.timeline.from;
    const seen = [];
    for (let n = 0; n < fine.start.length && seen.length <= mostBars; n++) {
      if (fine.start[n] <= to && fine.start[n] + fine.length[n] >= from) seen.push(n);
    }
    const names = data.timeline.activities, base = data.timeline.from;
    if (seen.length <= mostBars) {
      timelineView.data("bars", seen.map((n) => ({
        lane: data.timeline.lanes[fine.lane[n]], activity: names[fine.activity[n]], start: base + fine.start[n],
        end: base + fine.start[n] + fine.length[n], thin: ["weights", "saving"].includes(names[fine.activity[n]]),
        top: 0, part: 1, text: "",
      }))).run();
      isFine = true;
    } else if (isFine) {
      timelineView.data("bars", coarse).run();
      isFine = false;
    }
  }

  function zoom(what) {
    const width = look.to - look.from;
    const middle = (look.to + look.from) / 2;
    if (what === "whole") setLook(data.timeline.from, data.timeline.to);
    if (what === "in") setLook(middle - width / 4, middle + width / 4);
    if (what === "out") setLook(middle - width, middle + width);
    if (what === "left") setLook(look.from - width / 2, look.to - width / 2);
    if (what === "right") setLook(look.from + width / 2, look.to + width / 2);
  }

  function listenTimeline() {
    const element = document.getElementById("chart-timeline");
    if (!element) return;
    const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", Home: "whole" };
    element.addEventListener("keydown", (event) => {
      if (!keys[event.key]) return;
      zoom(keys[event.key]);
      event.preventDefault();
    });
    let begun = null;
    const pick = document.createElement("div");
    pick.id = "pick";
    pick.hidden = true;
    element.append(pick);
    const inside = (event) => event.clientX - element.getBoundingClientRect().left;
    element.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch" && event.button === 0) begun = inside(event); });
    element.addEventListener("pointermove", (event) => {
      if (begun === null) return;
      pick.hidden = Math.abs(inside(event) - begun) < 4;
      pick.style.left = Math.min(begun, inside(event)) + "px";
      pick.style.width = Math.abs(inside(event) - begun) + "px";
    });
    window.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const canvas = element.querySelector("canvas");
      const shift = canvas.getBoundingClientRect().left - element.getBoundingClientRect().left + timelineView.origin()[0];
      const ends = [begun, inside(event)].map((x) => Number(timelineView.scale("x").invert(x - shift))).sort((a, b) => a - b);
      if (!pick.hidden) setLook(ends[0], ends[1]);
      begun = null;
      pick.hidden = true;
    });
  }

  function showMoment(ms) {
    const whole = data.timeline.to - data.timeline.from;
    const width = Math.min(whole, Math.max(20000, whole / 12));
    setLook(ms - width * 0.35, ms + width * 0.65);
    const element = document.getElementById("timeline");
    if (element) element.scrollIntoView({ block: "start" });
    document.getElementById("chart-timeline").focus({ preventScroll: true });
  }

  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button") : null;
    if (!button) return;
    if (button.dataset.zoom) zoom(button.dataset.zoom);
    else if (button.dataset.at) showMoment(Number(button.dataset.at));
    else if (button.dataset.from) setLook(Number(button.dataset.from), Number(button.dataset.to));
    else if (button.dataset.step) {
      const step = Number(button.dataset.step);
      const xs = data.tables.steps.step;
      setAt(xs.length ? (xs.find((x) => x >= step) ?? xs[xs.length - 1]) : null);
      if (!button.closest("#reward")) document.getElementById("reward").scrollIntoView({ block: "start" });
    }
  });

  async function draw() {
    for (const curve of curves) curve.view.finalize();
    if (timelineView) timelineView.finalize();
    curves.length = 0;
    timelineView = null;
    const colour = palette();
    for (const chart of data.charts) {
      await (chart.kind === "curve" ? drawCurve : drawParts)(chart, colour);
      await new Promise((done) => setTimeout(done)); // let what is drawn be seen before the next one
    }
    await drawTimeline(colour);
    if (at !== null) setAt(at);
    document.documentElement.dataset.drawn = String(curves.length + (timelineView ? 1 : 0));
  }

  // One drawing after the other: a change of the colour scheme waits for the drawing that is under way.
  let drawing = Promise.resolve();
  function redraw() { drawing = drawing.then(draw); }

  for (const chart of data.charts) if (chart.kind === "curve") listen(chart);
  redraw();
  listenTimeline();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
