// The page: models, input, views. Answers follow the last keystroke.

import { ask, setKey } from "./api.js";
import { comparison } from "./compare.js";
import { fill, fresh, make, select, tabs } from "./dom.js";
import { inputCard, requestFor } from "./inputs.js";
import { resultView } from "./results.js";
import { codeView } from "./snippets.js";
import { change, onAddress, readAddress, state } from "./state.js";
import { tokenView } from "./tokens.js";
import { trainingView } from "./training.js";
import { LANGUAGES, speak, t } from "./words.js";
import { whyView } from "./why.js";

const DELAY = 250, BUSY_DELAY = 200;
const VIEWS = ["result", "why", "training", "tokens", "code"];
const page = document.getElementById("page");

let models = [], needsKey = false;
let timer = 0, running = null;
const known = new Map();  // answers to what was written last, by request
let panel = null, tabList = null, status = null;

const modelOf = () => models.find((model) => model.name === state.model) ?? models[0];
const peersOf = (model) => models.filter((one) => one.task === model.task && one !== model && !one.index);
/** The model whose answers are shown beside; of two models the other one, unless the choice is none. */
const rivalOf = (model) => peersOf(model).find((one) => one.name === (state.against ?? (models.length === 2 ? one.name : "")));
const viewOf = () => (VIEWS.includes(state.tab) ? state.tab : "result");

async function begin() {
  readAddress();
  speak(state.lang);
  paint();
  fill(page, make("p", { class: "opening", role: "status" }, t("waiting")));
  try {
    const { models: served, indexes } = (await ask("info")).answer;
    models = [...served, ...indexes.map((index) => searched(index, served))];
    build();
  } catch (error) {
    if (error.status === 401) askForKey(needsKey);
    else fill(page, frame(make("main", { class: "card narrow" }, errorBox(error, begin))));
  }
}

/** An index, in the list of models: the model that embeds queries, for a task of its own. */
function searched(index, served) {
  const rankers = served.filter((model) => model.task === "rerank").map((model) => model.name);
  const model = served.find((one) => one.name === index.model);
  return { ...model, ...index, name: `search:${index.name}`, index: index.name, served: model.name, task: "search", rankers };
}

function paint() {
  const theme = ["dark", "light"].includes(state.theme) ? state.theme : "";
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

// ---- the frame ----

function frame(...content) {
  const language = select(t("language"), Object.entries(LANGUAGES), document.documentElement.lang.slice(0, 2),
    (lang) => { change({ lang }); speak(lang); models.length ? build() : begin(); }, "small");
  const theme = select(t("theme"), [["", t("auto")], ["light", t("light")], ["dark", t("dark")]], state.theme ?? "",
    (value) => { change({ theme: value || undefined }); paint(); dispatchEvent(new Event("resize")); }, "small");
  document.title = `bothways · ${t("playground")}`;
  return [
    make("a", { class: "skip", href: "#output", on: { click: (event) => { event.preventDefault(); document.getElementById("output")?.focus(); } } }, t("skip")),
    make("header", { class: "top" },
      make("h1", {}, "bothways", make("span", {}, t("playground"))),
      models.length > 1 ? [modelPicker(), rivalPicker()] : models.length ? make("span", { class: "only-model" }, models[0].name) : null,
      make("div", { class: "settings" }, language, theme)),
    ...content,
  ];
}

function modelPicker() {
  const chosen = modelOf().name;
  return select(t("model"), models.map((model) => [model.name, `${model.index ?? model.name} · ${model.task}`]), chosen, (name) => {
    change({ model: name, label: undefined, word: undefined, layer: undefined });
    build();
  });
}

function rivalPicker() {
  const model = modelOf(), peers = peersOf(model).map((one) => [one.name, one.name]);
  return peers.length ? select(t("against"), [["", t("none")], ...peers], rivalOf(model)?.name ?? "", (against) => {
    change({ against });
    build();
  }) : null;
}

/** What a model is, as far as its folder says. */
function factsOf(model) {
  const rows = Object.entries(model.facts ?? {});
  return rows.length ? make("details", { class: "numbers" }, make("summary", {}, t("facts", { name: model.name })),
    make("dl", { class: "facts" }, rows.flatMap(([name, value]) => [make("dt", {}, t(`facts_${name}`)), make("dd", {}, value)]))) : null;
}

function askForKey(wrong) {
  needsKey = true;
  const id = fresh("key");
  const box = make("input", { id, type: "password", autocomplete: "off", spellcheck: false });
  const open = () => { setKey(box.value); begin(); };
  box.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
  fill(page, frame(make("main", { class: "card narrow" },
    make("h2", {}, t("keyNeeded")),
    make("div", { class: "field" }, make("label", { for: id }, t("key")), box),
    wrong ? make("p", { class: "error", role: "alert" }, t("wrongKey")) : null,
    make("p", { class: "note" }, t("keyNote")),
    make("button", { type: "button", class: "primary", on: { click: open } }, t("open")))));
  box.focus();
}

/** Make the page for the chosen model; `focus` is the name of a field to put the cursor in. */
function build(focus) {
  const model = modelOf();
  panel = make("div", { id: "output", class: "panel", role: "tabpanel", tabIndex: -1, "aria-labelledby": `tab-${viewOf()}` });
  status = make("p", { class: "status", role: "status" });
  tabList = make("div");
  const output = make("section", { class: "card output", "aria-label": t("result") }, tabList, panel, status);
  output.append(...[model, rivalOf(model)].filter(Boolean).map(factsOf).filter(Boolean));
  fill(page, frame(make("main", { class: "columns" }, inputCard(model, soon, build), output)));
  choices();
  if (focus) page.querySelector(".input textarea")?.focus();
  refresh();
}

function choices() {
  fill(tabList, tabs(t("views"), VIEWS.map((name) => [name, t(name)]), viewOf(), (tab) => {
    change({ tab: tab === "result" ? undefined : tab });
    choices();
    panel.setAttribute("aria-labelledby", `tab-${tab}`);
    document.getElementById(`tab-${tab}`)?.focus();
    refresh();
  }, "output"));
}

// ---- answers ----

function soon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, DELAY);
}

/** Show the view for what is written now; what was under way for other texts is given up. */
async function refresh() {
  clearTimeout(timer);
  running?.abort();
  const mine = (running = new AbortController());
  const model = modelOf(), request = requestFor(model);
  const busy = setTimeout(() => panel.classList.add("busy"), BUSY_DELAY);
  panel.setAttribute("aria-busy", "true");
  try {
    const view = viewOf();
    if (view === "training") show(mine, await trainingView(model, mine.signal, refresh), "");
    else if (view === "tokens") show(mine, await tokenView(model, mine.signal), "");
    else if (request.missing && !(view === "why" && model.task === "fill")) show(mine, [emptyBox(request.missing)], "");
    else await answered(mine, model, request, view);
  } catch (error) {
    if (error.name !== "AbortError") {
      if (error.status === 401) askForKey(true);
      else show(mine, [errorBox(error, refresh)], "");
    }
  } finally {
    clearTimeout(busy);
    if (running === mine) {
      panel.classList.remove("busy");
      panel.removeAttribute("aria-busy");
    }
  }
}

async function answered(mine, model, request, view) {
  const { answer = null, whole, line = "", extra } = request.missing ? {} : await compute(model, request, mine.signal);
  const rival = rivalOf(model);
  if (view === "result" && rival) {
    const other = requestFor(rival);
    if (other.missing) return show(mine, [emptyBox(other.missing)], "");
    const second = await compute(rival, other, mine.signal);
    const views = [resultView(model, answer, request.body, extra, put), resultView(rival, second.answer, other.body, second.extra, put)];
    show(mine, comparison([model, rival], [answer, second.answer], views), line);
  } else if (view === "result") show(mine, resultView(model, answer, request.body, extra, put), line);
  else if (view === "code") show(mine, codeView(request, whole, needsKey), line);
  else {
    const found = await whyView(model, answer, mine.signal, refresh);
    if (Array.isArray(found)) return show(mine, found, "");
    const head = [found.controls, found.caveat];
    if (running !== mine) return;
    const body = panel.querySelector(".explained") ?? make("div", { class: "explained" }, make("p", { class: "note" }, t("waiting")));
    fill(panel, head, body);
    fill(status);
    try {
      const parts = await found.show();
      if (running === mine) fill(body, parts);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (running === mine) fill(body, errorBox(error, refresh));
    }
  }
}

/** Return the answer to a request, its only part if it has one, and what is said of it; asked for unless it is known. */
async function compute(model, request, signal) {
  const key = JSON.stringify([request.path, request.body]);
  if (known.has(key)) return known.get(key);
  const tokens = model.task === "likelihood"
    ? ask("tokenize", { model: model.name, inputs: request.body.inputs, add_special_tokens: false }, signal) : null;
  tokens?.catch(() => {});
  const { answer: whole, milliseconds, headers } = await ask(request.path, request.body, signal);
  const inModel = /model;dur=([\d.]+)/.exec(headers.get("server-timing") ?? "")?.[1] ?? "0";
  const cut = Number(headers.get("x-truncated") ?? 0) > 0;
  const line = [t("time", { ms: milliseconds.toFixed(0), model: Number(inModel).toFixed(1) }), cut ? t("truncated") : ""].filter(Boolean).join(" · ");
  const computed = { answer: request.listed ? whole[0] : whole, whole, extra: tokens ? (await tokens).answer[0] : null, line };
  if (known.size > 3) known.clear();
  known.set(key, computed);
  return computed;
}

function show(mine, elements, line) {
  if (running !== mine) return;
  fill(panel, elements);
  fill(status, line);
}

function put(text) {
  change({ text });
  build();
}

function emptyBox(text) {
  return make("div", { class: "empty" }, make("span", { class: "empty-mark", "aria-hidden": "true" }, "⇄"), make("p", {}, text));
}

function errorBox(error, again) {
  return make("div", { class: "error", role: "alert" },
    make("p", {}, make("strong", {}, error.status ? `${error.status} ${error.code ?? ""}` : "")),
    make("p", {}, error.message),
    make("button", { type: "button", class: "quiet", on: { click: () => again() } }, t("retry")));
}

onAddress(() => {
  speak(state.lang);
  paint();
  if (models.length) build();
});
begin();
