"""The manifests: built by kubectl where it is installed, checked against schemas and with one another."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.metrics import Metrics
from server.settings import Settings
from tests.deploy.dockerfile import parse
from tests.deploy.replicas import DEPLOY

FOLDER = DEPLOY / "k8s" / "base"
FILES = ["namespace", "deployment", "service", "disruption", "autoscaler", "network"]
Manifest = dict[str, Any]


def load(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


BY_KIND: dict[str, Manifest] = {
    each["kind"]: each for name in FILES for each in load(FOLDER / f"{name}.yaml")
}
DEPLOYMENT = BY_KIND["Deployment"]
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
LABELS = POD["metadata"]["labels"]


def test_kustomization_lists_every_manifest() -> None:
    (kustomization,) = load(FOLDER / "kustomization.yaml")
    assert kustomization["resources"] == [f"{name}.yaml" for name in FILES]


@pytest.mark.parametrize("name", FILES)
def test_manifests_fit_their_schemas(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in load(FOLDER / f"{name}.yaml"):
        validate.validate(manifest, "1.31", strict=True)


@pytest.mark.parametrize("folder", [FOLDER, FOLDER.parent / "gateway"], ids=["base", "gateway"])
def test_kubectl_builds_them(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert all(each["metadata"].get("namespace", "dspark") == "dspark" for each in built)
    (deployment,) = [each for each in built if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["DSPARK_SHUTDOWN_TIMEOUT"] == "120"
    assert ("DSPARK_METRICS_PREFIX" in environment) == (folder != FOLDER)


def test_selectors_find_the_pods() -> None:
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert BY_KIND[kind]["spec"]["selector"]["matchLabels"].items() <= LABELS.items()
    assert BY_KIND["Service"]["spec"]["selector"].items() <= LABELS.items()
    assert BY_KIND["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= LABELS.items()
    pool, route = load(FOLDER.parent / "gateway" / "inference-pool.yaml")
    assert pool["spec"]["selector"]["matchLabels"].items() <= LABELS.items()
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == list(ports.values()) == [8000]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert BY_KIND["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert LABELS["llm-d.ai/inferenceServing"] == "true"
    target = BY_KIND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", DEPLOYMENT["metadata"]["name"])


def test_the_autoscaler_alone_says_how_many() -> None:
    assert "replicas" not in DEPLOYMENT["spec"]
    assert BY_KIND["HorizontalPodAutoscaler"]["spec"]["minReplicas"] >= 2


def test_the_pod_monitor_finds_pods_and_port() -> None:
    (monitor,) = load(FOLDER.parent / "pod-monitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= LABELS.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in CONTAINER["ports"]}
    (label,) = endpoint["relabelings"]
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8")
    assert f'up{{{label["targetLabel"]}="{label["replacement"]}"}}' in rules


def test_a_drain_is_never_cut_off() -> None:
    environment = {each["name"].removeprefix("DSPARK_").lower(): each["value"] for each in CONTAINER["env"]}
    settings = Settings.model_validate(environment)
    waits = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] >= waits + settings.shutdown_timeout + 10
    ready = CONTAINER["readinessProbe"]
    assert waits > ready["periodSeconds"], "endpoints are told before the server stops to take requests"


def test_probes_survive_load() -> None:
    alive = CONTAINER["livenessProbe"]
    assert alive["httpGet"]["path"] == CONTAINER["startupProbe"]["httpGet"]["path"] == "/health"
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert alive["timeoutSeconds"] >= 5, "the default of one second restarts loaded pods"
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 60


def test_pods_have_no_rights() -> None:
    _, stages = parse((DEPLOY.parent / "Dockerfile").read_text(encoding="utf-8"))
    (user,) = stages[-1].all("USER")
    security = POD["spec"]["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert security["runAsNonRoot"] is True
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {each["name"] for each in CONTAINER["volumeMounts"]}
    assert mounted == {each["name"] for each in POD["spec"]["volumes"]}


def test_scaling_and_routing_go_by_metrics_that_exist() -> None:
    names = {family.name for family in Metrics("", "m").registry.collect()}
    (metric,) = BY_KIND["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"].removeprefix("dspark_") in names
    (adapter,) = load(FOLDER.parent / "prometheus-adapter.yaml")
    assert "(dspark|vllm):num_requests_waiting" in adapter["rules"]["custom"][0]["seriesQuery"]
    # What endpoint pickers read, behind vLLM's prefix.
    assert {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"} <= names
