"""Reads deployment files into Services: compose, systemd units, Kubernetes manifests."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.fleet import DEPLOY, Place, Ports, Service
from tests.support.certificates import Authority, Files

ROLES = ("bootstrap", "prefill", "decode", "router")
PORTS = {"bootstrap": "18800", "prefill": "8001", "decode": "8100", "router": "8000"}
METRICS = "9100"
COMPOSE = DEPLOY / "compose"
UNITS = DEPLOY / "systemd"
KUBERNETES = DEPLOY / "k8s"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


# ---- compose ---------------------------------------------------------------------------------------------------------


def compose_file(name: str = "compose.yaml", variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A compose file with its variables put in."""
    given = variables or {}
    text = _VARIABLE.sub(lambda found: given.get(found[1], found[2] or ""), (COMPOSE / name).read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def compose_services(ports: Ports, folder: Path, model: Path) -> list[Service]:
    """The long-running services; the volumes and secrets that they name lie in `folder`."""
    place = Place(ports)
    (folder / "token").write_text("of-the-mesh-" * 4)
    document = compose_file(variables={"PDMESH_MODEL": "/models/tiny", "PDMESH_MODELS_DIR": str(folder / "models")})
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(model)
    place.names.update({PORTS[role]: place.ports.get(PORTS[role]) for role in ROLES})
    place.names.update({f"{role}:{PORTS[role]}": f"127.0.0.1:{place.ports.get(PORTS[role])}" for role in ROLES})
    services = []
    for role in ROLES:
        service = document["services"][role]
        place.names.update({f"/run/secrets/{secret}": str(folder / "token") for secret in service["secrets"]})
        for volume in service.get("volumes", []):
            source = folder / volume["source"] if volume["type"] == "volume" else Path(volume["source"])
            source.mkdir(mode=0o700, exist_ok=True)
            place.names[volume["target"]] = str(source)
        environment = {n: str(v) for n, v in service["environment"].items()}
        if "PDMESH_METRICS_PORT" in environment:
            environment["PDMESH_METRICS_PORT"] = place.ports.get(METRICS, role)
        kind, program, *probe = service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "pdmesh")
        grace = seconds(service["stop_grace_period"])
        services.append(Service(role, tuple(service["command"]), environment, (tuple(probe),), grace))
    return [place.service(service) for service in services]


def seconds(text: str) -> float:
    """Of compose's and systemd's durations: 150s, 10m, 90."""
    number, unit = re.fullmatch(r"([\d.]+)(s|m|min|h|)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "": 1, "m": 60, "min": 60, "h": 3600}[unit]


# ---- systemd ---------------------------------------------------------------------------------------------------------


def unit_file(path: Path, instance: str = "") -> dict[str, list[str]]:
    """The settings of a unit, whatever section they stand in; an empty value resets a list, as systemd does."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if line.startswith(("#", ";", "[")) or not equals:
            continue
        if value:
            found[name].append(value.replace("%i", instance))
        else:
            found[name].clear()
    return dict(found)


def unit_services(ports: Ports, folder: Path, model: Path) -> list[Service]:
    """One of each service's unit, with the environment file that the guide gives."""
    place, services = _unit_place(ports, folder, model), []
    for role in ROLES:
        template = role in ("prefill", "decode")
        unit = unit_file(UNITS / f"pdmesh-{role}{'@' if template else ''}.service", PORTS[role] if template else "")
        services.append(_unit_service(place, role, unit))
    return services


def _unit_place(ports: Ports, folder: Path, model: Path) -> Place:
    """A host with that file and the token."""
    place = Place(ports)
    etc, run, state = folder / "etc", folder / "run", folder / "state"
    for made in (etc, run, state):
        made.mkdir(mode=0o700)
    (etc / "mesh-token").write_text("of-the-mesh-" * 4)
    example = (UNITS / "pdmesh.env.example").read_text()
    numbers = {PORTS[role]: ports.get(PORTS[role]) for role in ROLES}
    (etc / "pdmesh.env").write_text(
        example.replace("PDMESH_MODEL=demo", f"PDMESH_MODEL={model}")
        + f"PDMESH_SERVED_MODEL_NAME=tiny\nPDMESH_BOOTSTRAP=127.0.0.1:{numbers['18800']}\n"
    )
    place.names.update(numbers | {"/etc/pdmesh": str(etc), "/run/pdmesh": str(run), "/var/lib/pdmesh": str(state)})
    return place


def one_unit(ports: Ports, folder: Path, model: Path) -> Service:
    """The unit that holds the whole mesh, in the same place."""
    place = _unit_place(ports, folder, model)
    return _unit_service(place, "serve", unit_file(UNITS / "pdmesh.service"))


def _unit_service(place: Place, role: str, unit: Mapping[str, Sequence[str]]) -> Service:
    (command,) = unit["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program == "/opt/pdmesh/bin/pdmesh"
    environment = dict(pair.split("=", 1) for line in unit["Environment"] for pair in shlex.split(line))
    for file in unit["EnvironmentFile"]:
        environment |= _environment_file(Path(place.here(file.removeprefix("-"))), needed=not file.startswith("-"))
    service = Service(
        role,
        tuple(place.ports.get(METRICS, role) if argument == METRICS else argument for argument in arguments),
        environment,
        grace=seconds(unit["TimeoutStopSec"][0]),
        watchdog=seconds(unit["WatchdogSec"][0]),
    )
    return place.service(service)


def _environment_file(path: Path, *, needed: bool) -> dict[str, str]:
    if not path.exists():
        assert not needed, f"{path} is missing"
        return {}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of a folder."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: Iterable[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """Those of some kinds."""
    return [document for document in documents if document["kind"] in kinds]


def workloads(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What has pods."""
    return of_kind(documents, "Deployment", "StatefulSet", "DaemonSet", "Job")


def pod_services(ports: Ports, folder: Path, model: Path, where: str = "base") -> list[Service]:
    """Every Bootstrap, and one pod of each Deployment, with the Secrets that the guide has made."""
    place = Place(ports)
    documents = kustomized(KUBERNETES / where)
    data = {document["metadata"]["name"]: document["data"] for document in of_kind(documents, "ConfigMap")}
    for name in ("mesh", "models", "state", "tmp"):
        (folder / name).mkdir()
    (folder / "mesh" / "token").write_text("of-the-mesh-" * 4)
    (folder / "models" / "model").symlink_to(model)
    for certificate in of_kind(documents, "Certificate"):
        files = Files(folder / "certificates")
        files.certify(Authority(), *certificate["spec"]["dnsNames"])
        (folder / "tls").symlink_to(files.cert.parent)
    place.names.update({PORTS[role]: place.ports.get(PORTS[role]) for role in ROLES if role != "bootstrap"})
    services = []
    for workload in sorted(workloads(documents), key=lambda one: one["metadata"]["name"] != "pdmesh-bootstrap"):
        name, spec = workload["metadata"]["name"], workload["spec"]["template"]["spec"]
        for number in range(workload["spec"]["replicas"] if workload["kind"] == "StatefulSet" else 1):
            pod = f"{name}-{number}"
            if workload["kind"] == "StatefulSet":
                host = f"{pod}.{workload['spec']['serviceName']}"
                place.names[f"{host}:{PORTS['bootstrap']}"] = f"127.0.0.1:{place.ports.get(PORTS['bootstrap'], pod)}"
            services.append(_pod(place, folder, spec, pod, data))
    return [place.service(service) for service in services]


def _pod(place: Place, folder: Path, spec: dict[str, Any], pod: str, data: dict[str, dict[str, str]]) -> Service:
    (container,) = spec["containers"]
    fields = {"metadata.name": pod, "status.podIP": "127.0.0.1"}
    environment: dict[str, str] = {}
    for source in container["envFrom"]:
        environment |= data[source["configMapRef"]["name"]]
    own = {entry["name"]: fields[entry["valueFrom"]["fieldRef"]["fieldPath"]] for entry in container.get("env", [])}
    for mount in container["volumeMounts"]:
        place.names[mount["mountPath"]] = str(folder / mount["name"])
    arguments = tuple(
        argument.replace(f"--metrics-port={METRICS}", f"--metrics-port={place.ports.get(METRICS, pod)}").replace(
            f"--port={PORTS['bootstrap']}", f"--port={place.ports.get(PORTS['bootstrap'], pod)}"
        )
        for argument in (
            re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], argument) for argument in container["args"]
        )
    )
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    if "bootstrap" in pod:
        ports["grpc"] = place.ports.get(PORTS["bootstrap"], pod)
    probes = tuple(_probe(container[kind], ports) for kind in ("startupProbe", "livenessProbe", "readinessProbe"))
    role = arguments[0]
    return Service(role, arguments, environment | own, probes, float(spec["terminationGracePeriodSeconds"]))


def _probe(probe: dict[str, Any], ports: Mapping[str, str]) -> tuple[str, ...]:
    """The probe as `pdmesh health` would ask it."""
    if "httpGet" in probe:
        return ("health", f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}")
    if "exec" in probe:
        program, *command = probe["exec"]["command"]
        assert program == "pdmesh"
        return tuple(part.replace(f"127.0.0.1:{PORTS['bootstrap']}", f"127.0.0.1:{ports['grpc']}") for part in command)
    service = probe["grpc"].get("service", "")
    return ("health", f"127.0.0.1:{ports['grpc']}", *([f"--service={service}"] if service else []))
