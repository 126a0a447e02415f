"""Scraping a live mesh as Prometheus does: /sd names the targets, every target is clean, nothing has no bound."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.mesh.conftest import BLOCK_BYTES, Served
from tests.support.asking import random_prompt, until_async
from tests.support.dashboards import families_named
from tests.support.scraping import Samples, parse, run_promtool, value

pytestmark = pytest.mark.asyncio(loop_scope="session")

JOBS = {
    "bootstrap": "pdmesh-bootstrap", "router": "pdmesh-router",
    "prefill-0": "pdmesh-prefill", "prefill-1": "pdmesh-prefill", "decode-0": "pdmesh-decode",
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        yield client


async def targets(served: Served, http: httpx.AsyncClient) -> dict[str, str]:
    """Address by process, out of /sd."""
    groups = (await http.get(f"{served.mesh.url}/sd")).json()
    found = {}
    for group in groups:
        (address,), labels = group["targets"], group["labels"]
        name = labels["__meta_pdmesh_instance"] or labels["job"].removeprefix("pdmesh-")
        assert labels["job"] == JOBS[name] and labels["__meta_pdmesh_host"]
        found[name] = address
    return found


async def scrape(http: httpx.AsyncClient, address: str) -> Samples:
    answer = await http.get(f"http://{address}/metrics")
    assert answer.status_code == 200
    return parse(answer.text)


async def test_the_router_lists_every_target(llama: Served, http: httpx.AsyncClient) -> None:
    found = await targets(llama, http)
    assert set(found) == set(JOBS)
    assert found["router"] == llama.mesh.url.removeprefix("http://")
    status = await llama.mesh.status()
    ranks = {rank["instance"]: rank["metrics_endpoint"] for rank in status["ranks"]}
    assert ranks == {name: found[name] for name in ("prefill-0", "prefill-1", "decode-0")}
    services = {s["instance"] or s["name"]: s["metrics"] for s in status["services"]}
    assert services == found, "pdmesh status shows the same addresses"


async def test_every_target_is_clean_and_has_what_dashboards_show(llama: Served, http: httpx.AsyncClient) -> None:
    await llama.asker.complete(random_prompt(50, 41), max_tokens=4, ignore_eos=True)
    await llama.mesh.quiet()
    families: set[str] = set()
    for name, address in (await targets(llama, http)).items():
        text = (await http.get(f"http://{address}/metrics")).text
        code, said = await run_promtool("check", "metrics", text=text)
        assert (code, said) == (0, ""), f"{name}: {said}"
        families |= {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
        samples = parse(text)
        service = JOBS[name].removeprefix("pdmesh-")
        assert value(samples, "pdmesh_build_info", service=service) == 1 and value(samples, "process_open_fds") > 3
        assert value(samples, "pdmesh_event_loop_lag_seconds") < 10
    missing = families_named() - families
    assert not missing, f"dashboards or alerts name what nobody serves: {sorted(missing)}"


async def test_a_workers_figures_follow_its_work(llama: Served, http: httpx.AsyncClient) -> None:
    await llama.mesh.quiet()
    addresses = await targets(llama, http)

    async def all_of() -> dict[str, Samples]:
        return {name: await scrape(http, addresses[name]) for name in ("prefill-0", "prefill-1", "decode-0")}

    before = await all_of()
    for seed in (42, 43):  # over each prefill worker once
        await llama.asker.generate(random_prompt(80, seed), max_tokens=5, ignore_eos=True)
    await llama.mesh.quiet()
    after: dict[str, Samples] = {}

    async def moved() -> bool:  # moves come a moment after what they tell of
        after.update(await all_of())
        return grown("decode-0", "pdmesh_engine_stage_seconds_count", machine="decode_request", state="DECODING") == 2

    def grown(name: str, metric: str, **labels: str) -> float:
        return value(after[name], metric, **labels) - value(before[name], metric, **labels)

    await until_async(moved, 10.0, lambda: "two sessions that decoded")
    assert grown("decode-0", "pdmesh_engine_requests_total", end="finished") == 2
    assert grown("decode-0", "pdmesh_engine_output_tokens_total") == 10
    assert grown("decode-0", "pdmesh_engine_steps_total") >= 4
    assert grown("decode-0", "pdmesh_engine_step_seconds_count", kind="decode") >= 4
    for state in ("QUEUED", "AWAITING_START", "AWAITING_KV", "READY"):
        assert grown("decode-0", "pdmesh_engine_stage_seconds_count", machine="decode_request", state=state) == 2
    for name in ("prefill-0", "prefill-1"):
        assert grown(name, "pdmesh_engine_requests_total", end="finished") == 1
        assert grown(name, "pdmesh_engine_prompt_tokens_total") == 80
        assert grown(name, "pdmesh_engine_prefix_cache_query_tokens_total") == 80
        assert grown(name, "pdmesh_engine_prefix_cache_hit_tokens_total") == 0
        assert grown(name, "pdmesh_push_bytes_sum") == grown(name, "pdmesh_link_bytes_total") == 5 * BLOCK_BYTES
        assert grown(name, "pdmesh_push_seconds_count") >= 1
        assert grown(name, "pdmesh_engine_stage_seconds_count", machine="transfer_session", state="PUSHING") == 1
        transport = {"prefill-0": "shm", "prefill-1": "tcp"}[name]
        assert value(after[name], "pdmesh_link_up", peer="decode-0", transport=transport) == 1
    for name, samples in after.items():
        role = "DECODE" if name == "decode-0" else "PREFILL"
        assert value(samples, "pdmesh_engine_requests_running", worker=name, role=role) == 0
        assert value(samples, "pdmesh_worker_state", worker=name, role=role, state="READY") == 1
        assert value(samples, "pdmesh_engine_kv_blocks", worker=name) == 1024
        assert 0 <= value(samples, "pdmesh_worker_lease_age_seconds") < 60
        assert value(samples, "pdmesh_engine_up") == 1 and value(samples, "pdmesh_engine_process_open_fds") > 3


async def test_the_router_and_bootstrap_see_the_mesh(llama: Served, http: httpx.AsyncClient) -> None:
    addresses = await targets(llama, http)
    router, bootstrap = await scrape(http, addresses["router"]), await scrape(http, addresses["bootstrap"])
    for role, count in (("PREFILL", 2), ("DECODE", 1), ("MIXED", 0)):
        assert value(router, "pdmesh_router_workers", role=role, state="READY") == count
        assert value(bootstrap, "pdmesh_bootstrap_rows", role=role, state="READY") == count
    assert value(router, "pdmesh_router_ready") == value(router, "pdmesh_router_bootstrap_contact") == 1
    assert value(router, "pdmesh_router_table_revision") == value(bootstrap, "pdmesh_bootstrap_table_revision")
    leases = {labels["worker"]: v for labels, v in bootstrap["pdmesh_bootstrap_lease_remaining_seconds"]}
    assert set(leases) == {"prefill-0", "prefill-1", "decode-0"} and all(0 < v <= 15 for v in leases.values())
    assert value(bootstrap, "pdmesh_bootstrap_watchers") >= 4


async def test_labels_are_bounded(llama: Served, http: httpx.AsyncClient) -> None:
    """A hundred request ids, models, paths and methods later there is no series more."""

    async def series() -> dict[str, set[str]]:
        found = {}
        for name, address in (await targets(llama, http)).items():
            lines = (await http.get(f"http://{address}/metrics")).text.splitlines()
            found[name] = {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}
        return found

    async def ask(i: int) -> None:
        body = {
            "model": "default",
            "prompt": [5, 6, 7 + i % 50],
            "max_tokens": 1,
            "user": f"user-{i}",
            "cache_salt": f"salt-{i}",
        }
        await http.post(f"{llama.mesh.url}/v1/completions", json=body, headers={"x-request-id": f"request-{i}"})
        await http.post(f"{llama.mesh.url}/v1/completions", json={**body, "model": f"model-{i}"})
        await http.get(f"{llama.mesh.url}/path-{i}")

    await ask(-1)
    await llama.mesh.quiet()
    before = await series()
    for i in range(20):
        await ask(i)
    await llama.mesh.quiet()
    after = await series()
    new = {name: sorted(after[name] - before[name]) for name in after}
    assert all(len(lines) == 0 for lines in new.values()), new
