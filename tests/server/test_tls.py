"""TLS: the server speaks it with the files it is given."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from octavo.config import ServerConfig
from octavo.errors import SettingError
from tests.server.serving import ProcessServer


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_server_speaks_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    trusted = ssl.create_default_context(cafile=str(certificate))
    options = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    with ProcessServer(*options) as server, server.calls(verify=trusted) as calls:
        assert server.address.startswith("https://")
        assert calls.complete()["choices"][0]["text"]


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile"])
def test_half_of_tls_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="both"):
        ServerConfig.from_dict({name: "x"})
