// The pieces that the model reads of each text, and what is cut off.

import { ask } from "./api.js";
import { make, table } from "./dom.js";
import { textsOf } from "./inputs.js";
import { t } from "./words.js";

const MOST = 600, MOST_TEXTS = 20;

/** Return elements for the tokens of all texts. */
export async function tokenView(model, signal) {
  const texts = textsOf(model).slice(0, MOST_TEXTS);
  if (!texts.length) return [make("p", { class: "note" }, t("empty"))];
  const { answer } = await ask("tokenize", { model: model.served ?? model.name, inputs: texts }, signal);
  const kept = keptOf(model, answer);
  return [make("p", { class: "note" }, t("tokensNote")), ...answer.map((tokens, n) => oneText(model, tokens, kept[n], n, texts.length))];
}

/** Return how many content tokens the model keeps of each text; all, where it reads in windows. */
function keptOf(model, rows) {
  const counts = rows.map((tokens) => tokens.filter((token) => !token.special).length);
  if (model.long_texts !== "truncate") return counts;
  const pair = ["classify", "multilabel", "regress"].includes(model.task) && rows.length === 2;
  if (pair) return truncated(...counts, model.length - model.specials.pair);
  if (["rerank", "choice"].includes(model.task)) {
    const first = counts.slice(1).map((count) => truncated(counts[0], count, model.length - model.specials.pair));
    return [Math.max(0, ...first.map(([a]) => a)), ...first.map(([, b]) => b)];
  }
  return counts.map((count) => Math.min(count, model.length - model.specials.single));
}

/** Of two texts the longer loses its last token until both fit; of equals the second. */
function truncated(a, b, room) {
  if (a + b <= room) return [a, b];
  if (a <= Math.floor((room + 1) / 2)) return [a, room - a];
  if (b <= Math.floor(room / 2)) return [room - b, b];
  return [Math.floor((room + 1) / 2), Math.floor(room / 2)];
}

function oneText(model, tokens, kept, number, count) {
  let place = 0;
  const chips = tokens.map((token) => {
    const cut = !token.special && (place += 1) > kept;
    const note = token.special ? t("special") : `${token.start}–${token.stop}`;
    return make("li", { class: `token${token.special ? " is-special" : ""}${cut ? " is-cut" : ""}`, title: note },
      make("span", { dir: "auto" }, token.text), make("small", {}, String(token.id)));
  });
  const content = tokens.filter((token) => !token.special).length;
  const cut = content - kept;
  const summary = `${t("count", { n: tokens.length })} · ${t("room", { n: model.length })} ${cut > 0 ? t("cutOff", { n: cut }) : t("allRead")}`;
  return make("div", { class: "token-block" },
    make("p", { class: cut > 0 ? "warning" : "note" }, count > 1 ? `${number + 1} · ${summary}` : summary),
    make("ul", { class: "token-list" }, chips.slice(0, MOST)),
    tokens.length > MOST ? make("p", { class: "note" }, t("more", { n: tokens.length - MOST })) : null,
    table(t("numbers"), [t("piece"), t("id"), t("characters")], tokens.map((token) => [token.text, token.id, token.special ? t("special") : `${token.start}–${token.stop}`])));
}
