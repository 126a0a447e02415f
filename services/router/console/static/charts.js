// Small line charts on canvas. Colours come from the style sheet, so that both themes have their own.

import { axis, count, h, seconds, text, trimmed } from "./dom.js";

const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 18;
const STEPS = { 120: 30, 300: 60, 900: 180 };

const CHARTS = [
  { title: "Time to first token", unit: seconds, axis, lines: [["ttft_p95", "p95", "--chart-2"], ["ttft_p50", "p50", "--chart-1"]] },
  { title: "Inter-token latency", unit: seconds, axis, lines: [["itl_p95", "p95", "--chart-2"], ["itl_p50", "p50", "--chart-1"]] },
  { title: "Output tokens per second", unit: count, whole: true, fill: true, lines: [["tokens", "tokens/s", "--chart-3"]] },
  {
    title: "Requests", unit: count, whole: true,
    lines: [["queued", "waiting", "--chart-2"], ["in_flight", "in flight", "--chart-1"]], marks: ["errors", "errors", "--bad"],
  },
];

/** History as columns, each a list; grows at the end, forgets at the front. */
export class Series {
  constructor(kept = 900) {
    this.kept = kept;
    this.columns = { time: [] };
  }

  get last() {
    return this.columns.time.at(-1) ?? 0;
  }

  add(columns) {
    const own = this.columns;
    for (const [name, values] of Object.entries(columns)) {
      own[name] = (own[name] ?? []).concat(values).slice(-this.kept);
    }
  }

  /** The last value of a column; null without any. */
  latest(name) {
    return this.columns[name]?.at(-1) ?? null;
  }

  /** The sum of a column over the last `count` seconds. */
  sum(name, count) {
    return (this.columns[name] ?? []).slice(-count).reduce((a, b) => a + b, 0);
  }
}

export class Charts {
  constructor(box, series) {
    this.series = series;
    this.span = 300;
    this.hover = null;
    this.charts = CHARTS.map((spec) => this.#build(box, spec));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  #build(box, spec) {
    const value = h("span", { class: "now" });
    const canvas = h("canvas", { role: "img" });
    const names = [...spec.lines].reverse().map(([, label, colour]) => h("span", { class: "key", "data-colour": colour }, h("i"), label));
    if (spec.marks) names.push(h("span", { class: "key mark", "data-colour": spec.marks[2] }, h("i"), spec.marks[1]));
    const figure = h("figure", {}, h("figcaption", {}, h("b", {}, spec.title), ...names, value), canvas);
    box.append(figure);
    canvas.addEventListener("pointermove", (event) => {
      this.hover = { x: event.offsetX, width: canvas.clientWidth };
      this.draw();
    });
    canvas.addEventListener("pointerleave", () => {
      this.hover = null;
      this.draw();
    });
    return { spec, canvas, value };
  }

  draw() {
    for (const chart of this.charts) this.#drawOne(chart);
  }

  #drawOne({ spec, canvas, value }) {
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `10px ${style.fontFamily}`;

    const times = this.series.columns.time;
    const end = times.at(-1) ?? Date.now() / 1000;
    const begin = end - this.span;
    const x = (time) => LEFT + ((time - begin) / this.span) * (width - LEFT - RIGHT);
    const from = times.findIndex((time) => time >= begin);
    const first = from < 0 ? times.length : from;
    const shown = spec.lines.map(([name]) => (this.series.columns[name] ?? []).slice(first));
    const most = Math.max(0, ...shown.flat().filter((v) => v !== null));
    const top = ceiling(most, spec.whole);
    const y = (v) => height - BOTTOM - (v / top) * (height - TOP - BOTTOM);

    this.#grid(pen, { width, height, top, y, colour, spec });
    const at = times.slice(first);
    spec.lines.forEach(([, , name], i) => {
      line(pen, at, shown[i], { x, y, colour: colour(name), fill: spec.fill ? y(0) : null });
    });
    if (spec.marks) {
      pen.fillStyle = colour(spec.marks[2]);
      (this.series.columns[spec.marks[0]] ?? []).slice(first).forEach((n, i) => {
        if (n > 0) pen.fillRect(x(at[i]) - 1, height - BOTTOM - 7, 2, 7);
      });
    }
    this.#pointed(pen, spec, value, { x, begin, at, shown, height, colour, canvas, first });
  }

  #grid(pen, { width, height, top, y, colour, spec }) {
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      const line = Math.round(y(top * share)) + 0.5;
      pen.strokeStyle = colour("--grid");
      pen.beginPath();
      pen.moveTo(LEFT, line);
      pen.lineTo(width - RIGHT, line);
      pen.stroke();
      pen.fillStyle = colour("--muted");
      pen.fillText(share ? trimmed(spec.axis ?? spec.unit)(top * share) : "0", LEFT - 6, line);
    }
    pen.textBaseline = "alphabetic";
    const step = STEPS[this.span];
    const tight = ((width - LEFT - RIGHT) * step) / this.span < 66;
    for (let ago = 0; ago <= this.span - (tight ? step : 0); ago += step) {
      const place = width - RIGHT - (ago / this.span) * (width - LEFT - RIGHT);
      pen.textAlign = ago === 0 ? "right" : ago === this.span ? "left" : "center";
      pen.fillText(ago === 0 ? "now" : this.span < 180 ? `−${ago} s` : `−${ago / 60} min`, place, height - 5);
    }
  }

  /** What is under the pointer, or the last values. */
  #pointed(pen, spec, value, { x, begin, at, shown, height, colour, canvas, first }) {
    let index = at.length - 1;
    let ago = "";
    if (this.hover && at.length) {
      const share = (this.hover.x - LEFT) / (this.hover.width - LEFT - RIGHT);
      const wanted = begin + share * this.span;
      index = at.reduce((best, time, i) => (Math.abs(time - wanted) < Math.abs(at[best] - wanted) ? i : best), 0);
      const place = Math.round(x(at[index])) + 0.5;
      pen.strokeStyle = colour("--muted");
      pen.beginPath();
      pen.moveTo(place, TOP);
      pen.lineTo(place, height - BOTTOM);
      pen.stroke();
      ago = ` · ${new Date(at[index] * 1000).toLocaleTimeString("en-GB")}`;
    }
    const values = spec.lines.map(([, label], i) => [label, index < 0 ? null : shown[i][index]]).reverse();
    const words = values.map(([label, v]) => `${spec.lines.length > 1 ? `${label} ` : ""}${v === null ? "–" : spec.unit(v)}`);
    if (spec.marks && index >= 0) {
      const errors = this.series.columns[spec.marks[0]]?.[first + index] ?? 0;
      if (errors) words.push(`${errors} errors`);
    }
    text(value, words.join(" · ") + ago);
    canvas.setAttribute("aria-label", `${spec.title}: ${words.join(", ")}`);
  }
}

function line(pen, times, values, { x, y, colour, fill }) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  let run = [];
  const flush = () => {
    if (run.length > 1) {
      pen.beginPath();
      run.forEach(([a, b], i) => (i ? pen.lineTo(a, b) : pen.moveTo(a, b)));
      pen.stroke();
      if (fill !== null) {
        pen.lineTo(run.at(-1)[0], fill);
        pen.lineTo(run[0][0], fill);
        pen.globalAlpha = 0.16;
        pen.fillStyle = colour;
        pen.fill();
        pen.globalAlpha = 1;
      }
    } else if (run.length === 1) {
      pen.fillStyle = colour;
      pen.fillRect(run[0][0] - 1, run[0][1] - 1, 2, 2);
    }
    run = [];
  };
  values.forEach((v, i) => {
    if (v === null || (i && times[i] - times[i - 1] > 5)) flush();
    if (v !== null) run.push([x(times[i]), y(v)]);
  });
  flush();
}

/** The next round figure above whose half is one too. */
function ceiling(most, whole) {
  if (most <= 0) return whole ? 4 : 0.1;
  const unit = 10 ** Math.floor(Math.log10(most));
  const found = [1, 2, 4, 6, 8, 10].find((n) => n * unit >= most) * unit;
  return whole ? Math.max(found, 4) : found;
}
