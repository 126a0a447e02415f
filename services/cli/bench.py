"""`pdmesh bench`: a load test of any OpenAI-compatible server, and two results against each other."""

from __future__ import annotations

import random
import resource
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from engine_core.types.errors import ConfigError
from services.bench.arrivals import Arrival, read_trace
from services.bench.client import Client, Connection, base_url
from services.bench.lengths import parse_lengths
from services.bench.live import watch
from services.bench.outcome import Objectives
from services.bench.page import compare_page, result_page
from services.bench.plan import RunOptions, levels
from services.bench.report import Report, compare, read_report, to_json
from services.bench.runner import Runner
from services.bench.tally import Tally
from services.bench.text import show, show_changes
from services.bench.workload import Shape
from services.cli.status import wide_console
from services.config import QueryConfig, load
from services.runtime.api_keys import key_to_send, read_keys
from services.runtime.tasks import Stop, TaskOwner, run

_SPARE_DESCRIPTORS = 64
_SECRETS = ("--api-key",)
_HIDDEN = "HIDDEN"

_HELP = """Load-test an OpenAI-compatible server and report TTFT, ITL, throughput and goodput.

A closed loop (--concurrency) keeps so many requests in flight; it shows what the server can do. An open loop (--rate,
or --trace) sends requests when they are due, whether or not earlier ones have ended; it shows what users would see at
that load. There, TTFT and latency count from the moment a request was due, so that no wait is left out.

Examples:

  pdmesh bench --concurrency 1,4,16 --prompt-tokens 128 --output-tokens 64 --html result.html

  pdmesh bench --rate 1,2,4 --duration 60 --prompt-tokens mix:128@0.8,1024@0.2 --slo-ttft 1000 --slo-itl 100

  pdmesh bench --trace day.jsonl --trace-speed 1,2 --json day.json

  pdmesh bench compare before.json after.json --html change.html
"""


def add_commands(app: typer.Typer) -> None:
    """Adds `bench` and `bench compare`."""
    bench = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
    bench.callback(invoke_without_command=True, help=_HELP)(_bench)
    bench.command("compare")(_compare)
    app.add_typer(bench, name="bench", short_help="Load-test an OpenAI-compatible server; compare two results.")


def _option(text: str, metavar: str | None = None, default: str = "") -> Any:
    shown = f"{text} [default: {default}]" if default else text
    return typer.Option(help=shown, metavar=metavar, show_default=False)


def _bench(
    ctx: typer.Context,
    *,
    url: Annotated[str, _option("Address of the server, with or without /v1", "URL", "http://127.0.0.1:8000")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, _option("Model to ask for", "NAME", "the first that the server lists")] = "",
    endpoint: Annotated[str, _option("/v1/completions or /v1/chat/completions", "completions|chat", "completions")] = (
        "completions"
    ),
    concurrency: Annotated[str, _option("Closed loop: requests in flight, one level each", "N,N,…", "1,4,16")] = "",
    rate: Annotated[str, _option("Open loop: requests per second, one level each", "R,R,…")] = "",
    arrival: Annotated[Arrival, _option("How arrivals of --rate are spread", "poisson|bursts|constant", "poisson")] = (
        Arrival.POISSON
    ),
    burst_size: Annotated[int, _option("Requests that arrive together with --arrival bursts", "N", "8")] = 8,
    trace: Annotated[
        Path | None,
        _option(
            "Open loop from a file: a JSON object a line with timestamp (seconds), prompt_tokens, output_tokens, and "
            "perhaps prefix_group",
            "FILE",
        ),
    ] = None,
    trace_speed: Annotated[str, _option("How many times as fast as the trace, one level each", "X,X,…", "1")] = "1",
    requests: Annotated[
        int | None, _option("Requests of each level", "N", "closed loop: 8 for each in flight, at least 32")
    ] = None,
    duration: Annotated[
        float | None,
        _option("Seconds in which each level sends; what is running then still counts", "SECONDS", "--rate: 30"),
    ] = None,
    prompt_tokens: Annotated[
        str, _option("Prompt lengths: 128, uniform:64-512 or mix:128@0.8,1024@0.2", "TOKENS", "128")
    ] = "128",
    output_tokens: Annotated[str, _option("Output tokens to ask for, in the same forms", "TOKENS", "64")] = "64",
    shared_prefix: Annotated[
        int, _option("Tokens at the start that all prompts of a group share, part of --prompt-tokens", "TOKENS", "0")
    ] = 0,
    prefix_groups: Annotated[int, _option("Groups, each with another shared prefix", "K", "1")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option(help="Whether outputs get their full length [default: yes]", show_default=False)
    ] = True,
    temperature: Annotated[float, _option("Sampling temperature", "T", "0")] = 0.0,
    extra_body: Annotated[str, _option("More fields of each request", "JSON")] = "",
    warmup: Annotated[int, _option("Requests before each level that are not counted", "N", "2")] = 2,
    slo_ttft: Annotated[float | None, _option("Objective: time to first token", "MS")] = None,
    slo_itl: Annotated[float | None, _option("Objective: 99th percentile of a request's own gaps", "MS")] = None,
    slo_tpot: Annotated[float | None, _option("Objective: a request's mean time per output token", "MS")] = None,
    slo_e2e: Annotated[float | None, _option("Objective: the whole request", "MS")] = None,
    slo_share: Annotated[
        float, _option("Share of requests that must be good for a load to count as carried", "SHARE", "0.9")
    ] = 0.9,
    retry_429: Annotated[
        bool, typer.Option("--retry-429", help="Send again after the Retry-After of a 429; the wait counts")
    ] = False,
    max_in_flight: Annotated[
        int, _option("Open loop: most requests in flight; the others wait, and the wait counts", "N", "no limit")
    ] = 0,
    keep_alive: Annotated[
        bool, typer.Option("--keep-alive", help="Use connections again; else each request opens one, in its TTFT")
    ] = False,
    timeout: Annotated[float, _option("Seconds that a request may take", "SECONDS", "600")] = 600.0,
    seed: Annotated[
        int | None,
        _option(
            "Chooses arrivals, lengths and prompts. The same seed sends the same prompts: a server that has seen them "
            "finds them in its prefix cache",
            "N",
            "another one each time, in the result",
        ),
    ] = None,
    api_key: Annotated[str, _option("Sent as a bearer token", "KEY")] = "",
    api_key_file: Annotated[Path | None, _option("File with the key, which then shows in no process list", "FILE")] = (
        None
    ),
    ca: Annotated[Path | None, _option("PEM file with the authority of the server's certificate", "FILE")] = None,
    label: Annotated[str, _option("Name of this run in reports", "TEXT")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result; - is standard output", metavar="FILE")
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="With every single request in the JSON file")] = False,
    html: Annotated[Path | None, _option("Write one page with plots; it needs nothing else", "FILE")] = None,
) -> int:
    if ctx.invoked_subcommand is not None:
        return 0
    if sum(bool(x) for x in (concurrency, rate, trace)) > 1:
        raise ConfigError("--concurrency, --rate and --trace are three kinds of load: give one of them")
    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"--endpoint {endpoint!r}: there are completions and chat")
    if api_key and api_key_file:
        raise ConfigError("--api-key and --api-key-file: give one of them")
    for option, value, least in (
        ("--burst-size", burst_size, 1), ("--requests", requests, 1), ("--shared-prefix", shared_prefix, 0),
        ("--prefix-groups", prefix_groups, 1), ("--warmup", warmup, 0), ("--max-in-flight", max_in_flight, 0),
        ("--temperature", temperature, 0),
    ):  # fmt: skip
        if value is not None and value < least:
            raise ConfigError(f"{option} must be {least} or more, not {value}")
    for option, seconds in (
        ("--duration", duration), ("--timeout", timeout), ("--slo-ttft", slo_ttft), ("--slo-itl", slo_itl),
        ("--slo-tpot", slo_tpot), ("--slo-e2e", slo_e2e), ("--slo-share", slo_share),
    ):  # fmt: skip
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"{option} must be above 0, not {seconds:g}")
    if slo_share > 1:
        raise ConfigError(f"--slo-share is a share of 1, not {slo_share:g}")
    shape = Shape(
        parse_lengths(prompt_tokens, "--prompt-tokens"),
        parse_lengths(output_tokens, "--output-tokens"),
        shared_prefix,
        prefix_groups,
        random.randrange(1_000_000) if seed is None else seed,
    )
    options = RunOptions(
        shape=shape,
        concurrency=tuple(map(int, _numbers(concurrency or "1,4,16", "--concurrency", whole=True))),
        rates=tuple(_numbers(rate, "--rate")) if rate else (),
        arrival=arrival,
        burst_size=burst_size,
        trace=tuple(read_trace(trace)) if trace else (),
        trace_name=str(trace or ""),
        trace_speeds=tuple(_numbers(trace_speed, "--trace-speed")),
        requests=requests,
        duration=duration,
        warmup=warmup,
        max_in_flight=max_in_flight,
        retry_429=retry_429,
        timeout=timeout,
        objectives=Objectives(slo_ttft, slo_itl, slo_tpot, slo_e2e, slo_share),
        rows=rows,
    )
    connection = Connection(
        url=base_url(url),
        model=model,
        endpoint=endpoint,
        api_key=_key(api_key, api_key_file),
        ca=ca,
        timeout=timeout,
        keep_alive=keep_alive,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=_json_object(extra_body),
    )
    return _run(Job(options, connection, label, _command_line(sys.argv)), json_file, html)


@dataclass(frozen=True)
class Job:
    """A run and its names."""

    options: RunOptions
    connection: Connection
    label: str = ""
    command: str = ""


def _run(job: Job, json_file: Path | None, html: Path | None) -> int:
    for file in (json_file, html):
        if file is not None and str(file) != "-" and not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} to write {file.name} to")
    levels(job.options)  # a wrong one shows before anything is sent
    _allow_connections(job.options)
    report = run(lambda stop: measure(job, Console(stderr=True, highlight=False), stop))
    to_stdout = json_file is not None and str(json_file) == "-"
    if json_file is not None:
        if to_stdout:
            sys.stdout.write(to_json(report).decode())
        else:
            json_file.write_bytes(to_json(report))
    if html is not None:
        html.write_text(result_page(report), encoding="utf-8")
    if report.levels:
        show(report, Console(stderr=True, highlight=False) if to_stdout else wide_console())
    if report.interrupted:
        return 130
    return 1 if report.failed else 0


async def measure(job: Job, console: Console, stop: Stop) -> Report:
    """Runs the load and shows its course on `console`. Raises UnavailableError when the server does not answer."""
    options, tally, owner = job.options, Tally(), TaskOwner("bench view")
    started = datetime.now(UTC)
    run_id = f"bench-{random.randrange(1 << 32):08x}"
    async with Client(job.connection) as client:
        calibration = await client.prepare()
        title = f"pdmesh bench · {client.target.url} · {client.target.model} · {client.target.endpoint}"
        owner.spawn(watch(tally, title, console), "view")
        try:
            found = await Runner(client, options, calibration, tally, run_id, stop).run()
        finally:
            await owner.close()
        return Report(
            label=job.label,
            started=started.isoformat(timespec="seconds"),
            version=version("pdmesh"),
            command=job.command,
            loop=options.loop,
            load_name=options.load_name,
            load_unit=options.load_unit,
            target=client.target,
            workload=_workload(job) | {"tokens_per_word": round(calibration.per_word, 4)},
            objectives=options.objectives,
            levels=tuple(found),
            interrupted=stop.draining.is_set(),
        )


def _workload(job: Job) -> dict[str, Any]:
    o, c, traced = job.options, job.connection, bool(job.options.trace)
    return {
        "prompt_tokens": "by trace" if traced else o.shape.prompt_tokens.text,
        "output_tokens": "by trace" if traced else o.shape.output_tokens.text,
        "shared_prefix": o.shape.shared_prefix,
        "prefix_groups": o.shape.prefix_groups,
        "seed": o.shape.seed,
        "requests": o.requests,
        "duration_s": o.duration,
        "warmup": o.warmup,
        "arrival": str(o.arrival) if o.rates else None,
        "burst_size": o.burst_size if o.rates and o.arrival is Arrival.BURSTS else None,
        "trace": o.trace_name or None,
        "max_in_flight": o.max_in_flight,
        "retry_429": o.retry_429,
        "keep_alive": c.keep_alive,
        "ignore_eos": c.ignore_eos,
        "temperature": c.temperature,
        "timeout_s": c.timeout,
        "extra_body": dict(c.extra_body),
    }


def _compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Result of `pdmesh bench --json`")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another one, over the same loads")],
    html: Annotated[Path | None, _option("Write one page with plots of both", "FILE")] = None,
) -> int:
    """Show two results against each other."""
    a, b = read_report(before), read_report(after)
    changes = compare(a, b)
    if html is not None:
        html.write_text(compare_page(a, b, changes), encoding="utf-8")
    show_changes(a, b, changes, wide_console())
    return 0


def _numbers(text: str, option: str, *, whole: bool = False) -> list[float]:
    """A list like 1,4,16."""
    found: list[float] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e9 or (whole and value != int(value)):
            raise ConfigError(f"{option} {text!r}: {part!r} is no {'whole ' if whole else ''}number above 0")
        found.append(value)
    return list(dict.fromkeys(found))


def _json_object(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--extra-body must be a JSON object: {exc}") from None


def _key(key: str, file: Path | None) -> str:
    """The key that options name, else the environment (as commands that ask a mesh take it). Raises ConfigError."""
    if key:
        return key
    if file is not None:
        return read_keys(file)[0]
    known = load(QueryConfig)
    return key_to_send(known.api_key, known.api_key_file)


def _command_line(arguments: list[str]) -> str:
    """The command as it was given, without the key."""
    shown, hide = ["pdmesh"], False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        shown.append(_HIDDEN if hide else f"{name}={_HIDDEN}" if equals and name in _SECRETS else argument)
        hide = not hide and argument in _SECRETS
    return shlex.join(shown)


def _allow_connections(options: RunOptions) -> None:
    """Raises the limit of open files to what the run may need, as far as this user may. Raises ConfigError."""
    needed = max(options.concurrency) if options.loop == "closed" else options.max_in_flight or 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if options.loop == "closed" and limit < wanted:
        raise ConfigError(f"--concurrency {needed} needs {wanted} open files; this user may have {hard} (ulimit -Hn)")
