"""compose.yaml agrees with what it mounts, and with the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import Settings
from tests.deploy.replicas import DEPLOY, NGINX

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
REPLICAS = {name for name in SERVICES if name.startswith("replica-")}


def test_every_replica_is_balanced_and_scraped() -> None:
    assert len(REPLICAS) >= 2
    for file in ("nginx/replicas.conf", "nginx/replicas-affinity.conf", "prometheus/prometheus.yml"):
        named = re.findall(r"(replica-\d+):8000", (DEPLOY / file).read_text(encoding="utf-8"))
        assert set(named) == REPLICAS, file
    assert set(SERVICES["nginx"]["depends_on"]) == REPLICAS


def test_every_replica_gets_a_gpu_of_its_own() -> None:
    added = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]
    assert set(added) == REPLICAS
    devices = [each["deploy"]["resources"]["reservations"]["devices"][0] for each in added.values()]
    assert len({device["device_ids"][0] for device in devices}) == len(REPLICAS)
    assert all(device["capabilities"] == ["gpu"] for device in devices)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", sorted(REPLICAS))
def test_replicas_are_set_up_as_the_server_expects(name: str) -> None:
    service = SERVICES[name]
    given = {key.removeprefix("DSPARK_").lower(): value for key, value in service["environment"].items()}
    settings = Settings.model_validate(given)
    assert seconds(service["stop_grace_period"]) > settings.shutdown_timeout + 10
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_what_is_mounted_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]


def test_images_have_versions() -> None:
    for name, service in SERVICES.items():
        _, _, tag = service["image"].partition(":")
        assert tag, name
        assert "latest" not in tag


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")
@pytest.mark.parametrize("conf", ["nginx.conf", "affinity.conf"])
def test_nginx_accepts_its_configuration(conf: str, tmp_path: Path) -> None:
    assert NGINX is not None
    folder = tmp_path / "nginx"
    shutil.copytree(DEPLOY / "nginx", folder)
    for file in folder.glob("replicas*.conf"):  # names that only compose's network knows
        # `resolve` is nginx's own since 1.27.3, and needless with addresses.
        file.write_text(re.sub(r"replica-\d+:", "127.0.0.1:", file.read_text()).replace(" resolve", ""))
    done = subprocess.run(
        [NGINX, "-t", "-c", str(folder / conf)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
