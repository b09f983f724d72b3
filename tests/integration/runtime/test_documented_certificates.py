"""The openssl lines of docs/certificates.md make certificates that the ports take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rollmesh.config.services import SecurityConfig
from rollmesh.runtime.port_security import PortSecurity

DOCUMENT = Path(__file__).parents[3] / "docs" / "certificates.md"


def test_the_documented_openssl_lines_make_certificates_that_the_mesh_accepts(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH")
    (lines,) = re.findall(r"### With openssl\n\n```\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    done = subprocess.run(["bash", "-ec", lines], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    tls = {field: str(tmp_path / name) for field, name in files.items()}
    section = SecurityConfig.model_validate({"tls": tls, "token_file": str(tmp_path / "token")})
    security = PortSecurity.from_config(section)  # shakes hands with itself
    assert security.tls is not None
    assert len(security.sent_token or "") == 64
