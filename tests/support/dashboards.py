"""What deploy/dashboards holds, as data: queries of dashboards and alerts, and the metrics that they name."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy/dashboards"
NAMES = ("overview", "requests", "transfer", "workers")
_METRIC = re.compile(r"\b(?:pdmesh|process)_[a-z0-9_]+")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total")


def builder() -> ModuleType:
    """deploy/dashboards/build.py."""
    spec = importlib.util.spec_from_file_location("dashboards_build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict[str, Any]:
    """One dashboard."""
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    """The panels of a dashboard that show something."""
    return [panel for panel in read(name)["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """(where it stands, PromQL) of all dashboards, variables filled in."""
    for name in NAMES:
        for panel in panels(name):
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", "1m").replace("$worker", ".*")
                yield f"{name}: {panel['title']}", text


def rules() -> list[dict[str, Any]]:
    """All rules of alerts.yaml."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def families_named() -> set[str]:
    """The metrics, without the suffixes of their samples, that dashboards and alerts name."""
    texts = [query for _, query in queries()] + [rule["expr"] for rule in rules()]
    return {_family(name) for text in texts for name in _METRIC.findall(text)}


def _family(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
