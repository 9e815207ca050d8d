// --- heat maps of Hbar and of its inverse ------------------------------------------------------------

const MATRICES = { Hbar: "H̄", inverse: "Inverse" };
const SCALES = {
  raw: ["Raw", "Colours are proportional to the entries."],
  log: ["Log", "Colours follow the logarithm of the entries, with their sign, so that small ones show."],
  normalised: [
    "Normalised",
    "Every group is scaled to curvature 1: entries are H̄ₛₜ / √|H̄ₛₛ H̄ₜₜ|, 0 for no interaction. Beyond ±1 the curvature of the two together is negative in some direction.",
  ],
};
const BLOCKS = {
  all: ["All", null, null],
  "weight-weight": ["Weight–weight", "weight", "weight"],
  "weight-bias": ["Weight–bias", "weight", "bias"],
  "bias-bias": ["Bias–bias", "bias", "bias"],
};
const CELL = 12; // pixels that a name needs

/** Numbers of the groups in the rows and columns of a block. */
function blockOf(run, block) {
  const [, rowRole, columnRole] = BLOCKS[block];
  const having = (role) =>
    run.groups.flatMap((group, s) => (role === null || group.role === role ? [s] : []));
  return [having(rowRole), having(columnRole)];
}

/** The entries of a matrix that a scale colours, or null. */
function coloured(run, measured, matrix, scale) {
  const entry = entries(measured[matrix], run.groups.length);
  return entry === null || scale !== "normalised" ? entry : normalised(entry);
}

/** Largest size of the entries, of nine in ten, and where the logarithmic scale turns linear. */
function limits(values) {
  const sizes = values.map(Math.abs).filter((v) => Number.isFinite(v) && v > 0).sort((a, b) => a - b);
  if (!sizes.length) return { most: 1, many: 1, least: 1e-3 };
  const most = sizes[sizes.length - 1];
  const quantile = (share) => sizes[Math.floor(share * (sizes.length - 1))];
  return { most, many: quantile(0.9), least: Math.max(quantile(0.05), most * 1e-12) };
}

/** All values that a picture may colour, over rows and columns. */
function valuesOf(entry, rows, columns) {
  return rows.flatMap((s) => columns.map((t) => entry(s, t)));
}

/** How colours follow values: a function, its range, and marks for the colour bar. */
function colouring(scale, { most, many, least }) {
  if (scale !== "log") {
    // Normalised entries are at most 1 where the matrix is positive definite; else a few may be huge.
    const range = scale === "raw" ? most : Math.max(1, many);
    const marks = [-1, -0.5, 0, 0.5, 1].map((share) => share * range);
    return { of: (v) => v, range, at: marks, text: marks.map((v) => show(v, 2)) };
  }
  const of = (v) => Math.sign(v) * Math.log10(1 + Math.abs(v) / least);
  const [low, high] = [Math.ceil(Math.log10(least)), Math.floor(Math.log10(most))];
  const step = Math.max(1, Math.ceil((high - low) / 2));
  const sizes = [];
  for (let power = high; power >= low && sizes.length < 2; power -= step) sizes.push(power);
  const marks = [...sizes.map((p) => -(10 ** p)), 0, ...sizes.reverse().map((p) => 10 ** p)];
  const text = marks.map((v) => (v ? `${v < 0 ? "-" : ""}1e${Math.round(Math.log10(Math.abs(v)))}` : "0"));
  return { of, range: of(most), at: marks.map(of), text };
}

/** Ticks of an axis at some numbers, with the names that have these numbers. */
const namedTicks = (names, chosen) => ({
  tickmode: "array",
  tickvals: chosen,
  ticktext: chosen.map((k) => names[k]),
  tickfont: { size: 10.5 },
});

/** Which numbered names fit on this many pixels, for the visible part of an axis. */
function ticks(range, count, pixels) {
  const from = Math.max(0, Math.ceil(Math.min(...range)));
  const to = Math.min(count - 1, Math.floor(Math.max(...range)));
  const step = Math.max(1, Math.ceil(((to - from + 1) * CELL) / pixels));
  const chosen = [];
  for (let k = from; k <= to; k += step) chosen.push(k);
  return chosen;
}

/** Draw one matrix of one run at one moment into a panel. */
function drawHeatmap(panel, run, measured, matrix, options) {
  const [rows, columns] = blockOf(run, options.block);
  const holder = panel.querySelector(".scroll");
  const entry = coloured(run, measured, matrix, options.scale);
  let missing = "";
  if (entry === null) missing = matrix === "inverse" ? `No inverse: ${measured.no_inverse}` : "Hbar was not measured.";
  else if (!rows.length || !columns.length) missing = "There are no groups of this kind.";
  panel.querySelector(".note").hidden = !missing;
  panel.querySelector(".note").textContent = missing;
  holder.hidden = missing !== "";
  if (missing) return;

  const raw = entries(measured[matrix], run.groups.length);
  const error = matrix === "Hbar" ? entries(measured.Hbar_stderr, run.groups.length) : null;
  const scaled = normalised(raw);
  const paint = colouring(options.scale, options.limits ?? limits(valuesOf(entry, rows, columns)));
  const beyond = valuesOf(entry, rows, columns).filter(
    (v) => Number.isFinite(v) && Math.abs(paint.of(v)) > paint.range * 1.001,
  ).length;
  const about = panel.querySelector(".about");
  about.textContent = joined(options.note, beyond ? `${beyond} cells are beyond ±${show(paint.range, 2)}` : "");
  about.hidden = about.textContent === "";
  const z = rows.map((s) =>
    columns.map((t) => (Number.isFinite(entry(s, t)) ? paint.of(entry(s, t)) : null)),
  );
  const name = (s) => plain(run.groups[s].title);
  const symbol = matrix === "Hbar" ? "H̄" : "H̄⁻¹";
  const text = rows.map((s) =>
    columns.map((t) => {
      const plus = plusMinus(error && error(s, t));
      const where = s === t ? name(s) : `${name(s)}<br>${name(t)}`;
      return `${where}<br>${symbol} = ${show(raw(s, t))}${plus}<br>normalised ${show(scaled(s, t), 4)}`;
    }),
  );

  // Cells are square, and the picture is wide enough for every name on request.
  const width = panel.clientWidth;
  const short = labels(run.groups.map((group) => group.title), lettersFor(width));
  const [rowNames, columnNames] = [rows, columns].map((list) => list.map((s) => short[s]));
  const margin = { l: room(rowNames), r: 20, t: 44, b: room(columnNames), autoexpand: false };
  const fitting = Math.max(60, width - margin.l - margin.r);
  const across = options.every ? Math.max(fitting, columns.length * CELL) : fitting;
  const cell = across / columns.length;
  const down = Math.min(cell, 90) * rows.length;
  const div = holder.firstChild;
  const axis = (names, pixels, extra) => ({
    ...namedTicks(names, ticks([0, names.length - 1], names.length, pixels)),
    ticks: "",
    showgrid: false,
    zeroline: false,
    range: [-0.5, names.length - 0.5],
    ...extra,
  });
  const layout = {
    ...baseLayout(),
    plot_bgcolor: colour("raised"), // hatched by the style sheet
    width: across + margin.l + margin.r,
    height: down + margin.t + margin.b,
    margin,
    uirevision: `${options.block} ${options.every}`,
    xaxis: axis(columnNames, across, { tickangle: -90 }),
    yaxis: axis(rowNames, down, { range: [rows.length - 0.5, -0.5] }),
    annotations: unfinished(entry, rows, columns, cell),
  };
  const steps = colours("diverging");
  const trace = {
    type: "heatmap",
    z,
    text,
    hovertemplate: "%{text}<extra></extra>",
    colorscale: steps.map((c, i) => [i / (steps.length - 1), c]),
    zmin: -paint.range,
    zmax: paint.range,
    colorbar: {
      orientation: "h", thickness: 8, outlinewidth: 0, ticklabelposition: "outside top",
      x: 0.5, xpad: 0, len: 1, y: 1, ypad: 4, yanchor: "bottom",
      tickmode: "array", tickvals: paint.at, ticktext: paint.text, tickfont: { size: 10.5 },
    },
  };
  div.names = [rowNames, columnNames];
  Plotly.react(div, [trace], layout, PLOT_OPTIONS);
  if (div.dataset.watched) return;
  div.dataset.watched = "yes";
  // After a zoom more names fit.
  div.on("plotly_relayout", (change) => {
    if (!("xaxis.range[0]" in change) && !("xaxis.autorange" in change)) return;
    const update = {};
    for (const [key, names] of [["xaxis", div.names[1]], ["yaxis", div.names[0]]]) {
      const shown = div._fullLayout[key];
      const chosen = ticks(shown.range, names.length, shown._length);
      update[`${key}.tickvals`] = chosen;
      update[`${key}.ticktext`] = chosen.map((k) => names[k]);
    }
    Plotly.relayout(div, update);
  });
}

/** Names of the entries that are not finite, on their hatched cells, where there is room. */
function unfinished(entry, rows, columns, cell) {
  if (cell < 22) return [];
  return rows.flatMap((s, i) =>
    columns.flatMap((t, j) =>
      Number.isFinite(entry(s, t))
        ? []
        : [{ x: j, y: i, text: show(entry(s, t)), showarrow: false, font: { size: 10 } }],
    ),
  ).slice(0, 400);
}
