// What this page asks its router. Paths are relative: the console works behind a proxy's prefix too.

const KEY = "pdmesh.key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  const key = getKey();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** The error of a response, in the router's own words; but of keys in this page's. */
async function failure(response) {
  if (response.status === 401) {
    const error = new Error(getKey() ? "The router does not take this API key: give another one under Key." : "The router wants an API key: give one under Key.");
    error.status = 401;
    return error;
  }
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Not OpenAI's error body: the status has to do.
  }
  const error = new Error(message);
  error.status = response.status;
  return error;
}

async function getJson(path, timeout) {
  const response = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(timeout) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export const getMesh = (since) => getJson(`api/mesh?since=${encodeURIComponent(since)}`, 5000);
export const getExplain = (id) => getJson(`api/explain/${encodeURIComponent(id)}`, 8000);

/** Splits a stream of text into the data of its server-sent events. */
export class EventParser {
  #rest = "";

  push(chunk) {
    this.#rest += chunk;
    const blocks = this.#rest.split("\n\n");
    this.#rest = blocks.pop();
    return blocks
      .map((block) => block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()))
      .filter((lines) => lines.length)
      .map((lines) => lines.join("\n"));
  }
}

/** Chats. `onText(text, thoughts, chunk)` gets each piece; resolves when the stream has ended. Throws what the router says. */
export async function streamChat(body, requestId, signal, onText) {
  const response = await fetch("../v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json", "x-request-id": requestId, "x-pdmesh-timings": "1" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    for (const data of parser.push(value)) {
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta;
      onText(delta?.content ?? "", delta?.reasoning_content ?? "", chunk);
    }
  }
}
