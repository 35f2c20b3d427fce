// Pictures of numbers: bars, scales, coloured spans, tinted words, heat maps. Each has its numbers as text.

import { Characters, fill, make, plain } from "./dom.js";
import { t } from "./words.js";

/**
 * Bars, the longest first as given. A row is { name, share, value, mark, action }: the share of the
 * width, the text at the end, whether it is the answer, and an element next to it.
 */
export function bars(rows, { most = 8, threshold } = {}) {
  const items = rows.map(({ name, share, value, mark, note, action }) =>
    make("li", { class: mark ? "bar chosen" : "bar" },
      make("span", { class: "bar-name", dir: "auto", title: name }, name, note ? make("small", {}, note) : null),
      make("span", { class: "bar-track", "aria-hidden": "true" },
        make("span", { class: "bar-fill", css: { "--share": String(Math.max(0, Math.min(1, share))) } }),
        threshold === undefined ? null : make("span", { class: "bar-line", css: { "--share": String(threshold) } })),
      make("span", { class: "bar-value" }, value), action));
  const list = (part) => make("ul", { class: "bars" }, part);
  if (items.length <= most) return list(items);
  return make("div", {}, list(items.slice(0, most)),
    make("details", {}, make("summary", {}, t("more", { n: items.length - most })), list(items.slice(most, 200))));
}

/** A score on a scale from 0 that fits it. */
export function scale(score) {
  const size = Math.abs(score);
  const end = size <= 1 ? 1 : size <= 5 ? 5 : 10 ** Math.ceil(Math.log10(size));
  const from = score < 0 ? -end : 0;
  return make("div", { class: "scale" },
    make("div", { class: "scale-value" }, plain(score)),
    make("div", { class: "scale-track", "aria-hidden": "true" },
      make("span", { class: "scale-dot", css: { "--share": String((score - from) / (end - from)) } })),
    make("div", { class: "scale-ends", "aria-hidden": "true" }, make("span", {}, String(from)), make("span", {}, String(end))));
}

const HUES = 8;
/** Return a number for a type, always the same. */
const hue = (type) => Array.from(type).reduce((sum, one) => (sum * 31 + one.codePointAt(0)) >>> 0, 7) % HUES;

/** A text with spans { start, stop, type } in colour, each with its type as a badge. */
export function spans(text, found) {
  const characters = new Characters(text), parts = [];
  let at = 0;
  for (const { start, stop, type, title } of [...found].sort((a, b) => a.start - b.start)) {
    if (start < at) continue;
    parts.push(characters.slice(at, start));
    parts.push(make("mark", { class: "span", css: { "--hue": `var(--hue-${hue(type)})` }, title: title ?? "" },
      characters.slice(start, stop), make("span", { class: "badge" }, type)));
    at = stop;
  }
  parts.push(characters.slice(at));
  return make("p", { class: "text", dir: "auto" }, parts);
}

/** A text with one marked passage. */
export function marked(text, start, stop) {
  const characters = new Characters(text);
  return make("p", { class: "text", dir: "auto" }, characters.slice(0, start),
    make("mark", { class: "answer" }, characters.slice(start, stop)), characters.slice(stop));
}

/** A text whose pieces { start, stop, share, title } are tinted, from 0 to 1. */
export function tinted(text, pieces, most = 3000) {
  const characters = new Characters(text), parts = [];
  let at = 0;
  for (const { start, stop, share, title } of pieces.slice(0, most)) {
    if (start < at) continue;
    parts.push(characters.slice(at, start));
    parts.push(make("span", { class: "tint", title, css: { "--share": share.toFixed(3) } }, characters.slice(start, stop)));
    at = stop;
  }
  parts.push(characters.slice(at));
  return make("p", { class: "text loose", dir: "auto" }, parts);
}

/** A legend for tints. */
export const legend = (low, high) => make("p", { class: "legend" }, make("span", {}, low), make("span", { class: "ramp", "aria-hidden": "true" }), make("span", {}, high));

/**
 * Words with effects: { text, start, stop, part, effect }. Those that raise the output and those
 * that lower it differ by colour and by the line below them.
 */
export function effects(texts, words, digits) {
  const largest = Math.max(1e-12, ...words.map((word) => Math.abs(word.effect ?? 0)));
  return make("div", { class: "effects" }, texts.map((text, part) => {
    const characters = new Characters(text), pieces = [];
    let at = 0;
    for (const word of words.filter((one) => one.part === part)) {
      if (word.start < at) continue;
      pieces.push(characters.slice(at, word.start));
      const share = Math.abs(word.effect ?? 0) / largest;
      const side = (word.effect ?? 0) < 0 ? "lowers" : "raises";
      const number = word.effect === null ? "" : `${word.effect < 0 ? "−" : "+"}${Math.abs(word.effect).toFixed(digits)}`;
      pieces.push(make("span", { class: `effect ${side}`, title: number, css: { "--share": share.toFixed(3) } },
        make("span", { class: "effect-word" }, characters.slice(word.start, word.stop)),
        make("small", {}, share > 0.2 && number ? number : "\u00a0")));
      at = word.stop;
    }
    pieces.push(characters.slice(at));
    return make("p", { class: "text effects-text", dir: "auto" }, pieces);
  }));
}

/** The cosines of vectors with each other, row by row. */
export function cosines(vectors) {
  const norms = vectors.map((vector) => Math.hypot(...vector) || 1e-12);
  return vectors.map((a, i) => vectors.map((b, j) => a.reduce((sum, value, k) => sum + value * b[k], 0) / (norms[i] * norms[j])));
}

/** A heat map of a square matrix, and for the line that is pointed at its neighbours. */
export function heatMap(matrix, lines) {
  const count = matrix.length, numbers = count <= 12;
  const low = Math.min(0.2, ...matrix.flat());
  const shade = (value) => Math.max(0, Math.min(1, (value - low) / (1 - low)));
  const near = make("div", { class: "near", "aria-live": "polite" });
  const cells = [];
  const show = (row) => {
    cells.forEach((line, n) => line.forEach((cell) => cell.classList.toggle("on", n === row)));
    const others = matrix[row].map((value, n) => ({ n, value })).filter(({ n }) => n !== row).sort((a, b) => b.value - a.value);
    fill(near, make("h3", {}, t("nearestTo", { n: row + 1 })), make("p", { class: "quote", dir: "auto" }, lines[row]),
      bars(others.slice(0, 5).map(({ n, value }) => ({ name: `${n + 1} · ${lines[n]}`, share: value, value: plain(value, 2) }))));
  };
  const head = make("tr", {}, make("td", {}), lines.map((line, n) => make("th", { scope: "col", title: line }, String(n + 1))));
  const rows = matrix.map((values, row) => {
    const button = make("button", { type: "button", class: "line", title: lines[row], on: { focus: () => show(row), mouseenter: () => show(row), click: () => show(row) } },
      make("span", { class: "line-number" }, String(row + 1)), make("span", { class: "line-text", dir: "auto" }, lines[row]));
    const line = values.map((value, column) =>
      make("td", { class: "cell", title: `${row + 1} · ${column + 1}: ${plain(value)}`, css: { "--share": shade(value).toFixed(3) }, on: { mouseenter: () => show(row) } },
        make("span", { class: numbers ? "" : "hidden" }, plain(value, 2))));
    cells.push(line);
    return make("tr", {}, make("th", { scope: "row" }, button), line);
  });
  show(0);
  const map = make("table", { class: "heat" }, make("caption", { class: "hidden" }, t("matrix")), make("thead", {}, head), make("tbody", {}, rows));
  return make("div", {}, make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": t("matrix") }, map), near);
}
