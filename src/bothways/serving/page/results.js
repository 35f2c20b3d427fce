// The answer of each task as a picture, with its numbers.

import { bars, cosines, heatMap, legend, marked, scale, spans, tinted } from "./charts.js";
import { make, percent, plain, short, table } from "./dom.js";
import { t } from "./words.js";

const LEAST_BITS = 0, MOST_BITS = 14;

/** Return elements for an answer. `extra` holds tokens with their places, for likelihoods. */
export function resultView(model, answer, sent, extra, put) {
  switch (model.task) {
    case "classify": return classes(answer, answer.label ?? "—");
    case "multilabel": return classes(answer, null);
    case "regress": return [scale(answer.score)];
    case "choice": return endings(answer, sent.inputs.endings);
    case "tag": return tags(answer, sent.inputs);
    case "answer": return passage(answer, sent.inputs.context);
    case "fill": return gaps(answer, put);
    case "likelihood": return likelihood(answer, sent.inputs, extra);
    case "prefer": return preference(answer, sent.inputs[0]);
    case "embed": return [heatMap(cosines(answer), sent.inputs)];
    case "rerank": return ranking(answer.results.map(({ index, relevance_score: score }) =>
      ({ text: sent.documents[index], share: score, note: `${t("relevance")} ${percent(score)} · ${t("moved", { n: index + 1 })}` })));
    case "search": return found(answer.results[0].hits, sent.rerank);
    default: return [make("p", { class: "note" }, t("noTask", { task: model.task }))];
  }
}

function classes(answer, label) {
  const several = label === null;
  const rows = Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]);
  const given = new Set(several ? answer.labels : [label]);
  const headline = several
    ? answer.labels.length ? answer.labels.map((name) => make("span", { class: "pill" }, name)) : [make("span", { class: "note" }, "—")]
    : [make("strong", { class: "headline", dir: "auto" }, label)];
  return [
    make("div", { class: "headline-row" }, headline),
    bars(rows.map(([name, share]) => ({ name, share, value: percent(share), mark: given.has(name), note: several && given.has(name) ? ` ${t("assigned")}` : undefined }))),
    table(t("numbers"), [t("label"), t("probability")], rows.map(([name, share]) => [name, String(share)])),
  ];
}

function endings(answer, lines) {
  const rows = answer.probabilities.map((share, n) => ({ share, n })).sort((a, b) => b.share - a.share);
  return [
    make("p", { class: "quote", dir: "auto" }, answer.ending),
    bars(rows.map(({ share, n }) => ({ name: lines[n], share, value: percent(share), mark: n === answer.index }))),
  ];
}

function tags(answer, text) {
  if (answer.entities) {
    const found = answer.entities.map((one) => ({ start: one.start, stop: one.end, type: one.type, title: `${one.type} ${percent(one.score)}` }));
    return [
      spans(text, found),
      found.length ? null : make("p", { class: "note" }, t("noEntities")),
      found.length ? table(t("entities"), [t("words"), t("type"), t("score")], answer.entities.map((one) => [one.text, one.type, percent(one.score)])) : null,
    ];
  }
  let at = 0;
  const rows = answer.words.map((word, n) => {
    const from = text.indexOf(word, at);
    at = from < 0 ? at : from + word.length;
    return make("span", { class: "tagged" }, make("span", { dir: "auto" }, word), make("small", {}, answer.tags[n]));
  });
  return [make("p", { class: "text tagged-text" }, rows.slice(0, 2000)), table(t("numbers"), [t("word"), t("tag_")], answer.words.map((word, n) => [word, answer.tags[n]]))];
}

function passage(answer, context) {
  const others = answer.spans.slice(0, 5).map((span) => ({ name: span.text, share: span.probability, value: percent(span.probability), mark: span.text === answer.text }));
  const found = answer.start !== null && answer.text !== "";
  return [
    found
      ? make("div", { class: "headline-row" }, make("strong", { class: "headline", dir: "auto" }, answer.text), make("span", { class: "note" }, percent(answer.confidence)))
      : make("p", { class: "note" }, t("noAnswer")),
    found ? marked(context, answer.start, answer.end) : make("p", { class: "text", dir: "auto" }, context),
    make("h3", {}, t("otherAnswers")),
    bars(others),
  ];
}

function gaps(answer, put) {
  const button = (text) => make("button", { type: "button", class: "quiet use", title: t("useIt"), "aria-label": `${t("useIt")}: ${text}`, on: { click: () => put(text) } }, "↵");
  const single = answer.masks.length === 1;
  const joint = make("div", {}, make("h3", {}, t("filling")), make("ul", { class: "fillings" },
    answer.fillings.map((one) => make("li", {}, make("span", { dir: "auto" }, one.text), make("span", { class: "bar-value" }, percent(one.probability)), button(one.text)))));
  const each = answer.masks.map((guesses, n) => [
    single ? null : make("h3", {}, t("gap", { n: n + 1 })),
    bars(guesses.map((guess, k) => ({
      name: guess.token, share: guess.probability, value: percent(guess.probability), mark: k === 0,
      action: single ? filled(answer, guess.token, button) : undefined,
    }))),
  ]);
  return [make("p", { class: "quote", dir: "auto" }, answer.text), ...each.flat(), single ? null : joint];
}

function filled(answer, token, button) {
  const found = answer.fillings.find((one) => one.tokens[0] === token);
  return found ? button(found.text) : undefined;
}

function likelihood(answer, text, tokens) {
  const bits = answer.tokens.map(([, log]) => -log / Math.LN2);
  const share = (value) => Math.max(0, Math.min(1, (value - LEAST_BITS) / (MOST_BITS - LEAST_BITS)));
  const pieces = (tokens ?? []).map((token, n) => ({ start: token.start, stop: token.stop, share: share(bits[n] ?? 0), title: `${token.text}: ${plain(bits[n] ?? 0, 1)} ${t("bits")}` }));
  return [
    make("div", { class: "headline-row" }, make("span", { class: "note" }, t("perplexity")), make("strong", { class: "headline" }, answer.pseudo_perplexity === null ? "—" : answer.pseudo_perplexity.toPrecision(4))),
    tinted(text, pieces),
    legend(t("expected"), t("surprising")),
    make("p", { class: "note" }, t("surprisalNote")),
    table(t("numbers"), [t("piece"), `${t("surprisal")} (${t("bits")})`], answer.tokens.map(([token], n) => [token, plain(bits[n], 2)])),
  ];
}

function preference(answer, texts) {
  const logs = answer.log_likelihoods, first = answer.preferred === "first";
  const share = 1 / (1 + Math.exp(logs[1] - logs[0]));
  return [
    make("p", { class: "quote", dir: "auto" }, texts[first ? 0 : 1]),
    bars(texts.map((name, n) => ({ name, share: n === 0 ? share : 1 - share, value: plain(logs[n], 2), mark: (n === 0) === first }))),
    make("p", { class: "note" }, t("logLikelihood")),
  ];
}

function ranking(rows) {
  return [make("ol", { class: "ranking" }, rows.map(({ text, share, note }, place) =>
    make("li", {},
      make("span", { class: "rank" }, String(place + 1)),
      make("div", { class: "ranked" },
        make("p", { dir: "auto" }, text),
        make("span", { class: "bar-track", "aria-hidden": "true" }, make("span", { class: "bar-fill", css: { "--share": String(share) } })),
        make("small", { class: "note", dir: "auto" }, note)))))];
}

const LONGEST_HIT = 1000;

/** The documents of an index. Bars are σ of the logits of a cross-encoder, else shares of the best score. */
function found(hits, ranker) {
  if (!hits.length) return [make("p", { class: "note" }, t("noHits"))];
  const most = Math.max(...hits.map((hit) => hit.score), 1e-9);
  return ranking(hits.map(({ id, score, text }) =>
    ({ text: short(text, LONGEST_HIT), share: ranker ? 1 / (1 + Math.exp(-score)) : Math.min(1, Math.max(0, score / most)), note: `${id} · ${t("score")} ${plain(score, 4)}` })));
}

/** Return the words of a text that could be explained by their tags, as [number, name]. */
export function taggedWords(answer) {
  return answer.words.map((word, n) => [n, `${word} · ${answer.tags[n]}`]);
}
