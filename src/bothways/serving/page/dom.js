// Elements made without HTML strings: what a model or a user says is only ever text.

/**
 * Make an element. Keys of `options` are properties of it, except `class`, `on` (listeners),
 * `data` and `css` (custom properties), and names with a hyphen or `for`, which are attributes.
 */
export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (key === "class") element.className = value;
    else if (key === "on") for (const [name, call] of Object.entries(value)) element.addEventListener(name, call);
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key === "css") for (const [name, one] of Object.entries(value)) element.style.setProperty(name, one);
    else if (key.includes("-") || key === "for" || key === "role" || key === "scope") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

let numbers = 0;
/** Return an id that no other element has. */
export const fresh = (name) => `${name}-${(numbers += 1)}`;

/** Return a text with a mark in the middle where it is too long to show. */
export function short(text, most = 60) {
  const points = Array.from(text);
  return points.length <= most ? text : `${points.slice(0, most - 1).join("")}…`;
}

/** A text by code points, as the server counts characters; JavaScript counts UTF-16 units. */
export class Characters {
  constructor(text) {
    this.points = Array.from(text);
  }

  slice(start, stop) {
    return this.points.slice(start, stop).join("");
  }
}

/** Return a percentage with a precision that tells 99.9 % from 100 %. */
export function percent(share) {
  const value = 100 * share;
  if (value > 99.95 && share < 1) return "> 99.9 %";
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${value.toFixed(1)} %`;
}

/** Return a number with a sign. */
export const signed = (value, digits = 2) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

/** Return a number with a minus sign that is one. */
export const plain = (value, digits = 3) => `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(digits)}`;

/** Return a list of buttons of which one is pressed; arrow keys move. `items` are [value, name]. */
export function tabs(label, items, chosen, choose, panel) {
  const list = make("div", { class: "tabs", role: "tablist", "aria-label": label });
  const buttons = items.map(([value, name]) =>
    make("button", {
      type: "button",
      id: `tab-${value}`,
      role: "tab",
      "aria-selected": String(value === chosen),
      "aria-controls": panel,
      tabIndex: value === chosen ? 0 : -1,
      on: { click: () => choose(value) },
    }, name));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = buttons.indexOf(document.activeElement);
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : at + (step ?? NaN);
    if (at < 0 || Number.isNaN(to)) return;
    event.preventDefault();
    const next = (to + buttons.length) % buttons.length;
    choose(items[next][0]);
    document.getElementById(`tab-${items[next][0]}`)?.focus();
  });
  list.append(...buttons);
  return list;
}

/** Return a labelled select. `items` are [value, name]. */
export function select(label, items, chosen, choose, className = "") {
  const id = fresh("select");
  const options = items.map(([value, name]) => make("option", { value: String(value), selected: value === chosen }, name));
  const box = make("select", { id, on: { change: () => choose(items[box.selectedIndex][0]) } }, options);
  return make("span", { class: `field inline ${className}` }, make("label", { for: id }, label), box);
}

/** Return a segmented control. `items` are [value, name]. */
export function segments(label, items, chosen, choose) {
  return make("div", { class: "segments", role: "group", "aria-label": label },
    items.map(([value, name]) =>
      make("button", {
        type: "button",
        "aria-pressed": String(value === chosen),
        data: { value },
        on: { click: () => choose(value) },
      }, name)));
}

/** Return a table that is closed at first: the numbers behind a picture. */
export function table(title, columns, rows, most = 500) {
  const head = make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.slice(0, most).map((row) =>
    make("tr", {}, row.map((cell) => make("td", { class: typeof cell === "number" || /^[−+<>]?\s?[\d.]+( %)?$/.test(cell) ? "number" : "" }, String(cell)))));
  const box = make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": title },
    make("table", {}, make("thead", {}, head), make("tbody", {}, body)));
  const rest = rows.length > most ? [make("p", { class: "note" }, `+ ${rows.length - most}`)] : [];
  return make("details", { class: "numbers" }, make("summary", {}, title), box, ...rest);
}
