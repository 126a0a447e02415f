#!/usr/bin/env python3
"""Closed-loop load generator for any OpenAI-compatible server.

Sends N streaming requests, at most C at a time, each with a prompt of about P
tokens and asking for M tokens, then prints one JSON line with throughput,
time to first token (TTFT), inter-token latency (ITL) and errors.

    bench_openai.py --base-url http://127.0.0.1:8000/v1 -n 64 -c 8 -p 128 -m 64

Needs Python 3.9+ and aiohttp, nothing else.

What is measured
  * Every prompt is different text made from a seed, so a prefix cache cannot
    help unless --shared-prefix asks for a common beginning. Repeating a run
    with the same --seed sends the same prompts again: give each repetition its
    own seed unless a warm prefix cache is what you want to see.
  * Prompt length is set by asking the server once (usage.prompt_tokens) how
    many tokens the words used here make; --no-calibrate takes one word as one
    token instead.
  * ignore_eos and stream_options are sent if the server takes them. A server
    that answers 400 or 422 is asked again without them, and the result says
    what was sent. Output tokens come from the usage chunk, else from counting
    the text chunks ("tokens_from" tells which).
  * TTFT runs from just before the request is sent to the first chunk with
    text. ITL is the gap between two chunks with text, so a server that sends
    several tokens in one chunk shows fewer, longer gaps; TPOT, (time from
    first to last text) / (tokens - 1), does not depend on chunking.
  * Throughput is over the wall time of the whole run, ramp-up and tail
    included. Warm-up and calibration requests are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

# Common short words: one token each, with their leading space, in most BPE
# vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state "
    "family student group country problem hand part place case week company "
    "system program question work government number night point home water "
    "room mother area money story fact month lot right study book eye job "
    "word business issue side kind head house service friend father power "
    "hour game line end member law car city community name president team "
    "minute idea body information back parent face level office door health "
    "person art war history party result change morning reason research girl "
    "guy moment air teacher force education foot boy age policy process music "
    "market sense nation plan college interest death course someone "
    "experience behind reach local six remain effect use yeah suddenly early "
    "green small large old young great little different public bad same able "
    "important better black white free real best social only sure low late "
    "hard major strong possible whole special clear recent certain personal "
    "open red difficult available likely short single medical current wrong "
    "private past foreign fine common poor natural significant similar hot "
    "dead central happy serious ready simple left physical general "
    "environmental financial blue democratic dark various entire close legal"
).split()


@dataclasses.dataclass
class Result:
    """What one request gave. Times are in seconds."""

    ok: bool = False
    error: str | None = None
    latency: float = 0.0
    ttft: float | None = None
    gaps: list = dataclasses.field(default_factory=list)
    chunks: int = 0
    span: float = 0.0  # first text chunk to last text chunk
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    def tokens(self) -> int:
        return self.chunks if self.output_tokens is None else self.output_tokens


class Rejected(Exception):
    """The server answered with an HTTP error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


def make_prompt(n_words: int, seed: str, shared_words: int = 0) -> str:
    """n_words of text that depends only on seed; the first shared_words of it
    are the same for every seed."""
    shared_words = min(shared_words, n_words)
    shared, own = random.Random("shared prefix"), random.Random(seed)
    words = [shared.choice(WORDS) for _ in range(shared_words)]
    words += [own.choice(WORDS) for _ in range(n_words - shared_words)]
    return " ".join(words)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0..100), linear between the two nearest ranks."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float], scale: float = 1e3) -> dict:
    """p50, p90, p99 and mean in milliseconds."""
    out: dict = {f"p{q}": percentile(values, q) for q in (50, 90, 99)}
    out["mean"] = sum(values) / len(values) if values else None
    return {k: None if v is None else round(v * scale, 3) for k, v in out.items()}


class Client:
    def __init__(self, session: aiohttp.ClientSession, args: argparse.Namespace) -> None:
        self.session = session
        self.args = args
        self.base = args.base_url.rstrip("/")
        self.url = self.base + ("/chat/completions" if args.api == "chat" else "/completions")
        self.model: str = args.model or ""
        # Fields that not every server takes; probe() drops those refused.
        self.optional: dict = {"stream_options": {"include_usage": True}}
        if not args.no_ignore_eos:
            self.optional["ignore_eos"] = True

    def body(self, prompt: str, max_tokens: int, stream: bool) -> dict:
        body: dict = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.args.temperature,
            "stream": stream,
        }
        if self.args.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body.update(self.optional)
        if not stream:
            body.pop("stream_options", None)
        body.update(self.args.extra_body)
        return body

    async def find_model(self) -> None:
        """Takes the first model that the server lists, unless --model named one."""
        if self.model:
            return
        async with self.session.get(self.base + "/models") as resp:
            if resp.status != 200:
                raise Rejected(resp.status, await resp.text())
            self.model = (await resp.json(content_type=None))["data"][0]["id"]

    async def post(self, prompt: str, max_tokens: int) -> dict:
        """One request without streaming; returns the parsed answer."""
        async with self.session.post(self.url, json=self.body(prompt, max_tokens, False)) as resp:
            if resp.status != 200:
                raise Rejected(resp.status, await resp.text())
            return await resp.json(content_type=None)

    async def probe(self) -> None:
        """Finds which optional fields the server takes; raises if none helps."""
        prompt = make_prompt(4, "probe")
        full = dict(self.optional)
        attempts = [
            full,
            {k: v for k, v in full.items() if k != "ignore_eos"},
            {k: v for k, v in full.items() if k != "stream_options"},
            {},
        ]
        last: str | None = None
        for fields in attempts:
            self.optional = fields
            result = await self.stream(prompt, 2)
            if result.ok:
                return
            last = result.error
            if not (last or "").startswith(("HTTP 400", "HTTP 422")):
                break
        raise RuntimeError(f"the server does not answer a plain request: {last}")

    async def tokens_per_word(self, n_words: int) -> float:
        """How many tokens the server makes of one of our words (1.0 if it does
        not say)."""
        answer = await self.post(make_prompt(n_words, f"calibrate {self.args.seed}"), 1)
        counted = (answer.get("usage") or {}).get("prompt_tokens")
        return counted / n_words if counted else 1.0

    async def stream(self, prompt: str, max_tokens: int) -> Result:
        """One streaming request, timed."""
        out = Result()
        data = json.dumps(self.body(prompt, max_tokens, True)).encode()
        headers = {"Content-Type": "application/json"}
        start = time.perf_counter()
        first = last = 0.0
        try:
            async with self.session.post(self.url, data=data, headers=headers) as resp:
                if resp.status != 200:
                    raise Rejected(resp.status, await resp.text())
                async for raw in resp.content:
                    if not raw.startswith(b"data:"):
                        continue
                    payload = raw[5:].strip()
                    if payload == b"[DONE]":
                        continue
                    event = json.loads(payload)
                    if event.get("error"):
                        raise RuntimeError(str(event["error"])[:300])
                    usage = event.get("usage")
                    if usage:
                        out.prompt_tokens = usage.get("prompt_tokens")
                        out.output_tokens = usage.get("completion_tokens")
                    if not has_text(event):
                        continue
                    now = time.perf_counter()
                    if out.chunks:
                        out.gaps.append(now - last)
                    else:
                        first = now
                    last = now
                    out.chunks += 1
            if not out.chunks and not out.output_tokens:
                raise RuntimeError("the stream ended without a token")
            out.ok = True
        except TimeoutError:
            out.error = f"timed out after {self.args.timeout:g} s"
        except (aiohttp.ClientError, Rejected, RuntimeError, ValueError, OSError) as exc:
            text = str(exc)
            out.error = text if isinstance(exc, Rejected) else f"{type(exc).__name__}: {text}"
        out.latency = time.perf_counter() - start
        if out.chunks:
            out.ttft, out.span = first - start, last - first
        return out


def has_text(event: dict) -> bool:
    """Whether a stream event carries generated text."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


async def run_load(client: Client, prompts: Sequence[str], concurrency: int, max_tokens: int) -> list:
    """Sends every prompt with a fixed number of workers; results in any order."""
    todo = collections.deque(prompts)
    results: list = []

    async def worker() -> None:
        while todo:
            results.append(await client.stream(todo.popleft(), max_tokens))

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(prompts)))))
    return results


def summarize(args: argparse.Namespace, client: Client, results: Sequence[Result], wall: float) -> dict:
    good = [r for r in results if r.ok]
    errors = collections.Counter(r.error for r in results if not r.ok)
    prompt_tokens = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    out_tokens = sum(r.tokens() for r in good)
    all_tokens = out_tokens + sum(prompt_tokens)
    from_usage = sum(r.output_tokens is not None for r in good)
    tpot = [r.span / (r.tokens() - 1) for r in good if r.chunks > 1 and r.tokens() > 1]
    rate = (lambda n: round(n / wall, 3)) if wall > 0 else (lambda n: None)
    return {
        "label": args.label,
        "model": client.model,
        "api": args.api,
        "requests": len(results),
        "concurrency": args.concurrency,
        "prompt_tokens_asked": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "shared_prefix": args.shared_prefix,
        "seed": args.seed,
        "sent": sorted(list(client.optional) + list(args.extra_body)),
        "completed": len(good),
        "errors": len(results) - len(good),
        "error_kinds": dict(errors.most_common(5)),
        "wall_s": round(wall, 4),
        "requests_per_s": rate(len(good)),
        "output_tokens_per_s": rate(out_tokens),
        "total_tokens_per_s": rate(all_tokens) if prompt_tokens else None,
        "prompt_tokens_mean": round(sum(prompt_tokens) / len(prompt_tokens), 2) if prompt_tokens else None,
        "output_tokens_mean": round(out_tokens / len(good), 2) if good else None,
        "stopped_early": sum(r.tokens() < args.max_tokens for r in good),
        "tokens_from": "usage" if good and from_usage == len(good) else ("mixed" if from_usage else "chunks"),
        "ttft_ms": spread([r.ttft for r in good if r.ttft is not None]),
        "itl_ms": spread([g for r in good for g in r.gaps]),
        "tpot_ms": spread(tpot),
        "latency_ms": spread([r.latency for r in good]),
    }


async def bench(args: argparse.Namespace) -> dict:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    # A new connection for each request: one kept open may be closed by the
    # server just as it is used again, which would count as an error.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        client = Client(session, args)
        await client.find_model()
        await client.probe()
        ratio = 1.0 if args.no_calibrate else await client.tokens_per_word(args.prompt_tokens)
        n_words = max(1, round(args.prompt_tokens / ratio))
        shared = round(args.shared_prefix / ratio)

        def prompts(tag: str, count: int) -> list:
            return [make_prompt(n_words, f"{tag} {args.seed} {i}", shared) for i in range(count)]

        if args.warmup:
            await run_load(client, prompts("warm-up", args.warmup), args.concurrency, args.max_tokens)
        work = prompts("measure", args.requests)
        start = time.perf_counter()
        results = await run_load(client, work, args.concurrency, args.max_tokens)
        return summarize(args, client, results, time.perf_counter() - start)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def json_object(text: str) -> dict:
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000/v1", help="with /v1 (default %(default)s)")
    add("--model", help="model name (default: the first one the server lists)")
    add("--api", choices=("completions", "chat"), default="completions", help="endpoint (default %(default)s)")
    add("--api-key", help="sent as a bearer token")
    add("-n", "--requests", type=positive, default=32, help="requests to measure (default %(default)s)")
    add("-c", "--concurrency", type=positive, default=8, help="requests in flight (default %(default)s)")
    add("-p", "--prompt-tokens", type=positive, default=128, help="about this many prompt tokens (default %(default)s)")
    add("-m", "--max-tokens", type=positive, default=64, help="output tokens to ask for (default %(default)s)")
    add(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens at the start that all prompts share (default 0)",
    )
    add("--seed", type=int, default=0, help="chooses the prompts (default 0)")
    add("--warmup", type=int, default=2, help="requests sent first and not counted (default %(default)s)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default 0)")
    add("--no-ignore-eos", action="store_true", help="let the model stop by itself")
    add("--no-calibrate", action="store_true", help="take one word as one token")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields to add to each request")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default %(default)s)")
    add("--label", help="copied into the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        result = asyncio.run(bench(args))
    except (TimeoutError, aiohttp.ClientError, Rejected, RuntimeError, OSError) as exc:
        print(f"bench_openai: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    return 0 if result["errors"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
