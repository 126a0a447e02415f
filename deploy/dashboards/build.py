"""Writes the Grafana dashboards beside it: `python deploy/dashboards/build.py`.

The dashboards are data below: rows of panels, a panel a title, a unit, and queries with their legends. Grafana's
JSON is made of that, so that all panels look and behave alike. A test keeps the files and this one in step, and
checks that each metric named here is served by a mesh.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RATE = "$__rate_interval"
WORKER = 'worker=~"$worker"'
PREFILL = f'role="PREFILL", {WORKER}'


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are (PromQL, legend). Kinds: timeseries, stat, heatmap, table."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str
    kind: str = "timeseries"
    width: int = 8
    stack: bool = False
    colours: tuple[tuple[float | None, str], ...] = ()


def one(title: str, unit: str, query: str, description: str, legend: str = "", **more: Any) -> Panel:
    """A panel with one query."""
    return Panel(title, unit, ((query, legend),), description, **more)


def quantiles(metric: str, by: str = "", where: str = "", name: str = "") -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    suffix = f" {{{{{name or by}}}}}" if by else ""
    rate = f"sum by ({labels}) (rate({metric}_bucket{{{where}}}[{RATE}]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"p{round(q * 100)}{suffix}") for q in (0.5, 0.95, 0.99))


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The sum of a counter's rates."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{where}}}[{RATE}]))"


GOOD, BAD = ((None, "red"), (1, "green")), ((None, "green"), (1, "red"))

OVERVIEW = (
    (
        "Is it well?",
        (
            one(
                "Ready routers",
                "short",
                "sum(pdmesh_router_ready)",
                "Routers that could place a request now.",
                kind="stat",
                width=4,
                colours=GOOD,
            ),
            one(
                "Ready prefill",
                "short",
                'max(pdmesh_bootstrap_rows{role="PREFILL", state="READY"})',
                "Prefill workers in the rank table that may be placed upon.",
                kind="stat",
                width=4,
            ),
            one(
                "Ready decode",
                "short",
                'max(pdmesh_bootstrap_rows{role="DECODE", state="READY"})',
                "Decode workers in the rank table that may be placed upon.",
                kind="stat",
                width=4,
            ),
            one(
                "Lost",
                "short",
                'max(sum by (instance) (pdmesh_bootstrap_rows{state="LOST"}))',
                "Workers whose lease lapsed.",
                kind="stat",
                width=4,
                colours=BAD,
            ),
            one(
                "In flight",
                "short",
                "sum(pdmesh_router_in_flight)",
                "Samples that are served now.",
                kind="stat",
                width=4,
            ),
            one("Waiting", "short", "sum(pdmesh_router_queued)", "Samples that wait for a slot.", kind="stat", width=4),
        ),
    ),
    (
        "Load",
        (
            one(
                "Requests",
                "reqps",
                rate("pdmesh_router_requests_total", "end"),
                "HTTP requests by how they ended.",
                "{{end}}",
                stack=True,
            ),
            Panel(
                "Tokens",
                "short",
                (
                    (rate("pdmesh_router_output_tokens_total"), "output"),
                    (rate("pdmesh_router_prompt_tokens_total"), "prompt"),
                    (rate("pdmesh_router_cached_tokens_total"), "prompt, found in a cache"),
                ),
                "Tokens per second over all routers.",
            ),
            one(
                "Samples by state",
                "short",
                "sum by (state) (pdmesh_router_samples_now)",
                "Where the samples are that are under way.",
                "{{state}}",
                stack=True,
            ),
        ),
    ),
    (
        "Speed",
        (
            Panel(
                "Time to first token",
                "s",
                quantiles("pdmesh_router_time_to_first_token_seconds"),
                "From arrival at the router to token 1.",
            ),
            Panel(
                "Between tokens",
                "s",
                quantiles("pdmesh_router_inter_token_latency_seconds"),
                "Between two tokens of a sample.",
            ),
            Panel("Whole sample", "s", quantiles("pdmesh_router_request_seconds"), "From arrival to the last token."),
        ),
    ),
    (
        "Membership and processes",
        (
            one(
                "Workers by state",
                "short",
                "sum by (role, state) (pdmesh_router_workers)",
                "Rows of the rank table as routers see them, summed over routers.",
                "{{role}} {{state}}",
            ),
            Panel(
                "Lapses and restarts",
                "short",
                (
                    ("sum(increase(pdmesh_bootstrap_lease_lapses_total[5m]))", "leases lapsed"),
                    ("sum(increase(pdmesh_bootstrap_takeovers_total[5m]))", "rows taken over by a new life"),
                ),
                "In the last five minutes.",
            ),
            one(
                "Event-loop lag",
                "s",
                "max by (job) (pdmesh_event_loop_lag_seconds)",
                "99th percentile of how late a service's event loop is.",
                "{{job}}",
            ),
            one("Memory", "bytes", "sum by (job) (process_resident_memory_bytes)", "Of service processes.", "{{job}}"),
            one(
                "Memory of engines",
                "bytes",
                "sum by (job) (pdmesh_engine_process_resident_memory_bytes)",
                "Of engine processes, pools of KV included.",
                "{{job}}",
            ),
            one(
                "Open files",
                "short",
                "max by (job) (process_open_fds)",
                "The most that one service process has.",
                "{{job}}",
            ),
        ),
    ),
)

WORKERS = (
    (
        "Load",
        (
            one(
                "Running",
                "short",
                f"pdmesh_engine_requests_running{{{WORKER}}}",
                "Requests in the running batch.",
                "{{worker}}",
            ),
            one(
                "Waiting",
                "short",
                f"pdmesh_engine_requests_waiting{{{WORKER}}}",
                "Requests that wait in the engine.",
                "{{worker}}",
            ),
            one(
                "Tokens that wait",
                "short",
                f"pdmesh_engine_waiting_tokens{{{WORKER}}}",
                "Tokens that wait to be computed.",
                "{{worker}}",
            ),
        ),
    ),
    (
        "KV",
        (
            one(
                "Usage",
                "percentunit",
                f"pdmesh_engine_kv_usage_ratio{{{WORKER}}}",
                "Share of the blocks that nobody else can have: used, pinned, quarantined.",
                "{{worker}}",
            ),
            one(
                "Blocks by state",
                "short",
                f"sum by (state) (pdmesh_engine_kv_blocks{{{WORKER}}})",
                "Of the chosen workers together; their sum never changes while they live.",
                "{{state}}",
                stack=True,
            ),
            one(
                "Prefix cache hits",
                "percentunit",
                f"{rate('pdmesh_engine_prefix_cache_hit_tokens_total', 'worker', WORKER)} / "
                f"{rate('pdmesh_engine_prefix_cache_query_tokens_total', 'worker', WORKER)}",
                "Share of looked-up prompt tokens that were found.",
                "{{worker}}",
            ),
            one(
                "Preemptions",
                "short",
                rate("pdmesh_engine_preemptions_total", "worker", WORKER),
                "Running requests per second whose blocks went to an older one.",
                "{{worker}}",
            ),
            one(
                "Evictions",
                "short",
                rate("pdmesh_engine_kv_evictions_total", "worker", WORKER),
                "Cached blocks per second that were given to others.",
                "{{worker}}",
            ),
            one(
                "Quarantined by peer",
                "short",
                f"sum by (worker, peer) (pdmesh_engine_kv_quarantined_blocks{{{WORKER}}})",
                "Blocks that a peer may still write, whose session has ended.",
                "{{worker}} by {{peer}}",
            ),
        ),
    ),
    (
        "Steps",
        (
            Panel(
                "Decode steps",
                "s",
                quantiles("pdmesh_engine_step_seconds", "worker", f'kind="decode", {WORKER}'),
                "Steps without a prompt's chunk: what a token takes at least.",
            ),
            Panel(
                "Steps with chunks",
                "s",
                quantiles("pdmesh_engine_step_seconds", "worker", f'kind!="decode",{WORKER}'),
                "Steps in which prompts are computed, alone or beside running requests.",
            ),
            Panel(
                "Batch", "short", quantiles("pdmesh_engine_step_sequences", "worker", WORKER), "Sequences in a step."
            ),
            one(
                "Busy",
                "percentunit",
                rate("pdmesh_engine_busy_seconds_total", "worker", WORKER),
                "Share of the time that the engine is in a step.",
                "{{worker}}",
            ),
            one(
                "Output",
                "short",
                rate("pdmesh_engine_output_tokens_total", "worker", WORKER),
                "Tokens per second.",
                "{{worker}}",
            ),
            one(
                "Prompts",
                "short",
                rate("pdmesh_engine_prompt_tokens_total", "worker", WORKER),
                "Prompt tokens computed per second.",
                "{{worker}}",
            ),
        ),
    ),
    (
        "Life",
        (
            one(
                "Heartbeat age",
                "s",
                f"pdmesh_engine_heartbeat_age_seconds{{{WORKER}}}",
                "Since the engine last sent figures; above watchdog_timeout it is killed.",
                "{{worker}}",
            ),
            one(
                "Lease age",
                "s",
                f"max by (worker) (pdmesh_worker_lease_age_seconds{{{WORKER}}})",
                "Since the slowest Bootstrap last renewed the lease.",
                "{{worker}}",
            ),
            one(
                "Refused and fenced",
                "short",
                f"sum by (worker) (rate(pdmesh_worker_sessions_refused_total{{{WORKER}}}[{RATE}])"
                f" + rate(pdmesh_worker_sessions_fenced_total{{{WORKER}}}[{RATE}]))",
                "Sessions per second that came while draining, or as an attempt that another one has overtaken.",
                "{{worker}}",
            ),
        ),
    ),
)

TRANSFER = (
    (
        "Links",
        (
            one(
                "Links up",
                "short",
                f"sum by (worker) (pdmesh_link_up{{{WORKER}}})",
                "Peers with an open link.",
                "{{worker}}",
            ),
            one(
                "Throughput",
                "Bps",
                rate("pdmesh_link_bytes_total", "worker, peer, transport", PREFILL),
                "KV that prefill workers push.",
                "{{worker}} to {{peer}} over {{transport}}",
            ),
            one(
                "Failures",
                "short",
                rate("pdmesh_link_failures_total", "worker, peer", WORKER),
                "Pushes per second that did not arrive whole.",
                "{{worker}} to {{peer}}",
            ),
        ),
    ),
    (
        "Pushes",
        (
            Panel(
                "Time", "s", quantiles("pdmesh_push_seconds", "worker", WORKER), "One push, until the receiver has it."
            ),
            Panel("Size", "bytes", quantiles("pdmesh_push_bytes", "worker", WORKER), "One push."),
            Panel("Speed", "Bps", quantiles("pdmesh_push_bytes_per_second", "worker", WORKER), "One push."),
        ),
    ),
    (
        "What requests wait for",
        (
            Panel(
                "From the ticket to whole KV",
                "s",
                quantiles(
                    "pdmesh_engine_stage_seconds", "worker", f'machine="decode_request", state="AWAITING_KV", {WORKER}'
                ),
                "Prefill's computation included, which the transfer overlaps.",
            ),
            Panel(
                "From the first push to the last",
                "s",
                quantiles(
                    "pdmesh_engine_stage_seconds", "worker", f'machine="transfer_session", state="PUSHING", {WORKER}'
                ),
                "Chunks are pushed while the next ones are computed.",
            ),
            Panel(
                "Computed, waiting for a ticket",
                "s",
                quantiles(
                    "pdmesh_engine_stage_seconds", "worker", f'machine="prefill_request", state="COMPUTED", {WORKER}'
                ),
                "Decode has no blocks yet, or is slow to answer.",
            ),
        ),
    ),
    (
        "Quarantine",
        (
            one(
                "Blocks",
                "short",
                f"sum by (worker, peer) (pdmesh_engine_kv_quarantined_blocks{{{WORKER}}})",
                "By the peer that has not proved that it writes no more.",
                "{{worker}} by {{peer}}",
            ),
            Panel(
                "Time until quiet",
                "s",
                quantiles(
                    "pdmesh_engine_stage_seconds", "worker", f'machine="transfer_session", state="ABORTING", {WORKER}'
                ),
                "How long an aborted session's blocks stay quarantined, or pinned.",
            ),
            one(
                "Aborted sessions",
                "short",
                rate("pdmesh_engine_quarantines_total", "worker", WORKER),
                "Per second, with blocks that a writer might still write.",
                "{{worker}}",
            ),
        ),
    ),
)

REQUESTS = (
    (
        "Service level",
        (
            one(
                "Token 1 within 1 s",
                "percentunit",
                'sum(rate(pdmesh_router_time_to_first_token_seconds_bucket{le="1.0"}[5m]))'
                " / sum(rate(pdmesh_router_time_to_first_token_seconds_count[5m]))",
                "Share of the samples of the last five minutes; the alert's goal is 95 %.",
                kind="stat",
                width=6,
                colours=((None, "red"), (0.9, "orange"), (0.95, "green")),
            ),
            one(
                "Gap within 100 ms",
                "percentunit",
                'sum(rate(pdmesh_router_inter_token_latency_seconds_bucket{le="0.1"}[5m]))'
                " / sum(rate(pdmesh_router_inter_token_latency_seconds_count[5m]))",
                "Share of the tokens of the last five minutes.",
                kind="stat",
                width=6,
                colours=((None, "red"), (0.9, "orange"), (0.95, "green")),
            ),
            one(
                "Succeeded",
                "percentunit",
                'sum(rate(pdmesh_router_requests_total{end="ok"}[5m]))'
                ' / sum(rate(pdmesh_router_requests_total{end!~"invalid|cancelled"}[5m]))',
                "Of the requests that were right and not given up by their clients.",
                kind="stat",
                width=6,
                colours=((None, "red"), (0.99, "orange"), (0.999, "green")),
            ),
            one(
                "Prefilled elsewhere",
                "percentunit",
                'sum(rate(pdmesh_router_samples_total{path="pd"}[5m])) / sum(rate(pdmesh_router_samples_total[5m]))',
                "Share of the samples whose prompt a prefill worker computed.",
                kind="stat",
                width=6,
            ),
        ),
    ),
    (
        "Where the time goes",
        (
            Panel(
                "At the router",
                "s",
                quantiles("pdmesh_router_stage_seconds", "state", 'state=~"QUEUED|PLACING|SENT"'),
                "Waiting for a slot (QUEUED), for a pair (PLACING), for the pair's token 1 (SENT).",
            ),
            Panel(
                "In prefill",
                "s",
                quantiles("pdmesh_engine_stage_seconds", "state", 'machine="prefill_request"'),
                "Time per state, over all prefill workers.",
            ),
            Panel(
                "In decode",
                "s",
                quantiles("pdmesh_engine_stage_seconds", "state", 'machine="decode_request"'),
                "Time per state, over all decode and mixed workers.",
            ),
        ),
    ),
    (
        "What goes wrong",
        (
            one(
                "Requests that failed",
                "reqps",
                rate("pdmesh_router_requests_total", "end", 'end!~"ok|cancelled"'),
                "By how they ended: rejected is 429, broken is an error after the first token.",
                "{{end}}",
                stack=True,
            ),
            one(
                "New attempts",
                "short",
                rate("pdmesh_router_retries_total", "kind"),
                "replan before token 1, resume after it, handover when a healthy worker gave it back.",
                "{{kind}}",
            ),
            one(
                "Why",
                "short",
                rate("pdmesh_router_replans_total", "leg, reason"),
                "The leg that failed, and its reason.",
                "{{leg}} {{reason}}",
            ),
            one(
                "Breakers",
                "short",
                "max by (worker) (pdmesh_router_breaker_state)",
                "0 closed, 1 half-open, 2 open, at the router that is worst off.",
                "{{worker}}",
            ),
            one(
                "Given up on",
                "short",
                rate("pdmesh_router_retries_refused_total", "why"),
                "Failures that might have been tried again: budget, attempts, poison.",
                "{{why}}",
            ),
            one(
                "Ended in engines",
                "short",
                rate("pdmesh_engine_requests_total", "worker, end", 'end!="finished"'),
                "Sessions that failed or were cancelled, by worker.",
                "{{worker}} {{end}}",
            ),
        ),
    ),
)

DASHBOARDS: dict[str, tuple[str, Any, bool]] = {
    "overview": ("pdmesh: the mesh", OVERVIEW, False),
    "workers": ("pdmesh: workers and KV", WORKERS, True),
    "transfer": ("pdmesh: transfer", TRANSFER, True),
    "requests": ("pdmesh: requests and service level", REQUESTS, False),
}
"""By file: title, rows, and whether workers can be chosen."""


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard as Grafana imports it."""
    title, rows, by_worker = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row_title, row in rows:
        panels.append({"id": len(panels) + 1, "type": "row", "title": row_title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        x = height = 0
        for panel in row:
            high = 4 if panel.kind == "stat" else 8
            if x + panel.width > 24:
                x, y = 0, y + height
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": panel.width, "h": high}))
            x, height = x + panel.width, high
        y += height
    return {
        "uid": f"pdmesh-{name}",
        "title": title,
        "tags": ["pdmesh"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "tags": ["pdmesh"], "title": "pdmesh", "asDropdown": True, "includeVars": True,
                   "keepTime": True, "icon": "external link", "targetBlank": False, "tooltip": "", "url": ""}],
        "templating": {"list": [_datasource(), *([_workers()] if by_worker else [])]},
        "panels": panels,
    }  # fmt: skip


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0,
            "refresh": 1, "current": {}, "options": [], "includeAll": False, "multi": False}  # fmt: skip


def _workers() -> dict[str, Any]:
    query = "label_values(pdmesh_worker_state, worker)"
    return {"name": "worker", "label": "Worker", "type": "query", "datasource": _SOURCE, "definition": query,
            "query": {"query": query, "refId": "worker"}, "refresh": 2, "sort": 1, "hide": 0, "includeAll": True,
            "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "options": []}  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps = [{"value": at, "color": colour} for at, colour in panel.colours or ((None, "blue"),)]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [],
    }
    options: dict[str, Any] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    }
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 25 if panel.stack else 8, "showPoints": "never",
            "spanNulls": False, "stacking": {"mode": "normal" if panel.stack else "none", "group": "A"},
        }  # fmt: skip
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [
            {"refId": chr(65 + i), "datasource": _SOURCE, "expr": query, "legendFormat": legend or "__auto",
             "editorMode": "code", "range": True}
            for i, (query, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }  # fmt: skip


def text_of(name: str) -> str:
    """What the file holds."""
    return json.dumps(dashboard(name), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes all files."""
    for name in DASHBOARDS:
        (HERE / f"{name}.json").write_text(text_of(name))


if __name__ == "__main__":
    main()
