"""The very commands that the deployment files hold, started, asked and stopped as the files say.

One mesh made of all three ways runs in CI: they are meant to work side by side. Each way whole is `slow`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.fleet import Fleet, Ports, Service, complete, metrics
from tests.deploy.reading import (
    KUBERNETES,
    PORTS,
    compose_services,
    kustomized,
    of_kind,
    one_unit,
    pod_services,
    unit_services,
)
from tests.support.models import tiny_model

# A busy machine may take a minute to start five processes.
pytestmark = pytest.mark.timeout(360)

Reader = Callable[[Ports, Path, Path], list[Service]]


async def serves_and_stops(ports: Ports, services: Sequence[Service], folder: Path) -> None:
    """Starts the services, asks one completion twice, and stops them: every process ends with 0."""
    async with Fleet(ports, services, folder) as fleet:
        url = f"http://127.0.0.1:{ports.get(PORTS['router'])}"
        await until_placeable(url)
        first, again = [
            await complete(url, prompt="Name three colours.", max_tokens=8, temperature=0, ignore_eos=True)
            for _ in range(2)
        ]
        assert first["usage"]["completion_tokens"] == 8
        assert first["choices"][0]["finish_reason"] == "length"
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        text = await metrics(url)
        assert 'pdmesh_router_samples_total{finish_reason="length",path="pd"} 2.0' in text, "prefilled elsewhere"
        for autoscaler in of_kind(kustomized(KUBERNETES / "overlays" / "production"), "HorizontalPodAutoscaler"):
            role = autoscaler["spec"]["scaleTargetRef"]["name"].removeprefix("pdmesh-")
            (metric,) = autoscaler["spec"]["metrics"]
            told = text if role == "router" else await own_metrics(fleet, role)
            assert told is None or f"\n{metric['pods']['metric']['name']}" in told, "what is scaled by is there"
        notified = {one.service.role: one.notified for one in fleet.running if one.notified is not None}
        for role, manager in notified.items():
            assert manager.seen()[0] == "READY=1", role
            assert "WATCHDOG=1" in manager.seen(), role
            assert "STOPPING=1" not in manager.seen(), role
        codes = await fleet.stop()
        assert all(code == 0 for of_role in codes.values() for code in of_role), codes
        assert all(codes.values()), "there was one of each"
        for role, manager in notified.items():
            assert "STOPPING=1" in manager.seen(), role


async def until_placeable(url: str) -> None:
    """A router that its manager calls ready may still wait for workers."""
    import httpx

    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client, asyncio.timeout(90.0):
        while (await client.get(f"{url}/readiness")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def own_metrics(fleet: Fleet, role: str) -> str | None:
    """What a worker says at the port of metrics that its file names, if it names one."""
    (service,) = [one.service for one in fleet.of(role)]
    ports = [part.partition("=")[2] for part in service.arguments if part.startswith("--metrics-port=")]
    ports += [value for name, value in service.environment.items() if name == "PDMESH_METRICS_PORT"]
    return await metrics(f"http://127.0.0.1:{ports[0]}") if ports else None


def folders(tmp_path: Path, *names: str) -> list[Path]:
    made = [tmp_path / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


async def test_a_mesh_of_all_ways(tmp_path: Path) -> None:
    model, ports = tiny_model(), Ports()
    units, containers, pods = folders(tmp_path, "units", "containers", "pods")
    from_units = {service.role: service for service in unit_services(ports, units, model)}
    in_containers = {service.role: service for service in compose_services(ports, containers, model)}
    in_pods = {service.role: service for service in pod_services(ports, pods, model)}
    # The two Bootstraps of the pods are not started here: all processes of a mesh have to name the same ones.
    same = {n: from_units["decode"].environment[n] for n in ("PDMESH_BOOTSTRAP", "PDMESH_SERVED_MODEL_NAME")}
    prefill = replace(in_pods["prefill"], environment={**in_pods["prefill"].environment, **same})
    mixed = [in_containers["bootstrap"], from_units["decode"], prefill, from_units["router"]]
    await serves_and_stops(ports, mixed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("read", [compose_services, unit_services, pod_services])
async def test_each_way_whole(read: Reader, tmp_path: Path) -> None:
    ports = Ports()
    (folder,) = folders(tmp_path, "files")
    await serves_and_stops(ports, read(ports, folder, tiny_model()), tmp_path)


@pytest.mark.slow
async def test_pods_with_mtls(tmp_path: Path) -> None:
    ports = Ports()
    (folder,) = folders(tmp_path, "files")
    await serves_and_stops(ports, pod_services(ports, folder, tiny_model(), "overlays/production"), tmp_path)


@pytest.mark.slow
async def test_the_whole_mesh_in_one_unit(tmp_path: Path) -> None:
    ports = Ports()
    (folder,) = folders(tmp_path, "files")
    async with Fleet(ports, [one_unit(ports, folder, tiny_model())], tmp_path) as fleet:
        (serve,) = fleet.of("serve")
        url = f"http://127.0.0.1:{ports.get(PORTS['router'])}"
        answer = await complete(url, prompt="Name three colours.", max_tokens=8, temperature=0, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 8, "when it says READY it can place a request"
        assert await serve.stop() == 0
        assert serve.notified is not None
        said = serve.notified.seen()
        assert said.count("READY=1") == said.count("STOPPING=1") == 1 and "WATCHDOG=1" in said
