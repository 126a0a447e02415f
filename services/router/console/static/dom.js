// Building the page. Text goes in as text nodes only: names come from the wire, and none of them is ever markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties and children. `class`, `title`, `data-*`, `aria-*` are attributes, `on*` listeners. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only when it differs, so that a selection of it survives. */
export function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
  return element;
}

/** Sets an attribute only when it differs; null removes it. */
export function attr(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Makes the children of `parent` those of `items`, keeping elements by key: `create(item)`, then `update(element, item)`. */
export function reconcile(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].filter((e) => e.pdmeshKey !== undefined).map((e) => [e.pdmeshKey, e]));
  let place = [...parent.children].find((e) => e.pdmeshKey !== undefined) ?? null;
  for (const item of items) {
    const key = keyOf(item);
    let element = old.get(key);
    old.delete(key);
    if (!element) {
      element = create(item);
      element.pdmeshKey = key;
    }
    if (element === place) place = nextKeyed(place);
    else parent.insertBefore(element, place);
    update(element, item);
  }
  for (const element of old.values()) element.remove();
}

function nextKeyed(element) {
  let next = element.nextElementSibling;
  while (next && next.pdmeshKey === undefined) next = next.nextElementSibling;
  return next;
}

// ---- numbers for people ----------------------------------------------------------------------------

/** Three significant digits without an exponent. */
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** Seconds as µs, ms, s or min. */
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${value < 0.01 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

/** Seconds on an axis: one unit whatever their size. */
export const axis = (value) => (value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`);

/** A count: whole below 1,000, else with a thousands separator. */
export const count = (value) => Math.round(value).toLocaleString("en");

/** A formatter whose figures end without zeros after the point, for axes. */
export const trimmed = (unit) => (value) => unit(value).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

/** Bytes per second. */
export function speed(value) {
  if (value >= 1e9) return `${short(value / 1e9)} GB/s`;
  if (value >= 1e6) return `${short(value / 1e6)} MB/s`;
  return value >= 1e3 ? `${short(value / 1e3)} kB/s` : `${Math.round(value)} B/s`;
}

/** Bytes. */
export function bytes(value) {
  if (value >= 1e9) return `${short(value / 1e9)} GB`;
  if (value >= 1e6) return `${short(value / 1e6)} MB`;
  return value >= 1e3 ? `${short(value / 1e3)} kB` : `${value} B`;
}
