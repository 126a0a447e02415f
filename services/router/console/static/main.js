// Asks for the mesh once a second while somebody looks, and draws what has come.

import { getKey, getMesh, setKey } from "./api.js";
import { buildChat, showModels } from "./chat.js";
import { Charts, Series } from "./charts.js";
import { attr, byId, h, reconcile, seconds, short, text } from "./dom.js";
import { buildLegend, draw } from "./picture.js";
import { buildRequests, drawRequests, showRequest } from "./requests.js";

const EVERY = 1000;
const THEMES = ["system", "dark", "light"];

const series = new Series();
let mesh = null;
let charts = null;
let failures = 0;
/** Whether this page has asked for a key by itself; a second time would be in the way of who has none. */
let asked = false;
/** Ends the pause between two questions. */
let wake = () => {};

function start() {
  buildTheme();
  buildKey();
  buildLegend();
  buildChat();
  buildRequests(() => mesh && drawRequests(mesh));
  charts = new Charts(byId("charts"), series);
  buildSpan();
  void poll();
}

async function poll() {
  for (;;) {
    if (document.visibilityState === "hidden") await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    const begun = performance.now();
    try {
      take(await getMesh(series.last));
      failures = 0;
      byId("banner").hidden = true;
    } catch (error) {
      failures += 1;
      trouble(error);
    }
    attr(document.body, "data-connected", String(failures === 0));
    await pause(Math.max(200, EVERY - (performance.now() - begun)) * Math.min(5, 1 + failures));
  }
}

/** Milliseconds until the next question; a new key is tried at once. */
function pause(milliseconds) {
  return new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, milliseconds);
  });
}

function take(answer) {
  mesh = answer.mesh;
  series.add(answer.history);
  showFacts();
  showTiles();
  draw(mesh, showRequest);
  drawRequests(mesh);
  charts.draw();
  showModels(mesh.models);
  beat(`live · ${new Date(mesh.time * 1000).toLocaleTimeString("en-GB")}`);
}

function trouble(error) {
  const denied = error.status === 401;
  if (denied && !asked) askForKey();
  const words = denied ? error.message : `The router does not answer (${error.message}); trying again.`;
  byId("banner").hidden = false;
  text(byId("banner"), words);
  beat("no answer");
}

function beat(words) {
  text(byId("beat").lastChild, words);
}

// ---- the top ----------------------------------------------------------------------------------------

function showFacts() {
  text(byId("model"), mesh.models[0] ?? "");
  const ready = mesh.workers.filter((w) => w.answers && w.state === "READY").length;
  const contact = mesh.bootstraps.filter((b) => b.in_contact).length;
  const facts = [
    { key: "workers", words: `${ready}/${mesh.workers.length} workers ready`, good: ready === mesh.workers.length && ready > 0 },
    { key: "bootstraps", words: `${contact}/${mesh.bootstraps.length} bootstrap`, good: contact > 0 },
    { key: "version", words: `v${mesh.version}`, good: true },
  ];
  reconcile(byId("facts"), facts, (f) => f.key, () => h("span"), (element, fact) => {
    text(element, fact.words);
    attr(element, "class", fact.good ? "fact" : "fact warn");
  });
}

function showTiles() {
  const kv = { total: 0, used: 0, cached: 0, quarantined: 0 };
  for (const worker of mesh.workers) for (const name of Object.keys(kv)) kv[name] += worker.kv[name];
  const share = (n) => (kv.total ? `${Math.round((100 * n) / kv.total)} %` : "–");
  const moving = mesh.links.reduce((sum, link) => sum + link.rate, 0);
  const errors = series.sum("errors", 60);
  const latest = (name) => series.latest(name);
  const tiles = [
    { name: "Time to first token", value: seconds(latest("ttft_p50")), more: `p95 ${seconds(latest("ttft_p95"))}` },
    { name: "Inter-token latency", value: seconds(latest("itl_p50")), more: `p95 ${seconds(latest("itl_p95"))}` },
    { name: "Throughput", value: `${short(series.sum("tokens", 5) / 5)}`, unit: "tok/s", more: `${short(series.sum("requests", 10) / 10)} requests/s` },
    { name: "In flight", value: mesh.router.in_flight, more: `${mesh.router.queued} waiting` },
    { name: "KV in use", value: share(kv.used), more: `${share(kv.cached)} cached` },
    { name: "KV moving", value: short(moving / 1e6), unit: "MB/s", more: `over ${mesh.links.filter((l) => l.up).length} links` },
    { name: "Errors, last minute", value: errors, more: errors ? "see the log" : "none", bad: errors > 0 },
  ];
  reconcile(
    byId("tiles"),
    tiles,
    (t) => t.name,
    (t) => h("div", { class: "tile" }, h("span", { class: "name" }, t.name), h("span", { class: "value" }, h("b"), h("i")), h("span", { class: "more" })),
    (element, tile) => {
      element.classList.toggle("bad", Boolean(tile.bad));
      text(element.children[1].firstChild, tile.value);
      text(element.children[1].lastChild, tile.unit ?? "");
      text(element.children[2], tile.more);
    },
  );
}

function buildSpan() {
  const show = () => {
    for (const button of byId("span").children) attr(button, "aria-pressed", String(Number(button.dataset.seconds) === charts.span));
    charts.draw();
  };
  for (const button of byId("span").children) {
    button.addEventListener("click", () => {
      charts.span = Number(button.dataset.seconds);
      show();
    });
  }
  show();
}

function buildTheme() {
  const apply = (theme) => {
    if (theme === "system") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
    byId("theme").title = `Colours: ${theme}`;
    charts?.draw();
  };
  apply(localStorage.getItem("pdmesh.theme") ?? "system");
  byId("theme").addEventListener("click", () => {
    const now = localStorage.getItem("pdmesh.theme") ?? "system";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    localStorage.setItem("pdmesh.theme", next);
    apply(next);
  });
  matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => charts?.draw());
}

function askForKey() {
  asked = true;
  byId("key").value = getKey();
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function buildKey() {
  byId("key-open").addEventListener("click", askForKey);
  byId("key-form").addEventListener("submit", () => {
    setKey(byId("key").value.trim());
    wake();
  });
}

start();
