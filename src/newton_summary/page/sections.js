// --- sections: what is chosen, and what each part of the page shows of it ---------------------------

const data = JSON.parse($("contents").textContent);
const UNIT = data.runs.every((run) => run.unit === "step") ? "step" : "epoch";
const withMeasurements = data.runs.filter((run) => run.measured.length);
const epochs = [...new Set(withMeasurements.flatMap((run) => run.measured.map((m) => m.epoch)))].sort((a, b) => a - b);
const AT_FIRST = 4; // runs that are shown before any is chosen
const state = {
  shown: new Set([...data.runs.keys()].slice(0, AT_FIRST)),
  epoch: epochs.length - 1, // a place in epochs
  matrix: data.runs.length > 1 ? "Hbar" : "both",
  scale: "normalised",
  block: "all",
  same: false,
  every: false,
};

const shownRuns = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => state.shown.has(index));
const measuredRuns = () => shownRuns().filter(({ run }) => run.measured.length);

/** The measurement of a run at the chosen epoch: the last one until then, or its first. */
function measurementOf(run) {
  const until = run.measured.filter((m) => m.epoch <= epochs[state.epoch]);
  return until[until.length - 1] ?? run.measured[0];
}

/** The panels of a section, one for each key; those that stay keep their pictures. */
function panels(id, wanted) {
  const holder = $(id);
  const old = new Map([...holder.children].map((panel) => [panel.dataset.key, panel]));
  const nodes = wanted.map(({ key, title, note = "", kind }) => {
    const panel = old.get(key) ?? emptyPanel(key, kind);
    panel.querySelector("h3").textContent = title;
    panel.querySelector("h3").hidden = title === "";
    panel.querySelector(".about").textContent = note;
    panel.querySelector(".about").hidden = note === "";
    panel.classList.toggle("single", wanted.length === 1 && kind !== "content");
    return panel;
  });
  if (nodes.length !== holder.children.length || nodes.some((node, i) => node !== holder.children[i])) {
    holder.replaceChildren(...nodes);
  }
  return nodes;
}

function emptyPanel(key, kind) {
  const panel = element("figure", { class: "panel", "data-key": key });
  panel.append(element("h3"), element("p", { class: "about" }));
  if (kind === "heatmap") {
    panel.append(element("p", { class: "note", hidden: true }));
    panel.append(element("div", { class: "scroll" }, element("div", { class: "picture" })));
  } else panel.append(element("div", { class: kind === "content" ? "content" : "picture plain" }));
  return panel;
}

const runTitle = (run) => (data.runs.length > 1 ? run.name : "");
const momentText = (measured) => (epochs.length > 1 ? `${UNIT} ${show(measured.epoch, 4).replace(/\.0+$/, "")}` : "");
const joined = (...parts) => parts.filter(Boolean).join(", ");

function drawHeatmaps() {
  const matrices = state.matrix === "both" ? ["Hbar", "inverse"] : [state.matrix];
  const wanted = measuredRuns().flatMap(({ run, index }) =>
    matrices.map((matrix) => ({ run, matrix, key: `${index} ${matrix}`, kind: "heatmap" })),
  );
  for (const item of wanted) {
    const name = item.matrix === "Hbar" ? "H̄, interactions" : "Inverse of H̄";
    const what = state.scale === "normalised" ? `${name}, normalised` : name;
    item.title = runTitle(item.run) || what;
    item.note = joined(runTitle(item.run) && what, momentText(measurementOf(item.run)));
  }
  $("heatmaps").classList.toggle("every", state.every); // one below the other
  panels("heatmaps", wanted).forEach((panel, i) => {
    const { run, matrix } = wanted[i];
    const options = { scale: state.scale, block: state.block, every: state.every, note: wanted[i].note };
    if (state.same) options.limits = commonLimits(matrix);
    drawHeatmap(panel, run, measurementOf(run), matrix, options);
  });
  $("scale-text").textContent = SCALES[state.scale][1];
  const flat = measuredRuns().filter(({ run }) => measurementOf(run).flat);
  $("flat-text").hidden = !flat.length;
  $("flat-text").textContent = flat
    .map(({ run }) => [runTitle(run), measurementOf(run).flat].filter(Boolean).join(": "))
    .join(" ");
  const most = Math.max(0, ...measuredRuns().map(({ run }) => run.groups.length));
  const broad = ($("heatmaps").firstChild?.clientWidth ?? 0) - 160; // what the names leave
  $("every-label").hidden = !state.every && most * CELL < broad;
}

/** Limits of the colours over all shown runs and moments. */
function commonLimits(matrix) {
  const all = measuredRuns().flatMap(({ run }) =>
    run.measured.map((measured) => {
      const entry = coloured(run, measured, matrix, state.scale);
      return entry === null ? null : limits(valuesOf(entry, ...blockOf(run, state.block)));
    }),
  ).filter((found) => found !== null);
  if (!all.length) return undefined;
  const [most, many] = ["most", "many"].map((key) => Math.max(...all.map((found) => found[key])));
  return { most, many, least: Math.max(Math.min(...all.map((found) => found.least)), most * 1e-12) };
}

/** Move the mark of the moment once the slider rests: plotly draws all lines again for it. */
function moveMark(div, epoch) {
  clearTimeout(div.waiting);
  const move = () => Plotly.relayout(div, { "shapes[0].x0": epoch, "shapes[0].x1": epoch });
  div.waiting = setTimeout(move, 150);
}

/** Of the charts over training only the mark of the moment moves with the slider. */
function drawRateCharts(momentOnly) {
  const runs = measuredRuns();
  const sizes = runs.flatMap(({ run }) => run.measured.flatMap((m) => numbers(m.eta).map(Math.abs)));
  const wanted = runs.map(({ run, index }) => {
    const measured = measurementOf(run);
    const zeros = numbers(measured.eta).filter((v) => v === 0).length;
    const lost = numbers(measured.eta).filter((v) => !Number.isFinite(v)).length;
    const note = joined(
      zeros ? `${zeros} rate${zeros > 1 ? "s are" : " is"} zero and not drawn` : "",
      lost ? `${lost} rate${lost > 1 ? "s are" : " is"} not finite` : "",
      measured.doubt,
    );
    return { key: `${index} now`, title: joined(runTitle(run), momentText(measured)), note, run, measured };
  });
  for (const { run, index } of runs.filter(({ run }) => run.measured.length > 1)) {
    const title = joined(runTitle(run), "over training");
    const note = "From the first layer, violet, to the last, yellow. Biases are dotted.";
    wanted.push({ key: `${index} time`, title, note, run, measured: measurementOf(run) });
  }
  panels("rates", wanted).forEach((panel, i) => {
    const { key, run, measured } = wanted[i];
    const div = panel.querySelector(".picture");
    div.hidden = key.endsWith("now") && !numbers(measured.eta).some((v) => Number.isFinite(v) && v !== 0);
    if (div.hidden) return;
    if (key.endsWith("now")) drawRates(div, run, measured, sizes);
    else if (momentOnly) moveMark(div, measured.epoch);
    else drawRatesOverTime(div, run, run.measured, measured.epoch, sizes);
  });
}

function drawTrialCharts(momentOnly) {
  const wanted = measuredRuns().flatMap(({ run, index }) => {
    const tried = run.measured.filter((m) => m.trials.length);
    if (!tried.length) return [];
    const measured = measurementOf(run).trials.length ? measurementOf(run) : tried[tried.length - 1];
    const now = {
      key: `${index} now`,
      title: joined(runTitle(run), momentText(measured)),
      note: trialsInWords(measured),
      draw: (div) => drawTrials(div, measured),
    };
    if (tried.length < 2) return [now];
    const over = {
      key: `${index} time`,
      title: joined(runTitle(run), "over training"),
      note: "1 is a perfect prediction; below 0 the loss rose.",
      draw: (div) => drawTrialsOverTime(div, tried),
    };
    return [now, over];
  });
  wanted.sort((a, b) => a.key.endsWith("time") - b.key.endsWith("time")); // the moment first
  $("trials-section").hidden = !wanted.length;
  panels("trials", wanted).forEach((panel, i) => {
    if (!momentOnly || wanted[i].key.endsWith("now")) wanted[i].draw(panel.querySelector(".picture"));
  });
}

function drawCurveCharts() {
  const runs = shownRuns();
  const metrics = [...new Set(runs.flatMap(({ run }) => Object.keys(run.curves).filter((m) => run.curves[m].length)))];
  const kinds = new Map();
  for (const metric of metrics) {
    const kind = metric.slice(metric.lastIndexOf("_") + 1);
    kinds.set(kind, [...(kinds.get(kind) ?? []), metric]);
  }
  $("curves-section").hidden = !metrics.length;
  const order = ["loss", "accuracy"];
  const place = ([kind]) => (order.includes(kind) ? order.indexOf(kind) : order.length);
  const wanted = [...kinds].sort((a, b) => place(a) - place(b)).map(([kind, members]) => ({ key: kind, title: kind, members }));
  panels("curves", wanted).forEach((panel, i) => {
    drawCurves(panel.querySelector(".picture"), wanted[i].members, runs, wanted[i].key);
  });
}

function drawTables() {
  const each = (id, draw) => {
    const runs = measuredRuns();
    const wanted = runs.map(({ run, index }) => ({
      key: `${index}`,
      title: joined(runTitle(run), momentText(measurementOf(run))),
      kind: "content",
    }));
    panels(id, wanted).forEach((panel, i) => draw(panel, runs[i].run, measurementOf(runs[i].run)));
  };
  each("pairs", drawPairs);
  each("groups", (panel, run, measured) => drawGroups(panel, run, measured, drawTables));
  const wanted = shownRuns().map(({ run, index }) => ({ key: `${index}`, title: runTitle(run), kind: "content" }));
  panels("facts", wanted).forEach((panel, i) => {
    const { run } = shownRuns()[i];
    drawFacts(panel, run, run.measured.length ? measurementOf(run) : null);
  });
}

let canDraw = false;

function draw(momentOnly = false) {
  $("epoch-text").textContent = epochs.length ? `${UNIT} ${epochs[state.epoch]}` : "";
  for (const section of document.querySelectorAll("[data-measured]")) section.hidden = !measuredRuns().length;
  const several = measuredRuns().some(({ run }) => run.groups.length > 1);
  for (const id of ["interactions", "pairs-section"]) $(id).hidden = !several; // one group has none
  const chart = measuredRuns().some(({ run }) => run.groups.length > 1 || run.measured.length > 1);
  $("rates-section").hidden = !chart; // a single rate is in the table
  drawTables();
  if (!canDraw) return;
  drawHeatmaps();
  drawRateCharts(momentOnly);
  drawTrialCharts(momentOnly);
  if (!momentOnly) drawCurveCharts();
}
