// Requests in flight and those that have ended, and one of them in detail.

import { getExplain } from "./api.js";
import { attr, byId, h, reconcile, seconds, short, text } from "./dom.js";
import { STAGES, spansOf } from "./stages.js";
import { waterfall } from "./waterfall.js";

const STATES = {
  QUEUED: ["waiting", "waits for a slot"],
  PLACED: ["placed", "workers are chosen"],
  SENT: ["prefill", "awaits token 1"],
  FIRST_TOKEN: ["decode", "tokens are flowing"],
  REPLANNED: ["replanned", "goes to other workers"],
  RESUMING: ["resuming", "goes on with other workers"],
  RESUMED: ["decode", "tokens are flowing again, from other workers"],
};
const LIVE = ["Stage", "Request", "Age", "TTFT", "Tokens", "Speed", "Prompt", "Workers", "Try"];
const RECENT = ["End", "Request", "Took", "TTFT", "Tokens", "Speed", "Prompt", "Workers", "Where the time went"];

let which = "live";

export function buildRequests(onChange) {
  for (const button of byId("which").children) {
    button.addEventListener("click", () => {
      which = button.dataset.which;
      onChange();
    });
  }
}

export function drawRequests(mesh) {
  const { requests, recent, slow_after: slow } = mesh;
  for (const button of byId("which").children) attr(button, "aria-pressed", String(button.dataset.which === which));
  text(byId("count-live"), mesh.requests_total);
  text(byId("count-recent"), recent.length);
  const count = requests.filter((r) => r.slow).length;
  const rule = `slow: no token 1 within ${slow.first_token} s, or none for ${slow.token} s`;
  text(byId("slow-hint"), count ? `${count} slow · ${rule}` : rule);
  const [head, body] = [byId("requests").tHead, byId("requests").tBodies[0]];
  const titles = which === "live" ? LIVE : RECENT;
  if (head.dataset.of !== which) {
    head.dataset.of = which;
    head.replaceChildren(h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title))));
    body.replaceChildren();
  }
  const rows = which === "live" ? requests : recent;
  reconcile(body, rows, (r) => r.room, createRow, which === "live" ? updateLive : updateRecent);
  let none = body.querySelector(".none");
  const words = which === "live" ? "Nothing is in flight." : "Nothing has ended yet.";
  if (!rows.length && !none) body.append(h("tr", { class: "none" }, h("td", { colspan: titles.length }, words)));
  else if (rows.length) none?.remove();
}

function createRow(request) {
  const open = () => showRequest(request.id);
  const row = h(
    "tr",
    { onclick: open },
    h("td", {}, h("span", { class: "stage" })),
    h("td", {}, h("button", { type: "button", class: "link id", title: request.id, "data-request": request.id })),
    ...Array.from({ length: 7 }, () => h("td")),
  );
  row.querySelector(".id").textContent = request.index ? `${request.id} #${request.index}` : request.id;
  return row;
}

function cells(row, stage, kind, values) {
  const badge = row.cells[0].firstChild;
  text(badge, stage);
  attr(badge, "data-kind", kind);
  values.forEach((value, i) => text(row.cells[i + 2], value));
}

function workers(r) {
  return [r.prefill, r.decode].filter(Boolean).join(" → ") || "–";
}

function pace(tokens, time) {
  return tokens > 1 && time > 0 ? `${short((tokens - 1) / time)} tok/s` : "–";
}

function updateLive(row, r) {
  const [name, title] = STATES[r.state] ?? [r.state.toLowerCase(), ""];
  attr(row, "class", r.slow ? "slow" : "");
  attr(row.cells[0], "title", title);
  const decoding = r.ttft === null ? 0 : r.age - r.ttft - (r.quiet ?? 0);
  cells(row, r.slow ? `${name}, slow` : name, r.slow ? "slow" : name, [
    seconds(r.age), seconds(r.ttft), r.tokens, pace(r.tokens, decoding), r.prompt_tokens, workers(r), r.attempt + 1,
  ]);
}

function updateRecent(row, r) {
  if (row.dataset.done) return;
  row.dataset.done = "1";
  const good = r.state === "FINISHED";
  const end = good ? r.finish_reason : r.state.toLowerCase();
  const prompt = r.cached_tokens ? `${r.prompt_tokens} (${r.cached_tokens} cached)` : r.prompt_tokens;
  const decoding = r.ttft === null ? 0 : r.age - r.ttft;
  cells(row, end, good ? "decode" : "slow", [
    seconds(r.age), seconds(r.ttft), r.tokens, pace(r.tokens, decoding), prompt, workers(r), "",
  ]);
  row.cells[8].replaceChildren(timingBar(r));
}

/** One bar out of the timings that came with the result. */
function timingBar(r) {
  const t = r.timings;
  if (!t.e2e) return h("span", { class: "muted" }, "–");
  const queue = Math.min(t.ttft, t.prefill_queued ?? 0);
  const compute = Math.min(t.ttft - queue, t.prefill_computing ?? 0);
  const parts = [
    ["router", t.placed, "router"],
    ["prefill-queue", queue, "prefill queue"],
    ["compute", compute, "prefill compute"],
    ["ready", Math.max(0, t.ttft - t.placed - queue - compute), "transfer and the rest before token 1"],
    ["decode", t.e2e - t.ttft, "decode"],
  ];
  const bar = h("div", { class: "timing", title: parts.map(([, v, name]) => `${name} ${seconds(v)}`).join(", ") });
  for (const [stage, value] of parts) {
    const part = h("i", { class: `stage-${stage}` });
    part.style.flexGrow = String(value);
    bar.append(part);
  }
  return bar;
}

// ---- one request in detail ---------------------------------------------------------------------------

export async function showRequest(id) {
  const dialog = byId("detail");
  const body = byId("detail-body");
  text(byId("detail-title"), id);
  body.replaceChildren(h("p", { class: "muted" }, "asking the router and the workers …"));
  if (!dialog.open) dialog.showModal();
  try {
    const timeline = await getExplain(id);
    if (byId("detail-title").textContent === id) body.replaceChildren(...detail(timeline));
  } catch (error) {
    body.replaceChildren(h("p", { class: "bad" }, error.message));
  }
}

function detail(timeline) {
  const { start, spans } = spansOf(timeline.moves);
  const rows = timeline.moves.map((move) =>
    h(
      "tr",
      {},
      h("td", { class: "number" }, ((move.unix_seconds - start) * 1000).toFixed(1)),
      h("td", {}, move.process),
      h("td", {}, move.machine.replace("_", " ")),
      h("td", {}, move.from ? `${move.from} → ${move.to}` : move.to),
      h("td", {}, move.reason),
    ),
  );
  const attempts = new Set(timeline.moves.map((move) => move.attempt)).size;
  const facts = [
    `room ${timeline.rooms.join(", ")}`,
    attempts > 1 ? `${attempts} attempts` : "1 attempt",
    new Date(start * 1000).toLocaleTimeString("en-GB"),
  ];
  return [
    h("p", { class: "muted" }, facts.join(" · ")),
    waterfall(timeline.moves),
    legend(spans),
    ...timeline.silent.map((gone) => h("p", { class: "bad" }, `${gone.process} does not answer: ${gone.error}`)),
    h(
      "div",
      { class: "table-box" },
      h(
        "table",
        { class: "moves" },
        h("thead", {}, h("tr", {}, ...["ms", "Process", "Machine", "Move", "Why"].map((t) => h("th", { scope: "col" }, t)))),
        h("tbody", {}, ...rows),
      ),
    ),
  ];
}

function legend(spans) {
  const there = new Set(spans.map((span) => span.stage));
  const names = STAGES.filter(({ name }) => there.has(name));
  return h("ul", { class: "legend" }, ...names.map(({ name, label }) => h("li", {}, h("i", { class: `swatch stage-${name}` }), label)));
}
