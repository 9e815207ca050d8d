// --- the page: controls, the download, the start ---------------------------------------------------

/** Radio buttons for one field of the state. */
function choice(field, options) {
  for (const [value, text] of options) {
    const input = element("input", { type: "radio", name: field, value });
    input.checked = state[field] === value;
    input.addEventListener("change", () => {
      state[field] = value;
      drawHeatmaps();
    });
    $(field).append(element("label", {}, input, text));
  }
}

function setUpControls() {
  choice("matrix", [...Object.entries(MATRICES), ["both", "Both"]]);
  choice("scale", Object.entries(SCALES).map(([value, [text]]) => [value, text]));
  choice("block", Object.entries(BLOCKS).map(([value, [text]]) => [value, text]));
  const roles = new Set(withMeasurements.flatMap((run) => run.groups.map((group) => group.role)));
  for (const [value, [, row, column]] of Object.entries(BLOCKS)) {
    const input = document.querySelector(`input[name="block"][value="${value}"]`);
    input.disabled = value !== "all" && !(roles.has(row) && roles.has(column));
  }
  for (const field of ["same", "every"]) {
    $(field).addEventListener("change", () => {
      state[field] = $(field).checked;
      drawHeatmaps();
    });
  }
  $("same-label").hidden = epochs.length < 2 && data.runs.length < 2;

  data.runs.forEach((run, index) => {
    const input = element("input", { type: "checkbox", value: index });
    input.checked = state.shown.has(index);
    input.addEventListener("change", () => {
      if (input.checked) state.shown.add(index);
      else state.shown.delete(index);
      draw();
    });
    const dot = element("span", { class: "dot", "data-run": index });
    $("runs").append(element("label", {}, input, dot, run.name));
  });
  $("runs").hidden = data.runs.length < 2;
  $("moment").hidden = epochs.length < 2;
  $("bar").hidden = data.runs.length < 2 && epochs.length < 2;
  $("epoch").max = Math.max(epochs.length - 1, 0);
  $("epoch").value = state.epoch;
  $("epoch").addEventListener("input", () => {
    state.epoch = Number($("epoch").value);
    $("epoch").setAttribute("aria-valuetext", `${UNIT} ${epochs[state.epoch]}`);
    draw(true);
  });
  $("download").addEventListener("click", download);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  setTheme(dark.matches);
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").textContent = isDark ? "Light" : "Dark";
  $("theme").setAttribute("aria-pressed", isDark);
  for (const dot of document.querySelectorAll(".dot")) {
    const palette = colours("runs");
    dot.style.background = palette[dot.dataset.run % palette.length];
  }
  draw();
}

/** Everything on the page as JSON with plain numbers; those that are not finite by their names. */
function download() {
  const readable = (value) => (Number.isFinite(value) ? value : show(value));
  const square = (packed, size) => {
    const entry = entries(packed, size);
    if (entry === null) return null;
    return Array.from({ length: size }, (_, s) => Array.from({ length: size }, (_, t) => readable(entry(s, t))));
  };
  const runs = data.runs.map((run) => ({
    ...run,
    measured: run.measured.map((measured) => {
      const plainValues = { ...measured };
      for (const name of ["gbar", "gbar_stderr", "D3", "eta", "eta_stderr"]) {
        plainValues[name] = numbers(measured[name])?.map(readable) ?? null;
      }
      for (const name of ["Hbar", "Hbar_stderr", "inverse"]) {
        plainValues[name] = square(measured[name], run.groups.length);
      }
      return plainValues;
    }),
  }));
  const blob = new Blob([JSON.stringify({ title: data.title, runs })], { type: "application/json" });
  const link = element("a", { href: URL.createObjectURL(blob), download: "newton_summary.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Unpack plotly from the page and run it. */
async function loadPlotly() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "This browser cannot unpack the pictures (it has no DecompressionStream). The tables are complete; for the pictures use Chrome or Edge 80, Firefox 113, Safari 16.4 or newer.",
    );
  }
  const bytes = Uint8Array.from(atob($("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = element("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

setUpControls();
try {
  await loadPlotly();
  canDraw = true;
  draw();
} catch (error) {
  $("problem").hidden = false;
  $("problem").textContent = error.message;
}
let width = document.body.clientWidth;
let waiting;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (document.body.clientWidth === width) return; // a phone's address bar
    width = document.body.clientWidth;
    draw();
  }, 150);
});
document.documentElement.dataset.ready = "yes";
