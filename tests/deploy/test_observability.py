"""Rules and dashboard name what the server exports, and real Prometheus agrees with what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.grafana import make_dashboard
from engine.outputs import EngineGauges, RequestStats, StepStats, Usage
from server.metrics import Metrics
from tests.deploy.replicas import DEPLOY, Replica, free_port, until

RULES = DEPLOY / "prometheus" / "rules.yml"
GROUPS = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALL_RULES = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD: dict[str, Any] = json.loads(make_dashboard.TARGET.read_text(encoding="utf-8"))


def exported() -> dict[str, set[str]]:
    """Names of all series and their labels, once each of them has a sample."""
    metrics = Metrics("dspark:", "m")
    step = StepStats(0.02, 0.01, 0.0, 4, 0, 1, 3, (3,), (2,), undrafted="off")
    metrics.step(step)
    metrics.gauges(EngineGauges(calibration_errors=(("greedy", 0.1),)))
    metrics.http_request("/v1/completions", 200)
    metrics.rejected("queue_full")
    metrics.finished(RequestStats("stop", 0.0, 0.1, 0.2, Usage(), 0))
    series: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


EXPORTED = exported()


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Each series of ours in a PromQL expression, with the labels that are matched."""
    found = re.findall(r"(?<![\w:])(dspark:\w+)(?:\{([^}]*)\})?", expression)
    return [(name, set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", matchers))) for name, matchers in found]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_rules_and_dashboard_name_only_what_is_exported() -> None:
    recorded = {rule["record"] for rule in ALL_RULES if "record" in rule}
    expressions = [rule["expr"] for rule in ALL_RULES] + dashboard_expressions()
    expressions += [variable["query"] for variable in DASHBOARD["templating"]["list"][1:]]
    named = [each for expression in expressions for each in selectors(expression)]
    assert len(named) > 60
    for name, labels in named:
        assert name in EXPORTED, name
        assert labels <= EXPORTED[name] | {"instance"}, name
    for expression in expressions:
        for name in re.findall(r"model_name:dspark_\w+:\w+", expression):
            assert name in recorded, name


def test_the_check_sees_what_is_not_exported() -> None:
    ((name, labels),) = selectors('rate(dspark:http_requests_total{status=~"5..",path!="x"}[5m])')
    assert (name, labels) == ("dspark:http_requests_total", {"status", "path"})
    assert "dspark:no_such_metric" not in EXPORTED


def test_every_alert_says_what_to_do_and_is_tested() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules.test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    alerts = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
    assert fired == set(alerts)
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith((".", "?"))


def test_the_dashboard_is_what_its_source_says() -> None:
    assert make_dashboard.TARGET.read_text(encoding="utf-8") == make_dashboard.text(), (
        "run python -m deploy.grafana.make_dashboard"
    )
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return path


def test_promtool_agrees() -> None:
    promtool = tool("promtool")
    for command in (["check", "rules", RULES.name], ["test", "rules", "rules.test.yml"]):
        done = subprocess.run(
            [promtool, *command], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    config = ["check", "config", "prometheus.yml"]
    subprocess.run([promtool, *config], cwd=RULES.parent, check=True, capture_output=True)


def test_promtool_can_parse_the_dashboard(tmp_path: Path) -> None:
    """As rules, since promtool checks those; Grafana's own variables stand for what it puts in."""
    promtool = tool("promtool")
    rules = [
        {"record": "x:y", "expr": each.replace("$__rate_interval", "1m")} for each in dashboard_expressions()
    ]
    file = tmp_path / "rules.yml"
    file.write_text(
        yaml.safe_dump({"groups": [{"name": f"g{i}", "rules": [r]} for i, r in enumerate(rules)]})
    )
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    started = [Replica(tmp_path / f"{number}.log") for number in (1, 2)]
    yield started
    for replica in started:
        replica.close()


@pytest.mark.slow
def test_prometheus_scrapes_two_replicas(tmp_path: Path, replicas: list[Replica]) -> None:
    prometheus = tool("prometheus")
    text = (RULES.parent / "prometheus.yml").read_text(encoding="utf-8")
    for number, replica in enumerate(replicas, 1):
        text = text.replace(f"replica-{number}:8000", f"127.0.0.1:{replica.port}")
    text = text.replace("interval: 5s", "interval: 1s").replace("interval: 15s", "interval: 1s")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(RULES, tmp_path)
    address = f"127.0.0.1:{free_port()}"
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--web.listen-address={address}",
         f"--storage.tsdb.path={tmp_path}/data"], stderr=log,
    )  # fmt: skip

    def query(expression: str) -> list[dict[str, Any]]:
        reply = httpx.get(f"http://{address}/api/v1/query", params={"query": expression})
        return reply.json()["data"]["result"] if reply.status_code == 200 else []

    try:
        until(lambda: len(query('up{job="dspark"} == 1')) == 2)
        body = {"prompt": "a", "max_tokens": 5}
        for replica in replicas:
            assert httpx.post(f"{replica.url}/v1/completions", json=body).status_code == 200
        until(lambda: [each["value"][1] for each in query("sum(dspark:request_success_total)")] == ["2"])
        until(lambda: [each["value"][1] for each in query("model_name:dspark_requests_running:sum")] == ["0"])
        rules = httpx.get(f"http://{address}/api/v1/rules").json()["data"]["groups"]
        assert all(rule["health"] == "ok" for group in rules for rule in group["rules"])
    finally:
        process.terminate()
        process.wait(20)
