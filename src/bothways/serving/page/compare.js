// Two models on one text: both answers, and where they differ.

import { make, percent, plain, signed } from "./dom.js";
import { t } from "./words.js";

/** Return a line for each part of an answer: [its name, the answer, the probability]. */
function outcomes(model, answer) {
  switch (model.task) {
    case "classify": case "multilabel": {
      const given = answer.labels ?? [answer.label];
      return Object.entries(answer.probabilities).map(([name, share]) => [name, given.includes(name), share]);
    }
    case "tag": return answer.words.map((word, n) => [`${n + 1} · ${word}`, answer.tags[n]]);
    case "fill": return answer.masks.map(([guess], n) => [t("gap", { n: n + 1 }), guess.token, guess.probability]);
    case "answer": return [[t("answer_"), answer.text || t("noAnswer"), answer.confidence]];
    case "choice": return [[t("ending"), answer.ending]];
    case "regress": return [[t("score"), plain(answer.score)]];
    case "rerank": return answer.results.map((one, n) => [`${t("rank")} ${n + 1}`, `${one.index + 1}`]);
    default: return [];
  }
}

/** Return the views of both answers side by side, below a table of their differences. */
export function comparison(models, answers, views) {
  const parts = models.map((model, n) => outcomes(model, answers[n]));
  const shown = ([, value, share] = ["", "—"]) => (share === undefined ? value : typeof value === "boolean" ? percent(share) : `${value} ${percent(share)}`);
  const rows = [...new Set(parts.flat().map(([name]) => name))].map((name) => {
    const [one, other] = parts.map((lines) => lines.find((line) => line[0] === name));
    return { name, one, other, differs: (one?.[1] || "") !== (other?.[1] || "") };
  });
  const differing = rows.filter((row) => row.differs);
  const listed = models[0].task === "tag" ? differing : rows;
  const gap = ({ one, other }) => (one && other && typeof one[1] === "boolean" ? signed(100 * (other[2] - one[2]), 1) : "");
  const cells = (row) => [row.name, shown(row.one), shown(row.other), gap(row)].map((text) => make("td", {}, text));
  return [
    rows.length ? make("p", {}, make("strong", {}, t(differing.length ? "differ" : "agree"))) : null,
    listed.length ? make("div", { class: "numbers scroll", tabIndex: 0, role: "region", "aria-label": t("differ") }, make("table", {},
      make("thead", {}, make("tr", {}, ["", ...models.map((model) => model.name), ""].map((name) => make(name ? "th" : "td", {}, name)))),
      make("tbody", {}, listed.map((row) => make("tr", { class: row.differs ? "differs" : "" }, cells(row)))))) : null,
    make("div", { class: "sides" }, models.map((model, n) => make("section", { "aria-label": model.name }, make("h3", {}, model.name), views[n]))),
  ];
}
