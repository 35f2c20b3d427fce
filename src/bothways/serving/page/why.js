// Why the model answers so: one word left out, or attention. Each with its limits.

import { ask } from "./api.js";
import { attentionView } from "./attention.js";
import { effects } from "./charts.js";
import { make, percent, plain, segments, select, signed, table } from "./dom.js";
import { explainedInput } from "./inputs.js";
import { taggedWords } from "./results.js";
import { change, state } from "./state.js";
import { t } from "./words.js";

const NAMES = { leave_one_out: "leaveOut", attention: "attention" };
const NOTES = { leave_one_out: "leaveOutNote", attention: "attentionNote" };

/** Return the methods that can explain a task. */
function methodsOf(model) {
  const without = ["classify", "multilabel", "regress", "tag", "embed"].includes(model.task);
  const attention = !["choice", "rerank", "search"].includes(model.task);
  return [without && "leave_one_out", attention && "attention"].filter(Boolean);
}

/** Return elements that explain the answer; `again` is called when an option changes. */
export async function whyView(model, prediction, signal, again) {
  const inputs = explainedInput(model), methods = methodsOf(model);
  if (inputs === null || !methods.length) return [make("p", { class: "note" }, t(inputs === null ? "empty" : "noWhy"))];
  const method = methods.includes(state.method) ? state.method : methods[0];
  const set = (values) => { change(values); again(); };
  const target = method === "attention" ? null : targetOf(model, prediction);
  const controls = make("div", { class: "controls" },
    segments(t("method"), methods.map((name) => [name, t(NAMES[name])]), method, (name) => set({ method: name })),
    target && target.choices.length > 1 ? select(target.title, target.choices, target.chosen, (value) => set(target.values(value))) : null);
  const caveat = make("p", { class: "caveat", role: "note" }, t(NOTES[method]));
  // The attention of one text, the first of those that are compared.
  const explained = method === "attention" && model.task === "embed" ? inputs[0] : inputs;
  const body = { model: model.name, method, inputs: explained, ...(target?.fields ?? {}) };
  if (method === "attention" && state.layer) body.layer = Math.min(Number(state.layer) || 1, model.layers);
  return { controls, caveat, show: async () => {
    const { answer } = await ask("explain", body, signal);
    if (method === "attention") return attentionView(answer, (layer) => set({ layer }));
    return wordView(answer, inputs);
  } };
}

/** Return what is explained: the choices, the chosen one, and the fields of the request. */
function targetOf(model, prediction) {
  const none = { choices: [], fields: {} };
  if (!prediction) return none;
  switch (model.task) {
    case "classify": case "multilabel": {
      const ranked = Object.entries(prediction.probabilities).sort((a, b) => b[1] - a[1]).map(([name]) => name);
      const chosen = ranked.includes(state.label) ? state.label : ranked[0];
      return { title: t("explained"), choices: ranked.map((name) => [name, name]), chosen, values: (label) => ({ label }), fields: { label: chosen } };
    }
    case "tag": {
      const words = taggedWords(prediction).slice(0, 300);
      const named = prediction.tags.findIndex((tag) => tag !== "O");
      const chosen = Number(state.word) < words.length && state.word !== undefined ? Number(state.word) : Math.max(0, named);
      return { title: t("tagTarget"), choices: words, chosen, values: (word) => ({ word }), fields: { word: chosen, label: prediction.tags[chosen] } };
    }
    default: return none;
  }
}

function wordView(answer, inputs) {
  const texts = Array.isArray(inputs) ? inputs : [inputs];
  const probability = answer.label !== null;
  const unit = (value) => (probability ? percent(value) : plain(value));
  const scaled = probability ? answer.words.map((word) => ({ ...word, effect: word.effect === null ? null : 100 * word.effect })) : answer.words;
  const ranked = [...scaled].sort((a, b) => Math.abs(b.effect ?? 0) - Math.abs(a.effect ?? 0));
  return [
    effects(texts, scaled, probability ? 1 : 2),
    make("p", { class: "legend sides" },
      make("span", { class: "side raises" }, t("raises")), make("span", { class: "side lowers" }, t("lowers"))),
    make("p", { class: "note" }, t("without", { value: unit(answer.value) })),
    table(t("numbers"), [t("word"), t("effect")], ranked.map((word) => [word.text, word.effect === null ? "—" : `${signed(word.effect, 3)}${probability ? " %" : ""}`])),
  ];
}
