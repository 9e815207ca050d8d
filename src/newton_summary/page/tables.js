// --- tables: groups, pairs, approximations, facts --------------------------------------------------

const sorting = { column: null, descending: true };

/** A table in a box that scrolls; rows are lists of cells, the first of which names the row. */
function table(label, head, rows, words = []) {
  const cells = (row, tag) =>
    row.map((cell, k) => {
      const node = element(k ? tag : "th", { class: words.includes(k) ? "words" : null });
      node.append(...(Array.isArray(cell) ? cell : [cell]));
      if (!k && tag === "td") node.setAttribute("scope", "row");
      if (!k && typeof cell === "string") node.title = cell;
      return node;
    });
  return element(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": label },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...cells(head, "th"))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td")))),
    ),
  );
}

/** The columns of the table of groups that were measured: title, values, standard errors. */
function groupColumns(run, measured) {
  const size = run.groups.length;
  const curvature = entries(measured.Hbar, size);
  const curvatureError = entries(measured.Hbar_stderr, size);
  const diagonal = (entry) => (entry === null ? null : run.groups.map((_, s) => entry(s, s)));
  return [
    ["Group", run.groups.map((group) => group.title), null],
    ["Role", run.groups.map((group) => group.role), null],
    ["Entries", run.groups.map((group) => group.size), null],
    ["Slope ḡ", numbers(measured.gbar), numbers(measured.gbar_stderr)],
    ["Curvature H̄ₛₛ", diagonal(curvature), diagonal(curvatureError)],
    ["Third D³", numbers(measured.D3), null],
    [rateTitle(run), numbers(measured.eta), numbers(measured.eta_stderr)],
  ].filter(([, values]) => values !== null && values.some((value) => value !== null));
}

/** Fill a panel with the groups of a run at one moment; redraw is called after a choice of order. */
function drawGroups(panel, run, measured, redraw) {
  const columns = groupColumns(run, measured);
  const order = run.groups.map((_, s) => s);
  const sorted = columns.find(([title]) => title === sorting.column);
  if (sorted) {
    const values = sorted[1];
    const isText = typeof values[0] === "string";
    const last = (v) => !isText && !Number.isFinite(v); // what is not finite comes last either way
    order.sort((a, b) => {
      if (last(values[a]) || last(values[b])) return last(values[a]) - last(values[b]);
      const gap = isText ? values[a].localeCompare(values[b], "en", { numeric: true }) : values[a] - values[b];
      return sorting.descending ? -gap : gap;
    });
  }
  const head = columns.map(([title]) => {
    const button = element("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      sorting.descending = sorting.column === title ? !sorting.descending : !/Group|Role/.test(title);
      sorting.column = title;
      redraw();
      const again = [...panel.querySelectorAll("thead button")].find((b) => b.textContent === title);
      again.focus();
    });
    return [button];
  });
  const rows = order.map((s) =>
    columns.map(([title, values, errors]) => {
      const value = values[s];
      if (typeof value === "string") return value;
      if (title === "Entries") return value.toLocaleString("en");
      const error = errors && errors[s];
      const plus = title === rateTitle(run) ? afterRate(run, value, error) : plusMinus(error);
      return plus ? [show(value, 4), element("span", { class: "error" }, plus)] : [show(value, 4)];
    }),
  );
  const words = columns.flatMap(([, values], k) => (typeof values[0] === "string" ? [k] : []));
  const box = table(`Groups of ${run.name}`, head, rows, words);
  columns.forEach(([title], k) => {
    if (title !== sorting.column) return;
    const direction = sorting.descending ? "descending" : "ascending";
    box.querySelectorAll("thead th")[k].setAttribute("aria-sort", direction);
  });
  panel.querySelector(".content").replaceChildren(box);
}

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");

/** Strongest pairs, what approximations keep, the joint step, groups that could be merged. */
function drawPairs(panel, run, measured) {
  const { pairs, undefined_pairs, kept, gain, merges } = measured.analysis;
  const left = element("div");
  if (pairs.length) {
    const names = run.groups.map((group) => group.name);
    const short = shorter(run.groups.map((group) => group.title), 22); // two fit beside the numbers
    const named = (name) => [element("span", { title: name }, short[names.indexOf(name)] ?? name)];
    const rows = pairs.map(([first, second, interaction, value, distance]) => [
      named(first),
      named(second),
      show(interaction, 3),
      show(value, 4),
      String(distance),
    ]);
    left.append(table("Strongest pairs", ["Group", "and", "Interaction", "H̄ₛₜ", "Layers apart"], rows, [1]));
  } else left.append(element("p", {}, "No pair of groups has a defined interaction."));
  if (undefined_pairs) {
    left.append(element("p", { class: "hint" }, `Undefined for ${undefined_pairs} pairs: a group has no curvature of its own, or an entry is not finite.`));
  }
  const right = element("div");
  if (kept) {
    const words = [
      ["diagonal", "Diagonal"],
      ["block_diagonal", "Block-diagonal"],
      ["tridiagonal", "Tridiagonal"],
    ];
    const rows = words.map(([key, text]) => [text, percent(fromJson(kept.inverse[key])), percent(fromJson(kept.hessian[key]))]);
    right.append(table("What approximations keep", ["Keeps", "of the inverse", "of H̄"], rows));
  } else right.append(element("p", { class: "note" }, `No inverse: ${measured.no_inverse}`));
  if (gain !== null) right.append(element("p", {}, gain));
  if (merges !== null) right.append(element("p", {}, merges));
  panel.querySelector(".content").replaceChildren(element("div", { class: "side" }, left, right));
}

/** Facts about a run, and about its measurement at one moment. */
function drawFacts(panel, run, measured) {
  const facts = Object.entries(run.facts).filter(([, value]) => value !== "" && value !== "None");
  const add = (key, value) => value && !(key in run.facts) && facts.push([key, String(value)]);
  if (measured) {
    const total = run.groups.reduce((sum, group) => sum + (group.size ?? 0), 0);
    const loss = fromJson(measured.loss);
    const groups = run.groups.length + (total ? ` of ${total.toLocaleString("en")} parameters` : "");
    add("groups", "partition" in run.facts ? "" : groups);
    add("samples", "data" in run.facts || !measured.samples ? "" : measured.samples.toLocaleString("en"));
    add("loss", Number.isNaN(loss) ? "" : show(loss));
    add("direction", measured.kind === "optimizer" ? "the optimizer's last direction" : "");
    add("backend", measured.backend);
    add("accuracy", measured.approximate ? "approximate, by central differences" : "");
    add("why this backend", measured.reason);
    add("status of the rates", `${measured.status}: ${measured.status_text}`);
  }
  const list = element("dl", { class: "facts" });
  for (const [key, value] of facts) {
    const term = element("dt", {}, key.replaceAll("_", " ").replaceAll(".", ".\u200b")); // may break there
    list.append(element("div", {}, term, element("dd", {}, value)));
  }
  panel.querySelector(".content").replaceChildren(list);
}
