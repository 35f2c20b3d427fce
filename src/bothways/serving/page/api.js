// Requests to the server that this page comes from, and to no other.

import { t } from "./words.js";

const BASE = new URL("../", import.meta.url);

/** The key of the server: in memory only, gone with the page. */
let key = "";
export const setKey = (value) => { key = value.trim(); };

/** What the server refused, or why it could not be reached. */
class ServerError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Return the address of a path, for snippets. */
export const address = (path) => new URL(path, BASE).href;

/** Send a request; return its JSON, its headers and the milliseconds it took. */
export async function ask(path, body, signal) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  const start = performance.now();
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "unreachable", t("unreachable"));
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) {
    const { code = "internal", message = response.statusText } = answer?.error ?? {};
    throw new ServerError(response.status, code, message);
  }
  return { answer, milliseconds: performance.now() - start, headers: response.headers };
}
