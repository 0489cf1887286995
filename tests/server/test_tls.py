"""HTTPS with a certificate of the test's own."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from server.startup import StartError, check_certificate
from tests.server.conftest import Served


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True, timeout=30
    )
    return certificate, key


def test_requests_over_tls(serve: Callable[..., Served], certificate: tuple[str, str]) -> None:
    served = serve(ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    url = served.url.replace("http:", "https:")
    trusting = ssl.create_default_context(cafile=certificate[0])
    body = {"prompt": "a", "stream": True}
    with httpx.Client(base_url=url, verify=trusting) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{served.url}/health")


def test_what_is_wrong_is_told_before_the_start(certificate: tuple[str, str], tmp_path: Path) -> None:
    check_certificate(None, None)
    check_certificate(*certificate)
    other = tmp_path / "key.pem"
    other.write_text("no key")
    for bad in ((str(tmp_path / "nowhere"), None), (certificate[0], None), (certificate[0], str(other))):
        with pytest.raises(StartError, match="cannot use --ssl-certfile"):
            check_certificate(*bad)
    with pytest.raises(StartError, match="needs --ssl-certfile"):
        check_certificate(None, "key.pem")
