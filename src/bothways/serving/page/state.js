// What the page shows, in the part of the address that is never sent to a server.

const KNOWN = ["model", "against", "lang", "theme", "tab", "method", "text", "second", "items", "label", "word", "layer", "mode", "rerank", "rate", "unit", "draw"];

export const state = {};

/** Read the state from the address. */
export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of KNOWN) {
    if (given.has(name)) state[name] = given.get(name);
    else delete state[name];
  }
}

/** Change the state and the address; `undefined` takes a name out. */
export function change(values) {
  for (const [name, value] of Object.entries(values)) {
    if (value === undefined || value === null) delete state[name];
    else state[name] = String(value);
  }
  const kept = Object.fromEntries(KNOWN.filter((name) => name in state).map((name) => [name, state[name]]));
  const hash = new URLSearchParams(kept).toString();
  // A long text is not kept in the address: browsers slow down, and nobody could pass it on.
  history.replaceState(null, "", hash && hash.length < 8000 ? `#${hash}` : location.pathname);
}

/** Call `listener` when the user changes the address. */
export function onAddress(listener) {
  addEventListener("hashchange", () => {
    readAddress();
    listener();
  });
}
