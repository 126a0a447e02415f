// The mesh as a picture: a card per process, a wire per KV link, a dot per request.

import { attr, byId, bytes, h, reconcile, s, seconds, short, speed, text } from "./dom.js";

export const KV = [
  { name: "used", what: "held by live requests" },
  { name: "cached", what: "held by nobody, reusable by a prefix" },
  { name: "pinned", what: "a transfer may still read them" },
  { name: "quarantined", what: "a transfer may still write them" },
  { name: "free", what: "empty" },
];
/** States of a request whose tokens are coming. */
const FLOWING = new Set(["FIRST_TOKEN", "RESUMED"]);
const MOST_DOTS = 18;
const MOST_WIRES = 48;
const MOST_LABELS = 16;
const CROWD = 6;

let latest = null;

export function buildLegend() {
  byId("legend").replaceChildren(
    ...KV.map(({ name, what }) => h("li", { title: what }, h("i", { class: `swatch kv-${name}` }), name)),
  );
  new ResizeObserver(() => latest && drawWires(latest)).observe(byId("picture"));
}

export function draw(mesh, onRequest) {
  latest = mesh;
  const dots = dotsOf(mesh.requests);
  drawRouter(mesh, dots, onRequest);
  const columns = { prefill: [], decode: [] };
  for (const worker of mesh.workers) columns[worker.role === "PREFILL" ? "prefill" : "decode"].push(worker);
  for (const [name, workers] of Object.entries(columns)) {
    const column = byId(`column-${name}`);
    column.classList.toggle("crowd", workers.length > CROWD);
    const title = name === "prefill" ? "Prefill" : workers.some((w) => w.role === "MIXED") ? "Decode, mixed" : "Decode";
    heading(column, `${title} · ${workers.length}`);
    reconcile(column, workers, (w) => `${w.role}/${w.instance}/${w.dp}`, createCard, (card, worker) => {
      updateCard(card, worker, dots.get(worker.instance) ?? [], onRequest);
    });
    let none = column.querySelector(".none");
    if (!workers.length && !none) column.append((none = h("p", { class: "none" }, "no worker in the rank table")));
    if (workers.length) none?.remove();
  }
  drawWires(mesh);
  drawLinks(mesh.links);
}

function heading(column, words) {
  let title = column.querySelector("h3");
  if (!title) column.prepend((title = h("h3")));
  text(title, words);
}

// ---- requests as dots ----------------------------------------------------------------------------

/** Where each request is, as far as this router knows: at the router, in a prefill worker, in a decode worker. */
function dotsOf(requests) {
  const places = new Map();
  for (const request of requests) {
    let place = "";
    if (FLOWING.has(request.state)) place = request.decode;
    else if (request.state === "SENT") place = request.prefill || request.decode;
    if (!places.has(place)) places.set(place, []);
    places.get(place).push(request);
  }
  return places;
}

function drawDots(box, requests, onRequest) {
  reconcile(
    box,
    requests.slice(0, MOST_DOTS),
    (r) => r.room,
    (r) => h("button", { type: "button", class: "dot", onclick: () => onRequest(r.id) }),
    (dot, r) => {
      attr(dot, "class", `dot ${r.slow ? "slow" : FLOWING.has(r.state) ? "decoding" : "waiting"}`);
      const where = FLOWING.has(r.state) ? `${r.tokens} tokens` : r.state.toLowerCase();
      attr(dot, "title", `${r.id}: ${where}, ${seconds(r.age)}${r.slow ? ", slow" : ""}`);
      attr(dot, "aria-label", `Request ${r.id}, ${where}${r.slow ? ", slow" : ""}`);
    },
  );
  let more = box.querySelector(".more");
  const left = requests.length - MOST_DOTS;
  if (left <= 0) more?.remove();
  else box.append(text((more ??= h("span", { class: "more" })), `+${left}`));
}

// ---- cards ----------------------------------------------------------------------------------------

function drawRouter(mesh, dots, onRequest) {
  const { router, bootstraps } = mesh;
  const column = byId("column-router");
  heading(column, "Router");
  const cards = [
    { kind: "router", name: router.host, router },
    ...bootstraps.map((b) => ({ kind: "bootstrap", name: b.address, bootstrap: b })),
  ];
  reconcile(
    column,
    cards,
    (c) => `${c.kind}/${c.name}`,
    (c) => {
      const card = h("article", { class: `card ${c.kind}`, "data-kind": c.kind }, h("header", {}, h("b"), pill()), h("p", { class: "load" }));
      if (c.kind === "router") card.append(h("div", { class: "dots" }));
      return card;
    },
    (card, c) => {
      if (c.kind === "bootstrap") {
        text(card.querySelector("b"), "bootstrap");
        setPill(card, c.bootstrap.in_contact ? "READY" : "LOST");
        text(card.querySelector(".load"), c.bootstrap.address);
        return;
      }
      text(card.querySelector("b"), "router");
      setPill(card, router.draining ? "DRAINING" : router.ready ? "READY" : "NO WORKER");
      text(card.querySelector(".load"), `${router.in_flight} in flight · ${router.queued} waiting`);
      attr(card, "title", `${router.host}, up for ${seconds(router.uptime_seconds)}, placement by ${router.policy}`);
      drawDots(card.querySelector(".dots"), dots.get("") ?? [], onRequest);
    },
  );
}

function pill() {
  return h("span", { class: "pill" }, h("i"), h("span"));
}

function setPill(card, state) {
  const element = card.querySelector(".pill");
  attr(element, "data-state", state);
  text(element.lastChild, state);
}

function createCard(worker) {
  return h(
    "article",
    { class: "card worker", "data-role": worker.role },
    h("header", {}, h("b"), pill()),
    h("p", { class: "load" }, h("span"), h("span", { class: "rate" })),
    h("div", { class: "bar", role: "img" }, ...KV.map(({ name }) => h("i", { class: `kv-${name}` }))),
    h("p", { class: "blocks" }),
    h("div", { class: "dots" }),
  );
}

function updateCard(card, worker, requests, onRequest) {
  const { kv, load } = worker;
  const name = worker.dp ? `${worker.instance} dp${worker.dp}` : worker.instance;
  attr(card, "data-instance", worker.instance);
  attr(card, "data-role", worker.role);
  text(card.querySelector("b"), name);
  setPill(card, worker.state);
  card.classList.toggle("silent", !worker.answers);
  const rate = worker.role === "PREFILL" ? worker.rates.prompt_tokens_computed : worker.rates.output_tokens;
  const [counts, perSecond] = card.querySelector(".load").children;
  text(counts, worker.answers ? `${load.running} running · ${load.queued} queued` : silence(worker));
  text(perSecond, worker.answers && rate ? `${short(rate)} tok/s` : "");
  const bar = card.querySelector(".bar");
  KV.forEach(({ name: state }, i) => (bar.children[i].style.flexGrow = String(kv[state])));
  const shown = KV.filter(({ name: state }) => kv[state] > 0 || state === "used" || state === "free");
  const numbers = shown.map(({ name: state }) => `${kv[state]} ${state}`).join(" · ");
  text(card.querySelector(".blocks"), `${numbers} of ${kv.total}`);
  attr(bar, "aria-label", `KV blocks: ${numbers} of ${kv.total}`);
  const hits = worker.asked_tokens ? `, prefix cache ${Math.round((100 * worker.cached_tokens) / worker.asked_tokens)} %` : "";
  attr(card, "title", `${worker.endpoint} on ${worker.host}, pid ${worker.pid}, up for ${seconds(worker.uptime_seconds)}${hits}`);
  drawDots(card.querySelector(".dots"), requests, onRequest);
}

function silence(worker) {
  return worker.age === null ? "no answer yet" : `no answer for ${seconds(worker.age)}`;
}

// ---- wires ----------------------------------------------------------------------------------------

const width = (rate) => (rate > 0 ? Math.min(7, 1.5 + Math.log10(1 + rate / 1e5) * 1.5) : 1.25);
const idle = (link) => (link.up ? link.transport : `${link.transport} down`);

function drawWires(mesh) {
  const picture = byId("picture");
  const svg = byId("wires");
  if (getComputedStyle(svg).display === "none") return;
  const box = picture.getBoundingClientRect();
  attr(svg, "viewBox", `0 0 ${box.width} ${box.height}`);
  const cards = new Map([...picture.querySelectorAll(".worker")].map((c) => [c.dataset.instance, c.getBoundingClientRect()]));
  const wires = controlWires(picture, box).concat(linkWires(mesh.links, cards, box));
  reconcile(svg, wires, (w) => w.key, createWire, updateWire);
}

/** From the router to each column: requests, not KV. */
function controlWires(picture, box) {
  const router = picture.querySelector('[data-kind="router"]');
  if (!router) return [];
  const from = router.getBoundingClientRect();
  return [...picture.querySelectorAll("#column-prefill .worker")].map((card) => {
    const to = card.getBoundingClientRect();
    const start = { x: from.right - box.left, y: from.top + 20 - box.top };
    const end = { x: to.left - box.left, y: to.top + 16 - box.top };
    return { key: `control/${card.dataset.instance}`, control: true, start, end };
  });
}

function linkWires(links, cards, box) {
  const known = links.filter((l) => cards.has(l.from) && cards.has(l.to));
  const shown = [...known].sort((a, b) => b.rate - a.rate).slice(0, MOST_WIRES);
  const port = (instance, end, peers) => {
    const rect = cards.get(instance);
    const own = shown.filter((l) => l[end] === instance).sort((a, b) => cards.get(a[peers]).top - cards.get(b[peers]).top);
    return (link) => rect.top - box.top + (rect.height * (own.indexOf(link) + 1)) / (own.length + 1);
  };
  return shown.map((link, i) => ({
    key: `${link.from}/${link.to}/${link.transport}`,
    link,
    labelled: i < MOST_LABELS,
    start: { x: cards.get(link.from).right - box.left, y: port(link.from, "from", "to")(link) },
    end: { x: cards.get(link.to).left - box.left, y: port(link.to, "to", "from")(link) },
  }));
}

function createWire(wire) {
  if (wire.control) return s("g", { class: "wire control" }, s("path", { class: "base" }));
  return s(
    "g",
    { class: "wire" },
    s("path", { class: "base" }),
    s("path", { class: "flow" }),
    s("circle", { class: "plug from", r: 2.5 }),
    s("circle", { class: "plug to", r: 2.5 }),
    s("g", { class: "label" }, s("rect", { rx: 4, height: 16, y: -8 }), s("text", { "text-anchor": "middle", dy: "0.35em" })),
  );
}

function updateWire(group, wire) {
  const { start, end, link } = wire;
  const bend = (end.x - start.x) / 2;
  const path = `M${start.x} ${start.y}C${start.x + bend} ${start.y} ${end.x - bend} ${end.y} ${end.x} ${end.y}`;
  for (const element of group.querySelectorAll("path")) attr(element, "d", path);
  if (wire.control) return;
  const moving = link.rate > 0;
  attr(group, "class", `wire ${moving ? "moving" : link.up ? "idle" : "down"}`);
  attr(group, "data-link", wire.key);
  const flow = group.querySelector(".flow");
  flow.style.strokeWidth = `${width(link.rate)}px`;
  flow.style.animationDuration = `${Math.max(0.35, 1.8 - Math.log10(1 + link.rate / 1e5) * 0.45)}s`;
  for (const [name, point] of [["from", start], ["to", end]]) {
    const plug = group.querySelector(`.plug.${name}`);
    attr(plug, "cx", point.x);
    attr(plug, "cy", point.y);
  }
  const label = group.querySelector(".label");
  label.style.display = wire.labelled ? "" : "none";
  const t = 0.26;
  const along = (a, b, c, d) => (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t * t * c + t ** 3 * d;
  const x = along(start.x, start.x + bend, end.x - bend, end.x);
  const y = along(start.y, start.y, end.y, end.y);
  const words = text(label.lastChild, moving ? speed(link.rate) : idle(link));
  const length = words.textContent.length * 6.1 + 10;
  const from = Math.max(x, start.x + length / 2 + 7);
  attr(label, "transform", `translate(${from.toFixed(1)} ${y.toFixed(1)})`);
  attr(label.firstChild, "width", length);
  attr(label.firstChild, "x", -length / 2);
}

/** The same as a list: what a narrow screen shows, and what is read aloud. */
function drawLinks(links) {
  reconcile(
    byId("links"),
    [...links].sort((a, b) => b.rate - a.rate).slice(0, MOST_WIRES),
    (l) => `${l.from}/${l.to}/${l.transport}`,
    () => h("li", {}, h("span", { class: "ends" }), h("span", { class: "pipe" }, h("i")), h("span", { class: "rate" }), h("span", { class: "sum" })),
    (li, link) => {
      attr(li, "class", link.rate > 0 ? "moving" : link.up ? "idle" : "down");
      attr(li, "title", link.reason);
      text(li.children[0], `${link.from} → ${link.to}`);
      li.children[1].firstChild.style.height = `${width(link.rate)}px`;
      text(li.children[2], `${link.transport} · ${link.rate > 0 ? speed(link.rate) : link.up ? "idle" : "down"}`);
      const sums = [bytes(link.bytes)];
      if (link.speed) sums.push(`${speed(link.speed)} while moving`);
      if (link.failures) sums.push(`${link.failures} failed`);
      text(li.children[3], sums.join(" · "));
    },
  );
}
