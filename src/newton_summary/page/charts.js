// --- lines and points: learning rates, trials, curves of training ----------------------------------

const DASHES = ["solid", "dash", "dot", "dashdot"];

/** What all pictures share: fonts, colours, no frame. */
function baseLayout() {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colour("sans"), size: 12, color: colour("text") },
    hoverlabel: {
      bgcolor: colour("raised"),
      bordercolor: colour("soft"),
      align: "left",
      namelength: -1,
      font: { family: colour("sans"), size: 12, color: colour("text") },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
  };
}

const PLOT_OPTIONS = { displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "resetScale2d"]] };

/** A line, or points; values that are not finite leave a gap. */
function lineTrace(x, y, text, extra) {
  return {
    type: "scatter",
    mode: "lines+markers",
    x,
    y: y.map((v) => (Number.isFinite(v) ? v : null)),
    text,
    hovertemplate: "%{text}<extra></extra>",
    ...extra,
  };
}

/** The size of a rate, for a logarithmic axis: zero cannot be shown. */
const sizeOf = (rate) => (rate === 0 ? NaN : Math.abs(rate));

/** A dotted line across the picture. */
const dotted = (place) => ({ type: "line", ...place, line: { color: colour("soft"), width: 1, dash: "dot" } });

function axisOf(title, extra = {}) {
  return {
    title: { text: plain(title), standoff: 8, font: { size: 12, color: colour("soft") } },
    gridcolor: colour("line"),
    zerolinecolor: colour("line"),
    linecolor: colour("line"),
    automargin: true,
    exponentformat: "power",
    tickfont: { size: 11 },
    ...extra,
  };
}

/** A logarithmic axis with powers of ten, or a linear one if there is nothing positive. */
function logAxis(title, values) {
  const positive = values.filter((v) => Number.isFinite(v) && v > 0);
  if (!positive.length) return axisOf(title);
  const [low, high] = [Math.log10(Math.min(...positive)), Math.log10(Math.max(...positive))];
  const space = Math.max(0.08 * (high - low), 0.15);
  return axisOf(title, {
    type: "log",
    range: [low - space, high + space],
    // Powers of ten, or 1, 2 and 5; within a decade as plotly chooses, with their exponent.
    dtick: high - low > 1.5 ? Math.ceil((high - low) / 6) : high - low + 2 * space < 1 ? null : "D2",
  });
}

function drawChart(div, traces, layout) {
  const full = {
    ...baseLayout(),
    height: 340,
    margin: { l: 56, r: 12, t: 12, b: 44 },
    showlegend: false,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    ...layout,
  };
  Plotly.react(div, traces, { ...full, width: div.clientWidth }, PLOT_OPTIONS);
}

/** Colour of each group, by the place of its layer between the first and the last. */
function depthColours(run) {
  const last = Math.max(...run.groups.map((group) => group.layer));
  return run.groups.map((group) => between(colours("depth"), last > 0 ? group.layer / last : 0));
}

/** What a rate is: along the step of an optimizer, a factor on its learning rate. */
const isFactor = (run) => "measured along" in run.facts;
const rateWord = (run) => (isFactor(run) ? "factor on the learning rate" : "learning rate");
const rateTitle = (run) => (isFactor(run) ? "Factor η" : "Rate η");

/** What to write after a rate: its error, or that a factor is at the limit of suggest_lrs. */
function afterRate(run, value, error) {
  const nears = (limit) => isFactor(run) && Math.abs(value / limit - 1) < 1e-5;
  if (nears(10)) return " or more";
  if (nears(0.1)) return " or less";
  return plusMinus(error);
}

/** Learning rates of all groups at one moment. */
function drawRates(div, run, measured, range) {
  const [eta, error] = [numbers(measured.eta), numbers(measured.eta_stderr)];
  const names = run.groups.map((group) => group.title);
  const short = labels(names, lettersFor(div.clientWidth));
  const chosen = ticks([0, names.length - 1], names.length, div.clientWidth - 70);
  const palette = depthColours(run);
  const text = names.map(
    (name, s) => `${plain(name)}<br>rate ${show(eta[s])}${afterRate(run, eta[s], error && error[s])}`,
  );
  const trace = lineTrace([...names.keys()], eta.map(sizeOf), text, {
    mode: "markers",
    marker: {
      size: names.length > 60 ? 6 : 9,
      color: eta.map((v, s) => (v < 0 ? "rgba(0,0,0,0)" : palette[s])),
      line: { width: 2, color: palette },
    },
    error_y:
      error === null
        ? { visible: false }
        : { type: "data", array: error.map((e) => (Number.isFinite(e) ? e : 0)), color: colour("soft"), thickness: 1, width: 3 },
  });
  const space = room(short);
  drawChart(div, [trace], {
    height: 260 + space,
    margin: { l: 56, r: 12, t: 12, b: space },
    xaxis: axisOf("", {
      ...namedTicks(short, chosen),
      tickangle: -90,
      range: [-0.7, names.length - 0.3],
      showgrid: names.length <= 60,
      automargin: false,
    }),
    yaxis: logAxis(rateWord(run), range),
  });
}

/** Learning rates of all groups over training: weights as lines, biases dotted. */
function drawRatesOverTime(div, run, moments, epoch, range) {
  const rates = moments.map((m) => numbers(m.eta));
  const palette = depthColours(run);
  const traces = run.groups.map((group, s) => {
    const text = rates.map((eta, i) => `${plain(group.title)}<br>${UNIT} ${show(moments[i].epoch, 4)}: ${show(eta[s])}`);
    return lineTrace(moments.map((m) => m.epoch), rates.map((eta) => sizeOf(eta[s])), text, {
      line: { width: 1.5, color: palette[s], dash: group.role === "bias" ? "dot" : "solid" },
      marker: {
        size: moments.length > 40 ? 3 : 5,
        color: rates.map((eta) => (eta[s] < 0 ? colour("ground") : palette[s])),
        line: { width: 1.5, color: palette[s] },
      },
    });
  });
  drawChart(div, traces, {
    hovermode: "closest",
    xaxis: axisOf(UNIT),
    yaxis: logAxis(rateWord(run), range),
    shapes: [dotted({ x0: epoch, x1: epoch, y0: 0, y1: 1, yref: "paper" })],
  });
}

/** Change of the loss along the step at one moment: the model's parabola and what happened. */
function drawTrials(div, measured) {
  const trials = measured.trials.map((trial) => trial.map(fromJson)).sort((a, b) => a[0] - b[0]);
  const points = [[0, 0, 0], ...trials]; // fraction, predicted, real
  const [blue, orange] = colours("runs");
  const line = (name, k, color, dash) => {
    const text = points.map((point) => `${name}, step × ${show(point[0], 3)}<br>change ${show(point[k])}`);
    return lineTrace(points.map((point) => point[0]), points.map((point) => point[k]), text, {
      name,
      line: { color, dash, width: 2 },
      marker: { size: 7, symbol: dash === "solid" ? "circle" : "diamond" },
    });
  };
  drawChart(div, [line("predicted", 1, blue, "dash"), line("real", 2, orange, "solid")], {
    showlegend: true,
    margin: { l: 56, r: 12, t: 30, b: 44 },
    xaxis: axisOf("fraction of the step"),
    yaxis: axisOf("change of the loss", { range: shownChanges(trials) }),
  });
}

/** A range for changes of the loss; a step that failed badly does not stretch it. */
function shownChanges(trials) {
  const predicted = Math.max(...trials.map((trial) => Math.abs(trial[1])));
  const values = trials.flatMap((trial) => [trial[1], trial[2]]).filter(Number.isFinite);
  const low = Math.max(Math.min(0, ...values), -3 * predicted);
  const high = Math.min(Math.max(0, ...values), 3 * predicted);
  return [low - 0.08 * (high - low), high + 0.08 * (high - low)];
}

/** The same in words, with values outside the picture. */
function trialsInWords(measured) {
  const each = measured.trials.map((trial) => {
    const [fraction, predicted, real] = trial.map(fromJson);
    return `step × ${show(fraction, 2)}: predicted ${show(predicted, 3)}, real ${show(real, 3)}`;
  });
  return `${each.join("; ")}.`;
}

/** Real over predicted change by epoch, one line for each fraction: 1 is a perfect prediction. */
function drawTrialsOverTime(div, moments) {
  const fractions = [...new Set(moments.flatMap((m) => m.trials.map((trial) => trial[0])))].sort((a, b) => a - b);
  const traces = fractions.map((fraction, i) => {
    const points = moments.flatMap((m) =>
      m.trials.filter((trial) => trial[0] === fraction).map((trial) => [m.epoch, ...trial.slice(1).map(fromJson)]),
    );
    const ratio = points.map(([, predicted, real]) => real / predicted);
    const name = `step × ${show(fraction, 3)}`;
    const text = points.map(
      ([epoch, predicted, real], k) =>
        `${UNIT} ${show(epoch, 4)}, ${name}<br>predicted ${show(predicted)}<br>real ${show(real)}<br>ratio ${show(ratio[k], 4)}`,
    );
    return lineTrace(points.map((point) => point[0]), ratio, text, {
      name,
      line: { color: between(colours("depth"), fractions.length > 1 ? i / (fractions.length - 1) : 0), width: 2 },
      marker: { size: 6 },
    });
  });
  const values = traces.flatMap((trace) => trace.y).filter((v) => v !== null);
  drawChart(div, traces, {
    showlegend: true,
    margin: { l: 56, r: 12, t: 30, b: 44 },
    xaxis: axisOf(UNIT),
    yaxis: axisOf("real / predicted", {
      range: [Math.max(Math.min(0, ...values), -2) - 0.15, Math.min(Math.max(1, ...values), 3) + 0.15],
    }),
    shapes: [dotted({ x0: 0, x1: 1, xref: "paper", y0: 1, y1: 1 })],
  });
}

/** The curves of some metrics of all shown runs: colour by run, or by metric if there is one run. */
function drawCurves(div, metrics, runs, title) {
  const palette = colours("runs");
  const traces = [];
  for (const { run, index } of runs) {
    metrics.forEach((metric, k) => {
      const points = (run.curves[metric] ?? []).map(([epoch, value]) => [epoch, fromJson(value)]);
      if (!points.length) return;
      const word = metric.replaceAll("_", " ");
      const name = runs.length > 1 ? `${run.name}: ${word}` : word;
      const text = points.map(([epoch, value]) => `${plain(name)}<br>${UNIT} ${show(epoch, 4)}: ${show(value)}`);
      traces.push(
        lineTrace(points.map((point) => point[0]), points.map((point) => point[1]), text, {
          mode: points.length > 1 ? "lines" : "markers",
          name: plain(cut(name, Math.max(20, div.clientWidth / 7.5))),
          line: { color: palette[(runs.length > 1 ? index : k) % palette.length], dash: DASHES[k % DASHES.length], width: 2 },
        }),
      );
    });
  }
  const values = traces.flatMap((trace) => trace.y);
  const sizes = values.filter((v) => v !== null);
  const isWide = Math.min(...sizes) > 0 && Math.max(...sizes) > 10 * Math.min(...sizes);
  const logarithmic = isWide && !/acc|seconds|time/.test(title);
  drawChart(div, traces, {
    showlegend: true,
    legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", font: { size: 11 } },
    height: 340 + 16 * traces.length * (div.clientWidth < 520 || runs.length > 1),
    margin: { l: 56, r: 12, t: 12, b: 44 },
    xaxis: axisOf(UNIT),
    yaxis: logarithmic ? logAxis(title, values) : axisOf(title),
  });
}
