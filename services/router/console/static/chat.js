// The chat box: streams an answer, and then asks where its time went.

import { getExplain, streamChat } from "./api.js";
import { byId, h, reconcile, seconds, short } from "./dom.js";
import { waterfall } from "./waterfall.js";

const turns = [];
let running = null;

export function buildChat() {
  const form = byId("chat-form");
  const box = byId("chat-text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && box.value.trim()) void send(box.value.trim());
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    turns.length = 0;
    byId("messages").replaceChildren();
  });
}

export function showModels(names) {
  reconcile(byId("chat-model"), names, (n) => n, (n) => h("option", { value: n }, n), () => {});
}

function bubble(kind, ...children) {
  const element = h("div", { class: `bubble ${kind}` }, ...children);
  byId("messages").append(element);
  scroll();
  return element;
}

function scroll() {
  const messages = byId("messages");
  messages.scrollTop = messages.scrollHeight;
}

function busy(controller) {
  running = controller;
  byId("chat-send").hidden = controller !== null;
  byId("chat-stop").hidden = controller === null;
}

function wishes() {
  const limit = Number.parseInt(byId("chat-max").value, 10);
  const temperature = Number.parseFloat(byId("chat-temperature").value);
  return {
    model: byId("chat-model").value || "default",
    ...(Number.isFinite(temperature) ? { temperature } : {}),
    ...(Number.isFinite(limit) ? { max_tokens: limit } : {}),
  };
}

/** crypto.randomUUID() is there on secure origins alone; an address in a network is none. */
function newId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return `console-${[...random].map((b) => b.toString(16).padStart(2, "0")).join("")}`;
}

async function send(words) {
  byId("chat-text").value = "";
  turns.push({ role: "user", content: words });
  bubble("user", words);
  const body = document.createTextNode("");
  const figures = h("div", { class: "figures" }, "waiting …");
  const thoughts = h("div", { class: "muted thoughts" });
  const answer = bubble("assistant", thoughts, h("div", { class: "text" }, body), figures);
  answer.classList.add("running");
  const controller = new AbortController();
  const id = newId();
  const begun = performance.now();
  const since = () => (performance.now() - begun) / 1000;
  let first = null;
  let usage = null;
  let reason = "";
  const clock = setInterval(() => {
    figures.textContent = first === null ? `waiting for token 1 … ${seconds(since())}` : `token 1 after ${seconds(first)} · ${seconds(since())}`;
  }, 100);
  busy(controller);
  try {
    await streamChat({ ...wishes(), messages: turns }, id, controller.signal, (piece, thought, chunk) => {
      if (piece || thought) {
        first ??= since();
        body.data += piece;
        thoughts.textContent += thought;
        scroll();
      }
      usage = chunk.usage ?? usage;
      reason = chunk.choices?.[0]?.finish_reason ?? reason;
    });
  } catch (error) {
    reason = controller.signal.aborted ? "stopped" : "failed";
    if (reason === "failed") answer.append(h("p", { class: "bad" }, error.message));
  } finally {
    clearInterval(clock);
    busy(null);
    answer.classList.remove("running");
  }
  if (body.data) turns.push({ role: "assistant", content: body.data });
  else turns.pop(); // without an answer the question is not part of the talk
  figures.textContent = summary(first, since(), usage, reason);
  answer.dataset.request = id;
  answer.dataset.end = reason;
  if (reason !== "failed" || first !== null) await explain(answer, id);
  scroll();
}

function summary(first, whole, usage, reason) {
  const parts = [];
  if (first !== null) parts.push(`token 1 after ${seconds(first)}`);
  if (usage && first !== null && usage.completion_tokens > 1) {
    parts.push(`${short((usage.completion_tokens - 1) / (whole - first))} tok/s`);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`);
  }
  parts.push(seconds(whole), reason);
  return parts.filter(Boolean).join(" · ");
}

async function explain(answer, id) {
  try {
    const timeline = await getExplain(id);
    answer.append(waterfall(timeline.moves));
  } catch (error) {
    answer.append(h("p", { class: "muted" }, `where the time went is not known: ${error.message}`));
  }
}
