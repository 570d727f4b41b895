// Requests to this server. Paths are relative to the page, so that a proxy may serve it below a path.

let apiKey = ""; // in memory only: a reload forgets it

export const hasKey = () => apiKey !== "";

let askForKey = async () => false;
let isDeclined = false; // the question was closed without a key: requests that run by themselves ask no more

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Says that a person wants something that may need a key. */
export function allowAsking() {
  isDeclined = false;
}

/** `ask(wasRefused)` resolves to a key, or to "" if none is given. */
export function onKeyNeeded(ask) {
  let asking = null; // one question for all requests that wait for the key
  askForKey = (refused) => {
    if (refused !== apiKey) return Promise.resolve(true); // another request has a new key already
    if (isDeclined) return Promise.resolve(false);
    asking ??= ask(refused !== "").then((key) => {
      asking = null;
      apiKey = key || apiKey;
      isDeclined = !key;
      return Boolean(key);
    });
    return asking;
  };
}

let noteLoss = () => {};

/** `note` is called when a request finds no server, or loses it. */
export function onLoss(note) {
  noteLoss = note;
}

/** Browsers have words of their own for a lost server, which say little. */
function lost(error) {
  if (!(error instanceof TypeError)) throw error;
  noteLoss();
  throw new ApiError("The connection to the server was lost.", 0);
}

async function send(path, options = {}) {
  for (;;) {
    const used = apiKey;
    const headers = { ...options.headers, ...(used && { authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(lost);
    if (response.ok) return response;
    if (response.status !== 401 || !(await askForKey(used))) throw await errorOf(response);
  }
}

async function errorOf(response) {
  const text = await response.text().catch(lost);
  try {
    return new ApiError(JSON.parse(text).error.message, response.status);
  } catch {
    return new ApiError(`HTTP ${response.status}`, response.status);
  }
}

export async function getJson(path) {
  return (await send(path)).json().catch(lost);
}

export async function getText(path) {
  return (await send(path)).text().catch(lost);
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

export async function postJson(path, body) {
  return (await post(path, body)).json().catch(lost);
}

/**
 * Yields the chunks of a stream, or the whole answer as the only one. Before them, where the server left out
 * fields of the request, comes a chunk with their names.
 */
export async function* chunks(path, body, signal) {
  const response = await post(path, body, signal);
  const ignored = response.headers.get("x-truedraft-ignored");
  if (ignored) yield { choices: [], ignored: ignored.split(",").map((name) => name.trim()) };
  if (!body.stream) {
    yield await response.json().catch(lost);
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) lost(new TypeError("The connection ended before the answer did."));
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection awake
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 200);
      yield chunk;
    }
  }
}
