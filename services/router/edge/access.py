"""One line of the log per request: how it ended, how many tokens, how fast, by whom. Never what was asked or said."""

from __future__ import annotations

import logging

from services.router.trace import current_trace

log = logging.getLogger(__name__)


def log_access(path: str, status: int, end: str) -> None:
    """Logs the request that the present task serves; to be called once, when its response is over.

    `status` is the HTTP status that was sent, 499 when the client went away before; `end` as in the metric
    pdmesh_router_requests_total.
    """
    fields: dict[str, object] = {"path": path, "status": status, "end": end}
    trace = current_trace()
    results = trace.results if trace is not None else ()
    if results:
        fields["tokens"] = sum(len(result.token_ids) for result in results)
        fields["cached_tokens"] = sum(result.cached_tokens for result in results)
        fields["ttft"] = round(min(result.timings["ttft"] for result in results), 6)
        fields["e2e"] = round(max(result.timings["e2e"] for result in results), 6)
        fields["attempts"] = max(result.attempts for result in results)
        fields["finish"] = ",".join(dict.fromkeys(result.finish_reason for result in results))
        pairs = dict.fromkeys("+".join(filter(None, (r.prefill_instance, r.decode_instance))) for r in results)
        fields["pair"] = ",".join(pairs)
    elif trace is not None and trace.moves:
        fields["attempts"] = max(move.attempt for move in trace.moves) + 1
    log.info("request", extra={"fields": fields})
