// What each task asks for, and the request that it becomes.

import { make, fill, fresh, segments, select, short } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { change, state } from "./state.js";
import { language, t } from "./words.js";

const text = (label, rows = 5) => ({ name: "text", label, rows });
const second = (label, rows = 3) => ({ name: "second", label, rows });
const items = (label, rows = 6) => ({ name: "items", label, rows });

/** The fields of each task, by the name that the state has for them. */
function fieldsOf(model) {
  switch (model.task) {
    case "answer": return [second(t("question"), 1), text(t("context"), 7)];
    case "choice": return [text(t("context"), 3), items(t("endings"), 5)];
    case "embed": return [items(t("lines"), 8)];
    case "rerank": return [text(t("query"), 1), items(t("documents"), 7)];
    case "prefer": return [text(t("first"), 3), second(t("second"), 3)];
    case "search": return [text(t("query"), 2)];
    case "fill": return [text(t("maskText", { mask: model.mask }), 4)];
    case "classify": case "multilabel": case "regress":
      return takesSecond(model) ? [text(t("first"), 4), second(t("second"), 3)] : [text(t("text"))];
    default: return [text(t("text"))];
  }
}

const MODES = ["vectors", "hybrid", "bm25"];

/** Return how an index is searched: what is chosen, as far as it and the server have it. */
const searchOf = (model) => ({
  mode: model.bm25 && MODES.includes(state.mode) ? state.mode : "vectors",
  ranker: model.rankers.includes(state.rerank) ? state.rerank : "",
});

/** Return the controls of a search. */
function searchControls(model, rebuild) {
  const { mode, ranker } = searchOf(model), set = (values) => { change(values); rebuild(); };
  const rankers = [["", t("none")], ...model.rankers.map((name) => [name, name])];
  return make("div", { class: "controls" },
    model.bm25 ? segments(t("mode"), MODES.map((name) => [name, t(name)]), mode, (name) => set({ mode: name })) : null,
    model.rankers.length ? select(t("reranker"), rankers, ranker, (name) => set({ rerank: name || undefined })) : null,
    make("p", { class: "note" }, t("indexNote", { n: model.documents, stored: model.stored })));
}

const PAIRED = ["classify", "multilabel", "regress"];
const takesSecond = (model) => model.pairs || state.second !== undefined;

/** Return the lines of a field that are not blank. */
const linesOf = (value) => (value ?? "").split("\n").map((line) => line.trim()).filter(Boolean);

/** Return the texts that the model reads, for the view of tokens. */
export function textsOf(model) {
  const { text: a = "", second: b, items: rest } = state;
  if (model.task === "embed") return linesOf(rest);
  if (model.task === "rerank" || model.task === "choice") return [a, ...linesOf(rest)].filter(Boolean);
  if (model.task === "answer") return [b ?? "", a].filter(Boolean);
  return b === undefined || !["prefer", ...PAIRED].includes(model.task) ? [a].filter(Boolean) : [a, b].filter(Boolean);
}

/** Return the request for what is written, or `{ missing }`: what to do first. */
export function requestFor(model) {
  const { text: a = "", second: b = "", items: rest = "" } = state;
  const lines = linesOf(rest), name = model.name;
  const written = a.trim() !== "";
  switch (model.task) {
    case "classify": case "multilabel": case "regress":
      if (!written) return { missing: t("empty") };
      if (!takesSecond(model)) return { path: model.task, body: { model: name, inputs: a } };
      return b.trim() ? { path: model.task, body: { model: name, inputs: [[a, b]] }, listed: true } : { missing: t("needAll") };
    case "prefer":
      return written && b.trim() ? { path: "prefer", body: { model: name, inputs: [[a, b]] }, listed: true } : { missing: t(written ? "needAll" : "empty") };
    case "choice":
      if (!written) return { missing: t("empty") };
      return lines.length > 1 ? { path: "choice", body: { model: name, inputs: { context: a, endings: lines } } } : { missing: t("needTwo") };
    case "answer":
      return written && b.trim() ? { path: "answer", body: { model: name, inputs: { question: b, context: a } } } : { missing: t(written || b.trim() ? "needAll" : "empty") };
    case "fill":
      if (!written) return { missing: t("empty") };
      return a.includes(model.mask) ? { path: "fill", body: { model: name, inputs: a } } : { missing: t("needMask") };
    case "embed":
      if (!lines.length) return { missing: t("empty") };
      return lines.length > 1 ? { path: "embed", body: { model: name, inputs: lines } } : { missing: t("needTwo") };
    case "rerank":
      if (!written) return { missing: t("empty") };
      return lines.length > 1 ? { path: "rerank", body: { model: name, query: a, documents: lines } } : { missing: t("needTwo") };
    case "search": {
      const { mode, ranker } = searchOf(model);
      return written ? { path: "search", body: { index: model.index, query: a, mode, ...(ranker ? { rerank: ranker } : {}) } } : { missing: t("emptyQuery") };
    }
    default:
      return written ? { path: model.task, body: { model: name, inputs: a } } : { missing: t("empty") };
  }
}

/** Return what `/explain` reads for the task, or null where nothing can be explained. */
export function explainedInput(model) {
  const { text: a = "", items: rest = "" } = state;
  if (model.task === "embed") return linesOf(rest).length > 1 ? linesOf(rest).slice(0, 2) : null;
  const request = requestFor(model);
  if (request.missing) return model.task === "fill" && a.trim() ? a : null;
  return request.listed ? request.body.inputs[0] : request.body.inputs;
}

/** Return the card with the fields and the examples. `changed` is called after each change. */
export function inputCard(model, changed, rebuild) {
  const words = make("div", { class: "chips" });
  const write = (values) => {
    change(values);
    if (model.task === "fill") maskable(words, model, (value) => { areas.text.value = value; write({ text: value }); });
    changed();
  };
  const areas = {};
  const fields = fieldsOf(model).map((field) => {
    const id = fresh("input");
    const area = make("textarea", {
      id, rows: field.rows, value: state[field.name] ?? "", spellcheck: false, autocomplete: "off", dir: "auto",
      on: { input: () => write({ [field.name]: area.value || (field.name === "second" ? "" : undefined) }) },
    });
    areas[field.name] = area;
    return make("div", { class: "field" }, make("label", { for: id }, field.label), area);
  });
  const card = make("section", { class: "card input", "aria-labelledby": "input-title" },
    make("div", { class: "card-head" }, make("h2", { id: "input-title" }, t("input")),
      make("button", { type: "button", class: "quiet", on: { click: () => { change(none()); rebuild("text"); } } }, t("clear"))),
    make("p", { class: "purpose" }, t(model.task)),
    fields,
    model.task === "fill" ? make("div", { class: "field" }, make("p", { class: "note", id: "mask-note" }, t("maskHint")), words) : null,
    model.task === "search" ? searchControls(model, rebuild) : null,
    PAIRED.includes(model.task) && !model.pairs ? secondButton(rebuild) : null,
    exampleRow(model, rebuild));
  if (model.task === "fill") write({});
  return card;
}

const none = () => ({ text: undefined, second: undefined, items: undefined, label: undefined, word: undefined });

function secondButton(rebuild) {
  const has = state.second !== undefined;
  const click = () => { change({ second: has ? undefined : "" }); rebuild(has ? "text" : "second"); };
  return make("button", { type: "button", class: "quiet", on: { click } }, t(has ? "removeSecond" : "addSecond"));
}

function exampleRow(model, rebuild) {
  const known = EXAMPLES[language][model.task] ?? [];
  if (!known.length) return null;
  const buttons = known.map((example) => {
    const values = { ...none(), ...example };
    if (values.text) values.text = values.text.replaceAll("{mask}", model.mask);
    if (model.pairs && values.second === undefined && PAIRED.includes(model.task)) return null;
    const title = [values.second, values.text, values.items].find(Boolean).replaceAll("\n", " · ");
    return make("button", { type: "button", class: "example", title, on: { click: () => { change(values); rebuild(); } } }, short(title, 46));
  });
  return make("div", { class: "examples" }, make("h3", {}, t("examples")), buttons);
}

// ---- words to click ----

const hidden = [];
const MOST_CHIPS = 300;

/** Show the words of a text as buttons that hide them behind the mask, or bring them back. */
function maskable(box, model, write) {
  const value = state.text ?? "", parts = value.split(model.mask);
  hidden.length = Math.min(hidden.length, parts.length - 1);
  const chips = [];
  let at = 0;
  parts.forEach((part, n) => {
    for (const piece of segmentsOf(part)) {
      const start = at + piece.index, stop = start + piece.segment.length;
      chips.push(make("button", {
        type: "button", class: "chip", "aria-pressed": "false",
        on: { click: () => { hidden.splice(n, 0, piece.segment); write(value.slice(0, start) + model.mask + value.slice(stop)); } },
      }, piece.segment));
    }
    at += part.length;
    if (n < parts.length - 1) {
      const start = at, was = hidden[n];
      chips.push(make("button", {
        type: "button", class: "chip", "aria-pressed": "true", title: was ?? "",
        on: { click: () => { hidden.splice(n, 1); write(value.slice(0, start) + (was ?? "") + value.slice(start + model.mask.length)); } },
      }, model.mask));
      at += model.mask.length;
    }
  });
  const focused = [...box.children].indexOf(document.activeElement);
  fill(box, chips.slice(0, MOST_CHIPS));
  if (focused >= 0) box.children[Math.min(focused, box.children.length - 1)]?.focus();
}

function segmentsOf(part) {
  if (part.length > 20_000) return [];
  if (typeof Intl.Segmenter === "function") {
    return [...new Intl.Segmenter(language, { granularity: "word" }).segment(part)].filter((piece) => piece.isWordLike);
  }
  return [...part.matchAll(/[\p{L}\p{N}]+/gu)].map((match) => ({ segment: match[0], index: match.index }));
}
