// The request of the page as a command and as a program.

import { address } from "./api.js";
import { make } from "./dom.js";
import { t } from "./words.js";

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return the request as a curl command. */
export function curl(path, body, needsKey) {
  return [
    `curl ${shell(address(path))}`,
    "-H 'content-type: application/json'",
    ...(needsKey ? ['-H "authorization: Bearer $BOTHWAYS_API_KEY"'] : []),
    `-d ${shell(JSON.stringify(body))}`,
  ].join(" \\\n  ");
}

/** Return the request as a program that needs nothing but Python. */
export function python(path, body, needsKey) {
  const key = needsKey ? ', "authorization": "Bearer " + os.environ["BOTHWAYS_API_KEY"]' : "";
  return `import json${needsKey ? "\nimport os" : ""}
from urllib.request import Request, urlopen

body = ${value(body, "    ")}
headers = {"content-type": "application/json"${key}}
request = Request(${literal(address(path))}, json.dumps(body).encode(), headers)
print(json.load(urlopen(request)))
`;
}

/** Return texts, lists and objects as literals of Python. */
function value(given, indent = "") {
  if (typeof given === "string") return literal(given);
  const inner = Array.isArray(given)
    ? given.map((one) => value(one))
    : Object.entries(given).map(([name, one]) => `${literal(name)}: ${value(one)}`);
  const [open, close] = Array.isArray(given) ? "[]" : "{}";
  return indent ? `${open}\n${indent}${inner.join(`,\n${indent}`)},\n${close}` : `${open}${inner.join(", ")}${close}`;
}

/** Return a text as a literal of Python. */
function literal(text) {
  const escapes = { "\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  const safe = text.replace(/[\\"\n\r\t]|[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
    (one) => escapes[one] ?? `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return `"${safe}"`;
}

/** Return elements with the request in both forms and the answer. */
export function codeView(request, answer, needsKey) {
  if (request.missing) return [make("p", { class: "note" }, request.missing)];
  const shown = answer === null ? null : JSON.stringify(answer, null, 1);
  return [
    snippet(t("curl"), curl(request.path, request.body, needsKey)),
    snippet(t("python"), python(request.path, request.body, needsKey)),
    shown === null ? null : snippet(t("json"), shown.length > 20_000 ? `${shown.slice(0, 20_000)}\n…` : shown, shown),
  ];
}

function snippet(title, text, whole = text) {
  const button = make("button", { type: "button", class: "quiet", "aria-label": `${t("copy")}: ${title}`, on: { click: copy } }, t("copy"));
  const code = make("pre", { tabIndex: 0, role: "region", "aria-label": title }, make("code", {}, text.length > 20_000 ? `${text.slice(0, 20_000)}…` : text));
  async function copy() {
    try {
      await navigator.clipboard.writeText(whole);
    } catch {  // not allowed, or not a secure context: the user copies the selection
      getSelection().selectAllChildren(code);
      return;
    }
    button.textContent = t("copied");
    setTimeout(() => { button.textContent = t("copy"); }, 1500);
  }
  return make("div", { class: "snippet" }, make("div", { class: "card-head" }, make("h3", {}, title), button), code);
}
