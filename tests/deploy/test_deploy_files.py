"""Deployment files by their schemas and by the tools of those who read them, and against each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.deploy.fleet import DEPLOY, PDMESH, ROOT
from tests.deploy.reading import (
    COMPOSE,
    KUBERNETES,
    ROLES,
    UNITS,
    compose_file,
    kustomized,
    of_kind,
    seconds,
    unit_file,
    workloads,
)

BIN = Path(sys.executable).parent
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())
OPERATORS = {"ServiceMonitor", "Certificate"}
"""Kinds that operators add to a cluster: no schema of Kubernetes' own."""
MESH_UNITS = sorted(path.name for path in UNITS.glob("*.service"))
EXPOSURE = 2.0
"""Of ten, by `systemd-analyze security`."""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def test_yaml_is_clean() -> None:
    done = run(BIN / "yamllint", "--strict", "--config-file", DEPLOY / ".yamllint", DEPLOY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- compose ---------------------------------------------------------------------------------------------------------


def test_compose_files_fit_the_specification() -> None:
    files = sorted(COMPOSE.glob("compose*.yaml"))
    assert [file.name for file in files] == ["compose.ascend.yaml", "compose.cuda.yaml", "compose.yaml"]
    done = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_services() -> None:
    document = compose_file()
    assert set(document["services"]) == {*ROLES, "fetch"}
    for role in ROLES:
        service = document["services"][role]
        assert service["command"][0] == role
        assert service["restart"] == "unless-stopped"
        assert seconds(service["stop_grace_period"]) > float(service["environment"]["PDMESH_DRAIN_TIMEOUT"])
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["secrets"] == ["mesh-token"]
    assert [s for s in ROLES if "ports" in document["services"][s]] == ["router"], "the mesh stays among itself"
    assert document["services"]["router"]["ports"] == ["127.0.0.1:8000:8000"]
    meeting = [{v["target"] for v in document["services"][role]["volumes"]} for role in ("prefill", "decode")]
    where = {document["services"][role]["environment"]["PDMESH_SOCKET_DIR"] for role in ("prefill", "decode")}
    assert len(where) == 1 and where <= meeting[0] & meeting[1], "they meet in one volume to share memory"
    # Down in reverse order of dependence: the router drains first, Bootstrap goes last.
    assert set(document["services"]["router"]["depends_on"]) == {"bootstrap", "prefill", "decode"}
    assert all(set(document["services"][r]["depends_on"]) == {"bootstrap"} for r in ("prefill", "decode"))


def test_the_variables_of_compose_are_told() -> None:
    used = set(re.findall(r"\$\{(\w+)", (COMPOSE / "compose.yaml").read_text()))
    told = set(re.findall(r"^#?(PDMESH_\w+)=", (COMPOSE / ".env.example").read_text(), re.MULTILINE))
    assert used == told


def test_the_image() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    assert [name for _, name in stages] == ["base", "source", "cpu", "cuda", "ascend"]
    copied = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]]
    sources = [source for source in copied if not source.startswith("--")]
    allowed = {line[1:] for line in (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert set(sources) == allowed
    assert all((ROOT / source).exists() for source in sources)
    assert text.count("USER 10001:10001") == text.count("ENTRYPOINT") == 3, "nothing runs as root"
    for file in ("compose.yaml", "compose.cuda.yaml", "compose.ascend.yaml"):
        (target,) = set(re.findall(r"target: (cpu|cuda|ascend)$", (COMPOSE / file).read_text(), re.MULTILINE))
        assert f"pdmesh:{target}" in (COMPOSE / file).read_text()
    assert run("bash", "-n", COMPOSE / "with-cann").returncode == 0


@pytest.mark.slow
def test_what_the_image_installs_is_whole(tmp_path: Path) -> None:
    """The wheel that `pip install /src` makes has all that a process needs."""
    source = tmp_path / "src"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("engine_core", "models", "services", "protos/gen"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    done = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", source)
    assert done.returncode == 0, done.stderr
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    packaged = {name for name in files if name.split("/")[0] in ("engine_core", "models", "services")}
    missing = {name for name in packaged if not (tmp_path / "site" / name).is_file()}
    assert not missing
    assert (tmp_path / "site" / "pdmesh" / "bootstrap" / "v1").is_dir(), "generated code is there"


# ---- systemd ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units as they would lie in /etc/systemd/system, with the program where it is here."""
    folder = tmp_path_factory.mktemp("units")
    for path in [*UNITS.glob("*.service"), *UNITS.glob("*.target")]:
        text = path.read_text().replace("/opt/pdmesh/bin/pdmesh", str(PDMESH))
        (folder / path.name).write_text(text)
        if "@" in path.name:
            (folder / path.name.replace("@", "@8100")).write_text(text)
    return folder


@pytest.mark.parametrize("drop_in", ["", "cuda.conf", "ascend.conf"])
def test_systemd_verifies_every_unit(installed: Path, tmp_path: Path, drop_in: str) -> None:
    here = tmp_path / "units"
    shutil.copytree(installed, here)
    if drop_in:
        for template in [*here.glob("*@.service"), here / "pdmesh.service"]:
            (here / f"{template.name}.d").mkdir()
            shutil.copy(UNITS / "drop-ins" / drop_in, here / f"{template.name}.d")
    done = run("systemd-analyze", "verify", *sorted(path for path in here.iterdir() if path.is_file()))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_broken_unit_would_be_found(installed: Path, tmp_path: Path) -> None:
    text = (installed / "pdmesh-router.service").read_text()
    broken = tmp_path / "pdmesh-router.service"
    broken.write_text(text.replace("WatchdogSec=30", "WatchdogSecs=30"))
    assert "WatchdogSecs" in run("systemd-analyze", "verify", broken).stderr


def test_units_are_hardened(installed: Path) -> None:
    found = {}
    for path in sorted(installed.glob("*[a-z0-9].service")):
        done = run("systemd-analyze", "security", "--offline=true", "--no-pager", path)
        (level,) = re.findall(r"exposure level for \S+: ([\d.]+)", done.stdout)
        found[path.name] = float(level)
    assert len(found) == len(MESH_UNITS) and max(found.values()) <= EXPOSURE, found


def test_what_units_have_in_common() -> None:
    assert MESH_UNITS == [
        "pdmesh-bootstrap.service",
        "pdmesh-decode@.service",
        "pdmesh-prefill@.service",
        "pdmesh-router.service",
        "pdmesh.service",
    ]
    for name in MESH_UNITS:
        unit = unit_file(UNITS / name)
        (drain,) = re.findall(r"--drain-timeout (\d+)", unit["ExecStart"][0]) or ["0"]
        assert seconds(unit["TimeoutStopSec"][0]) > float(drain)
        assert unit["Type"] == ["notify"] and unit["NotifyAccess"] == ["main"] and unit["WatchdogSec"] == ["30"]
        assert unit["KillMode"] == ["mixed"], "an engine must not be signalled beside its service process"
        assert unit["RestartPreventExitStatus"] == ["2"] and unit["Restart"] == ["on-failure"]
        alone = name == "pdmesh.service"
        assert unit["WantedBy"] == ["multi-user.target" if alone else "pdmesh.target"]
        assert unit.get("PartOf", []) == ([] if alone else ["pdmesh.target"])


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def valid(documents: Iterable[dict[str, Any]]) -> None:
    """Every object by the schema of its kind, unknown fields refused."""
    for document in documents:
        if document["kind"] not in OPERATORS:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def by_labels(documents: Iterable[dict[str, Any]], selector: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod templates that a selector finds."""
    labels = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    found = []
    for workload in workloads(documents):
        own = workload["spec"]["template"]["metadata"]["labels"]
        expressions = selector.get("matchExpressions", [])
        if labels.items() <= own.items() and all(own.get(e["key"]) in e["values"] for e in expressions):
            found.append(workload["spec"]["template"])
    return found


def port_names(template: dict[str, Any]) -> set[str]:
    return {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}


@pytest.mark.parametrize("where", ["base", *(f"overlays/{name}" for name in OVERLAYS)])
def test_manifests(where: str) -> None:
    documents = kustomized(KUBERNETES / where)
    valid(documents)
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert {"pdmesh-router", "pdmesh-prefill", "pdmesh-decode", "pdmesh-bootstrap"} == {
        document["metadata"]["name"] for document in workloads(documents)
    }
    assert all(d["metadata"].get("namespace") == "pdmesh" for d in documents if d["kind"] != "Namespace")
    for workload in workloads(documents):
        pods_are_sound(workload, names, documents)
    for service in of_kind(documents, "Service"):
        (template,) = by_labels(documents, service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= port_names(template)
    for budget in of_kind(documents, "PodDisruptionBudget"):
        assert len(by_labels(documents, budget["spec"]["selector"])) == 1
    for policy in of_kind(documents, "NetworkPolicy"):
        policy_is_sound(policy, documents)
    for scaler in of_kind(documents, "HorizontalPodAutoscaler"):
        assert ("Deployment", scaler["spec"]["scaleTargetRef"]["name"]) in names
    for monitor in of_kind(documents, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [s for s in of_kind(documents, "Service") if wanted.items() <= s["metadata"]["labels"].items()]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def pods_are_sound(workload: dict[str, Any], names: set[tuple[str, str]], documents: list[dict[str, Any]]) -> None:
    template = workload["spec"]["template"]
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert len(by_labels(documents, workload["spec"]["selector"])) == 1
    assert spec["enableServiceLinks"] is False, "PDMESH_…_SERVICE_HOST would be taken for an unknown option"
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"] is True
    (source,) = container["envFrom"]
    (config,) = [d for d in of_kind(documents, "ConfigMap") if d["metadata"]["name"] == source["configMapRef"]["name"]]
    wait = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = 0.0 if container["args"][0] == "bootstrap" else float(config["data"]["PDMESH_DRAIN_TIMEOUT"])
    assert spec["terminationGracePeriodSeconds"] > drain + wait
    mounted, volumes = ({item["name"] for item in items} for items in (container["volumeMounts"], spec["volumes"]))
    assert mounted <= volumes
    startup, liveness, readiness = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
    for probe in (startup, liveness, readiness):
        port = probe.get("grpc", probe.get("httpGet", {})).get("port", "")
        numbers = {p["containerPort"] for p in container["ports"]}
        assert "exec" in probe or port in port_names(template) | numbers
    assert how(liveness) == how(startup) != how(readiness), "what is not ready is not dead"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 60


def how(probe: dict[str, Any]) -> Any:
    """What a probe asks, without how often."""
    return {kind: probe[kind] for kind in ("grpc", "httpGet", "exec") if kind in probe}


def policy_is_sound(policy: dict[str, Any], documents: list[dict[str, Any]]) -> None:
    selected = by_labels(documents, policy["spec"]["podSelector"])
    assert selected
    for rule in policy["spec"].get("ingress", []):
        for peer in rule.get("from", []):
            assert "namespaceSelector" in peer or by_labels(documents, peer["podSelector"])
        for port in rule["ports"]:
            names = set().union(*map(port_names, selected))
            assert isinstance(port["port"], int) or port["port"] in names


def test_what_an_unknown_field_does() -> None:
    (router,) = [d for d in workloads(kustomized(KUBERNETES / "base")) if d["metadata"]["name"] == "pdmesh-router"]
    router["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        valid([router])


def test_mtls_probes_by_command_and_all_pods_have_the_certificate() -> None:
    documents = kustomized(KUBERNETES / "overlays" / "production")
    for workload in workloads(documents):
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tls"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert "grpc" not in container[kind], "kubelet's gRPC probes know no TLS"
            command = container[kind].get("exec", {}).get("command", [])
            files = [part.partition("=")[2] for part in command if part.startswith(("--tls-c", "--tls-k"))]
            assert all(file.startswith(mount) for file in files)
            assert len(files) == (0 if "httpGet" in container[kind] else 3)
    (config,) = of_kind(documents, "ConfigMap")
    assert {n for n in config["data"] if "TLS" in n} == {f"PDMESH_TLS_{n}" for n in ("CERT", "KEY", "CA", "NAME")}
    (certificate,) = of_kind(documents, "Certificate")
    assert config["data"]["PDMESH_TLS_NAME"] in certificate["spec"]["dnsNames"]


def test_what_is_scaled_by_is_what_the_adapter_gives() -> None:
    rules = yaml.safe_load((KUBERNETES / "components" / "autoscaling" / "adapter-rules.yaml").read_text())
    given = {rule["name"]["as"] for rule in rules["rules"]["custom"]}
    scalers = of_kind(kustomized(KUBERNETES / "overlays" / "production"), "HorizontalPodAutoscaler")
    assert {scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] for scaler in scalers} == given
    assert all(rule["seriesQuery"].startswith(rule["name"]["as"] + "{") for rule in rules["rules"]["custom"])


# ---- guides ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", ["compose", "systemd", "kubernetes"])
def test_guides(guide: str) -> None:
    path = ROOT / "docs" / "deploy" / f"{guide}.md"
    text = path.read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"First start", "Adding a worker", "Upgrade", "What to do when"} <= set(headings)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r"deploy/(?:compose|systemd|k8s)/[\w./@-]*\w", text):
        assert (ROOT / name).exists(), name
