"""Dashboards and alerts are what their builder makes, and promtool takes every query."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.dashboards import FOLDER, NAMES, builder, panels, queries, read, rules
from tests.support.scraping import run_promtool


def test_the_files_are_what_the_builder_makes() -> None:
    build = builder()
    assert sorted(build.DASHBOARDS) == list(NAMES) == sorted(p.stem for p in FOLDER.glob("*.json"))
    for name in NAMES:
        assert (FOLDER / f"{name}.json").read_text() == build.text_of(name), "run python deploy/dashboards/build.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_can_be_imported(name: str) -> None:
    whole = read(name)
    assert whole["uid"] == f"pdmesh-{name}" and whole["title"].startswith("pdmesh: ") and whole["schemaVersion"] == 39
    variables = {v["name"]: v for v in whole["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    numbers = [panel["id"] for panel in whole["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    for panel in panels(name):
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"] and all(t["datasource"]["uid"] == "${datasource}" for t in panel["targets"])
        uses_worker = any("$worker" in target["expr"] for target in panel["targets"])
        assert not uses_worker or "worker" in variables, panel["title"]


async def test_every_query_is_promql(tmp_path: Path) -> None:
    found = list(queries())
    assert len(found) > 60
    as_rules = [{"record": f"query:{i}", "expr": query} for i, (_, query) in enumerate(found)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": as_rules}]}))
    code, said = await run_promtool("check", "rules", str(file))
    assert code == 0 and f"{len(found)} rules found" in said, said


async def test_alerts_are_right_and_fire_when_they_should() -> None:
    code, said = await run_promtool("check", "rules", str(FOLDER / "alerts.yaml"))
    assert code == 0 and "SUCCESS" in said, said
    code, said = await run_promtool("test", "rules", str(FOLDER / "alerts.test.yaml"))
    assert code == 0 and "SUCCESS" in said, said
    code, said = await run_promtool("check", "config", str(FOLDER / "prometheus.yaml"))
    assert code == 0 and "FAILED" not in said, said


def test_every_alert_says_what_to_do_and_has_a_test() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    tested = (FOLDER / "alerts.test.yaml").read_text()
    assert len({a["alert"] for a in alerts}) == len(alerts) >= 15
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical"), alert["alert"]
        assert len(alert["annotations"]["summary"]) > 10 and len(alert["annotations"]["runbook"]) > 40, alert["alert"]
        assert alert["alert"] in tested, f"{alert['alert']} has no test"
