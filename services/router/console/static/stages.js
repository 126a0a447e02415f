// Where a request's time went: the moves that `explain` gives, as spans of stages.

/** The stages, in the order in which a request passes them. */
export const STAGES = [
  { name: "router", label: "router: queue and placement", short: "router" },
  { name: "decode-queue", label: "decode: admission, awaiting prefill", short: "admission" },
  { name: "prefill-queue", label: "prefill: queue", short: "prefill queue" },
  { name: "compute", label: "prefill: compute", short: "prefill compute" },
  { name: "transfer", label: "KV transfer", short: "KV transfer" },
  { name: "ready", label: "decode: waits for its turn", short: "decode queue" },
  { name: "recompute", label: "decode: recomputes the prompt", short: "recompute" },
  { name: "decode", label: "decode: tokens", short: "decode" },
];

const OF_STATE = {
  router_request: { QUEUED: "router", PLACED: "router", REPLANNED: "router", RESUMING: "router" },
  decode_request: {
    ADMITTED: "decode-queue", QUEUED: "decode-queue", AWAITING_START: "decode-queue", READY: "ready",
    PREEMPTED: "ready", COMPUTING: "recompute", DECODING: "decode",
  },
  prefill_request: { ACCEPTED: "prefill-queue", QUEUED: "prefill-queue", COMPUTING: "compute" },
  transfer_session: { PUSHING: "transfer" },
};

/** {start, end, first, spans: [{stage, process, from, to, attempt}]}, times in seconds after the first move. */
export function spansOf(moves) {
  if (!moves.length) return { start: 0, end: 0, first: null, spans: [] };
  const start = moves[0].unix_seconds;
  const spans = [];
  const open = new Map();
  let first = null;
  for (const move of moves) {
    const at = move.unix_seconds - start;
    const key = `${move.process}/${move.machine}/${move.room}/${move.attempt}`;
    const before = open.get(key);
    if (before) {
      before.to = at;
      if (before.stage) spans.push(before);
    }
    if (move.machine === "router_request" && move.to === "FIRST_TOKEN") first ??= at;
    const stage = OF_STATE[move.machine]?.[move.to] ?? null;
    open.set(key, { stage, process: move.process, attempt: move.attempt, from: at, to: at });
  }
  const end = moves.at(-1).unix_seconds - start;
  const ended = moves.some((m) => m.machine === "router_request" && ["FINISHED", "FAILED", "CANCELLED"].includes(m.to));
  if (!ended) {
    for (const span of open.values()) {
      if (span.stage) spans.push({ ...span, to: end });
    }
  }
  return { start, end, first, spans };
}

/** Seconds per stage; overlapping spans of one stage count once. */
export function totals(spans) {
  const sums = new Map();
  for (const { name } of STAGES) {
    const own = spans.filter((span) => span.stage === name).sort((a, b) => a.from - b.from);
    let sum = 0;
    let reached = 0;
    for (const span of own) {
      sum += Math.max(0, span.to - Math.max(span.from, reached));
      reached = Math.max(reached, span.to);
    }
    if (own.length) sums.set(name, sum);
  }
  return sums;
}
