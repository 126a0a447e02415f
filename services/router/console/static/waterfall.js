// Spans as bars on one axis of time: a row per stage, with its seconds in figures.

import { h, s, seconds } from "./dom.js";
import { STAGES, spansOf, totals } from "./stages.js";

/** The waterfall of the moves that `explain` gives. */
export function waterfall(moves) {
  const { end, first, spans } = spansOf(moves);
  const sums = totals(spans);
  const length = end || 1;
  const box = h("div", { class: "waterfall" });
  for (const { name, label, short } of STAGES) {
    if (!sums.has(name)) continue;
    const lane = s("svg", { class: "lane", viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const span of spans.filter((found) => found.stage === name)) {
      const x = (1000 * span.from) / length;
      const width = Math.max(3, (1000 * (span.to - span.from)) / length);
      lane.append(s("rect", { class: `stage-${name}`, x: Math.min(x, 997), y: 2, width, height: 10 }));
    }
    if (first !== null) lane.append(s("rect", { class: "first", x: Math.min(998, (1000 * first) / length), y: 0, width: 2, height: 14 }));
    box.append(h("span", { class: "name", title: label }, short), lane, h("span", { class: "time" }, seconds(sums.get(name))));
  }
  if (first !== null) {
    const note = h("span", { class: "axis" }, h("i"), `token 1 after ${seconds(first)} · the whole ${seconds(end)}`);
    box.append(h("span"), note, h("span"));
  }
  return box;
}
