// What a model reads in masked language modelling: the rows of figure 2 of the paper, with masks.

import { ask } from "./api.js";
import { make, percent, select, table } from "./dom.js";
import { textsOf } from "./inputs.js";
import { change, state } from "./state.js";
import { t } from "./words.js";

const RATES = [0.15, 0.2, 0.3, 0.4, 0.6], UNITS = ["tokens", "whole_words", "ngrams", "spans"];
const NAMES = { masked: "changeMasked", random: "changeRandom", kept: "changeKept" };

/** Return elements for the first text, or the first two; `again` is called when a setting changes. */
export async function trainingView(model, signal, again) {
  const texts = textsOf(model).slice(0, 2);
  if (model.task === "choice") return [make("p", { class: "note" }, t("noWhy"))];
  if (!texts.length) return [make("p", { class: "note" }, t("empty"))];
  const rate = RATES.find((one) => String(one) === state.rate) ?? RATES[0];
  const unit = UNITS.find((one) => one === state.unit) ?? UNITS[0];
  const draw = /^\d{1,6}$/.test(state.draw ?? "") ? Number(state.draw) : 0;
  const set = (values) => { change(values); again(); };
  const body = { model: model.served ?? model.name, method: "masked_lm", inputs: texts, rate, unit, draw };
  const { answer } = await ask("explain", body, signal);
  const letter = (token) => String.fromCharCode(65 + token.segment);
  const how = (token) => (token.change ? t(NAMES[token.change]) : "");
  const chips = answer.tokens.map((token) =>
    make("li", { class: `token in-training ${token.change ? `is-${token.change}` : ""} ${token.special ? "is-special" : ""}`, title: how(token) },
      make("span", { dir: "auto" }, token.text), make("b", { dir: "auto" }, token.change ? token.original : ""),
      make("small", {}, letter(token)), make("small", {}, String(token.position))));
  return [
    make("p", { class: "note" }, t("trainingNote")),
    make("div", { class: "controls" },
      select(t("rate"), RATES.map((one) => [one, percent(one)]), rate, (value) => set({ rate: value })),
      select(t("unit"), UNITS.map((one) => [one, t(one)]), unit, (value) => set({ unit: value })),
      make("button", { type: "button", on: { click: () => set({ draw: draw + 1 }) } }, t("drawAgain"))),
    make("ul", { class: "token-list", "aria-label": t("training") }, chips),
    make("p", { class: "legend sides" }, Object.entries(NAMES).map(([name, word]) => make("span", { class: `side in-training is-${name}` }, t(word)))),
    table(t("numbers"), [t("position"), t("segment"), t("piece"), t("original"), t("change")],
      answer.tokens.map((token) => [token.position, letter(token), token.text, token.change ? token.original : "", how(token)])),
  ];
}
