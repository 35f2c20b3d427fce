// Attention of one layer, head by head, between two columns of tokens; and the rollout of all layers.

import { make, plain, select, table } from "./dom.js";
import { t } from "./words.js";

const ROW = 26, LEAST = 0.04;
const COLOURS = 12;

/** Return elements for an answer of `/explain`; `choose` is called with another layer. */
export function attentionView(answer, choose) {
  const { tokens, heads } = answer;
  const shown = new Set(heads.map((_, n) => n));
  let chosen = null;

  const canvas = make("canvas", { class: "links", "aria-hidden": "true" });
  const column = (name, listener) => make("ol", { class: `column ${name}`, ...listener }, tokens.map((token, n) =>
    make("li", { id: `${name}-${n}`, class: token.special ? "is-special" : "", data: { n }, title: String(token.id), ...(name === "left" ? { role: "option", "aria-selected": "false" } : {}) }, token.text)));
  const left = column("left", { role: "listbox", tabIndex: 0, "aria-label": t("from") });
  const right = column("right", { "aria-hidden": "true" });
  const words = make("p", { class: "text loose rolled" }, tokens.map((token) => [make("span", { class: "tint", dir: "auto" }, token.text), " "]).flat());
  const numbers = make("div", { "aria-live": "polite" });

  const weight = (n, m) => {
    let sum = 0;
    for (const head of shown) sum += heads[head][n][m];
    return shown.size ? sum / shown.size : 0;
  };

  const draw = () => {
    const width = canvas.clientWidth, height = ROW * tokens.length, scale = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    pen.scale(scale, scale);
    pen.lineWidth = 1.6;
    const rows = chosen === null ? tokens.map((_, n) => n) : [chosen];
    for (const head of shown) {
      pen.strokeStyle = style.getPropertyValue(`--head-${head % COLOURS}`);
      for (const n of rows) {
        for (let m = 0; m < tokens.length; m += 1) {
          const value = heads[head][n][m];
          if (value < LEAST) continue;
          pen.globalAlpha = Math.min(1, value / (chosen === null ? Math.max(1.5, shown.size / 3) : 1));
          pen.beginPath();
          pen.moveTo(0, ROW * (n + 0.5));
          pen.bezierCurveTo(width * 0.4, ROW * (n + 0.5), width * 0.6, ROW * (m + 0.5), width, ROW * (m + 0.5));
          pen.stroke();
        }
      }
    }
  };

  const show = (n) => {
    chosen = n;
    [...left.children].forEach((item, k) => { item.classList.toggle("on", k === n); item.setAttribute("aria-selected", String(k === n)); });
    if (n === null) left.removeAttribute("aria-activedescendant");
    else left.setAttribute("aria-activedescendant", `left-${n}`);
    [...right.children].forEach((item, m) => {
      const share = n === null ? 0 : weight(n, m);
      item.style.setProperty("--share", Math.min(1, share).toFixed(3));
    });
    const flow = answer.rollout[n ?? 0], largest = Math.max(...flow);
    [...words.children].forEach((item, m) => {
      item.style.setProperty("--share", (flow[m] / largest).toFixed(3));
      item.title = plain(flow[m]);
    });
    const from = tokens[n ?? 0].text;
    const ranked = tokens.map((token, m) => ({ token, m })).sort((a, b) => weight(n ?? 0, b.m) - weight(n ?? 0, a.m));
    const open = numbers.querySelector("details")?.open ?? false;
    numbers.replaceChildren(table(`${t("looksAt")}: ${from}`, [t("piece"), t("weight"), t("rollout")], ranked.slice(0, 12).map(({ token, m }) => [token.text, plain(weight(n ?? 0, m)), plain(flow[m])])));
    numbers.querySelector("details").open = open;
    draw();
  };

  left.addEventListener("mouseover", (event) => { const item = event.target.closest("li"); if (item) show(Number(item.dataset.n)); });
  left.addEventListener("mouseleave", () => { if (document.activeElement !== left) show(null); });
  left.addEventListener("click", (event) => { const item = event.target.closest("li"); if (item) { left.focus(); show(Number(item.dataset.n)); } });
  left.addEventListener("keydown", (event) => {
    const to = { ArrowDown: (chosen ?? -1) + 1, ArrowUp: (chosen ?? tokens.length) - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (event.key === "Escape") show(null);
    if (to === undefined) return;
    event.preventDefault();
    show((to + tokens.length) % tokens.length);
    left.children[chosen].scrollIntoView({ block: "nearest" });
  });

  const chips = heads.map((_, n) => make("button", {
    type: "button", class: "head", css: { "--head": `var(--head-${n % COLOURS})` }, "aria-pressed": "true", "aria-label": t("head", { n: n + 1 }),
    on: { click: () => { shown.has(n) ? shown.delete(n) : shown.add(n); press(); } },
  }, String(n + 1)));
  const all = make("button", { type: "button", class: "quiet", on: { click: () => { if (shown.size) shown.clear(); else heads.forEach((_, n) => shown.add(n)); press(); } } });
  const press = () => {
    chips.forEach((chip, n) => chip.setAttribute("aria-pressed", String(shown.has(n))));
    all.textContent = t(shown.size ? "none" : "all");
    show(chosen);
  };
  press();
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const layers = Array.from({ length: answer.layers }, (_, n) => [n + 1, String(n + 1)]);
  return [
    make("h3", {}, t("rollout")), words, make("p", { class: "note" }, t("rolloutNote")),
    make("div", { class: "controls" }, select(t("layer"), layers, answer.layer, choose),
      make("span", { class: "heads", role: "group", "aria-label": t("heads") }, make("span", { class: "note" }, t("heads")), chips, all)),
    make("p", { class: "note" }, t("hover")),
    make("div", { class: "attention" }, left, canvas, right), numbers,
  ];
}
