// --- values: what the page carries, unpacked --------------------------------------------------------

const $ = (id) => document.getElementById(id);

/** Make an element; children are elements or text, which is never read as markup. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const unpacked = new WeakMap();

/** Numbers from {type, data}: base64 of little-endian floats. */
function numbers(packed) {
  if (packed === null) return null;
  if (!unpacked.has(packed)) {
    const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
    const Kind = packed.type === "float32" ? Float32Array : Float64Array;
    unpacked.set(packed, Array.from(new Kind(bytes.buffer)));
  }
  return unpacked.get(packed);
}

/** A function (s, t) -> entry, of a matrix that was packed whole or as its upper triangle. */
function entries(packed, size) {
  const values = numbers(packed);
  if (values === null) return null;
  if (values.length === size * size) return (s, t) => values[s * size + t];
  return (s, t) => {
    const [i, j] = s <= t ? [s, t] : [t, s];
    return values[i * size - (i * (i - 1)) / 2 + (j - i)];
  };
}

/** Entries scaled to a diagonal of 1 or -1; NaN where a diagonal entry is 0 or not finite. */
function normalised(entry) {
  const root = (s) => Math.sqrt(Math.abs(entry(s, s)));
  const scale = (s) => (root(s) > 0 && Number.isFinite(root(s)) ? root(s) : NaN);
  return (s, t) => entry(s, t) / scale(s) / scale(t);
}

/** A value of JSON, where "nan", "inf" and "-inf" stand for numbers that JSON cannot hold. */
function fromJson(value) {
  if (typeof value === "number") return value;
  return { inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
}

/** A number in words: six digits, or its name if it is not finite. */
function show(value, digits = 6) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const isPlain = Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6;
  return (isPlain ? value.toPrecision(digits) : value.toExponential(digits - 1)).replace("e+", "e");
}

/** What follows a number that has a standard error. */
const plusMinus = (error) => (error === null || Number.isNaN(error) ? "" : ` ± ${show(error, 2)}`);

/** Text that plotly shows as it is: its labels allow some markup. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** A name of at most this many letters: a longer one loses its middle. */
function cut(name, most) {
  if (name.length <= most) return name;
  const tail = Math.ceil((most - 1) * 0.6);
  return `${name.slice(0, Math.floor(most) - 1 - tail)}…${name.slice(-tail)}`;
}

/**
 * Shorter names. Words between dots are left out, the first ones first, as long as the names stay
 * different and of two words, and never the one that says of what a weight or a bias is; what is
 * still too long loses its middle.
 */
function shorter(names, most) {
  let short = names.map((name) => name.split("."));
  const text = (list) => list.map((words) => words.join("."));
  for (const word of new Set(short.flatMap((words) => words.slice(0, -1)))) {
    if (/^\d+$/.test(word) || text(short).every((name) => name.length <= most)) continue;
    const fewer = short.map((words) => {
      const end = words.length - (/^(weight|bias)\b/.test(words.at(-1)) ? 2 : 1);
      const rest = words.filter((w, k) => w !== word || k >= end);
      return rest.length > 1 ? rest : words; // "weight" alone would not say of what
    });
    if (new Set(text(fewer)).size === new Set(names).size) short = fewer;
  }
  return text(short).map((name) => cut(name, most));
}

/** Names short enough for an axis of plotly. */
const labels = (names, most) => shorter(names, most).map(plain);

/** Pixels that the longest of some labels takes on an axis. */
const room = (names) => 12 + 6.1 * Math.max(...names.map((name) => name.replace(/&\w+;/g, ".").length));
const lettersFor = (pixels) => Math.round(Math.min(Math.max(pixels / 22, 14), 30));

/** Colours of the theme, from the style sheet. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colours = (name) => colour(name).split(/\s+/);

/** A colour between those of a list, at a share of its length. */
function between(list, share) {
  const at = Math.min(Math.max(share, 0), 1) * (list.length - 1);
  const i = Math.min(Math.floor(at), list.length - 2);
  const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  const [a, b] = [rgb(list[i]), rgb(list[i + 1])];
  return `rgb(${a.map((x, k) => Math.round(x + (at - i) * (b[k] - x))).join(",")})`;
}
