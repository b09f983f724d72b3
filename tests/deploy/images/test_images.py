"""The images are small, run as an unprivileged user on a read-only root, turn healthy, and train together."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...kit.waiting import until
from .composing import Composed, composed_mesh, gateway_says, health
from .conftest import TARGETS, Images

LARGEST_MEGABYTES = {
    "gateway": 500,
    "agents": 500,
    "rollout": 900,
    "reward": 800,
    "generator-cpu": 1500,
    "trainer": 1500,
}
CONTAINED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
NEVER = {
    "gateway": ("torch", "transformers", "reasoning_gym", "math_verify", "pyarrow"),
    "agents": ("torch", "transformers", "reasoning_gym", "math_verify", "pyarrow"),
    "rollout": ("torch", "transformers", "math_verify"),
    "reward": ("torch", "transformers", "pyarrow"),
    "generator-cpu": ("reasoning_gym", "math_verify", "pyarrow"),
    "trainer": ("reasoning_gym", "math_verify", "pyarrow"),
}

pytestmark = pytest.mark.timeout(3000)


def test_the_images_are_built_and_no_larger_than_promised(images: Images, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {target: images.megabytes(images.name(target)) for target in TARGETS}
    base = images.megabytes(images.base)
    with capfd.disabled():
        print(f"\nbase {base:.0f} MB; with it:", end="")
        print("".join(f"\n  {t}: {sizes[t]:.0f} MB, built in {images.seconds[t]:.0f} s" for t in TARGETS))
    for target, size in sizes.items():
        assert size < LARGEST_MEGABYTES[target], target


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is_and_holds_only_what_its_service_needs(images: Images, target: str) -> None:
    inspected = json.loads(images.engine("image", "inspect", images.name(target)))[0]["Config"]
    assert inspected["User"] == "10001:10001"
    assert inspected["Healthcheck"]["Test"][0] == "CMD"
    labels = inspected["Labels"]
    assert labels["org.opencontainers.image.title"] == images.name(target).replace("/", "-").removesuffix(":test")
    assert labels["org.opencontainers.image.base.name"] == images.base
    assert labels["org.opencontainers.image.version"] == "test"
    assert re.fullmatch("[0-9a-f]{40}|unknown", labels["org.opencontainers.image.revision"])
    script = (
        "import importlib.util as u, json, os, sys; "
        f"print(json.dumps([m for m in {NEVER[target]!r} if u.find_spec(m)])); print(os.getuid()); "
        "print(u.find_spec('pip') is None)"
    )
    words = ("run", "--rm", *CONTAINED, "--entrypoint", "python3", images.name(target), "-c", script)
    assert images.engine(*words).splitlines() == ["[]", "10001", "True"]


@pytest.mark.parametrize("target", TARGETS)
def test_no_image_knows_the_index_or_the_authority_of_the_machine_that_built_it(images: Images, target: str) -> None:
    history = images.engine("history", "--no-trunc", "--format", "{{.CreatedBy}}", images.name(target))
    assert "127.0.0.1" not in history and "https://" not in history.replace("https://github.com", "")
    script = "ls -A /run/secrets 2>/dev/null; cat /etc/pip.conf 2>/dev/null; find / -xdev -name 'pip.conf' -size +0"
    words = ("run", "--rm", *CONTAINED, "--entrypoint", "sh", images.name(target), "-c", script)
    assert images.engine(*words, check=False) == ""


@pytest.mark.parametrize("target", ["rollout", "reward", "gateway", "agents"])
def test_a_wrong_run_file_is_refused_before_anything_starts(images: Images, target: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: demo\nfolder: /tmp/run\nmodel: {path: recipe:countdown}\ntrainer: {train_steps: many}\n")
    file.chmod(0o644)
    tmp_path.chmod(0o755)
    words = ("run", "--rm", *CONTAINED, "--volume", f"{file}:/run.yaml:ro", images.name(target))
    done = subprocess.run(
        [images.engine.binary, *words, "config", "validate", "/run.yaml"],
        capture_output=True,
        text=True,
        env=images.engine.environment,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "trainer.train_steps" in done.stderr and "many" in done.stderr


@pytest.fixture(scope="module")
def composed(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    with composed_mesh(images, tmp_path_factory.mktemp("composed")) as mesh:
        yield mesh


def test_the_mesh_of_the_compose_file_turns_healthy_trains_and_writes_nowhere_else(
    composed: Composed, capfd: pytest.CaptureFixture[str]
) -> None:
    services = ("redis", "trainer", "generator", "rollout", "reward", "gateway")
    start = time.monotonic()
    composed("up", "--detach", "--scale", "generator=2", *services)
    for service in ("generator", "rollout", "reward", "gateway"):
        until(lambda s=service: health(composed, s) == "healthy", f"{service} to be healthy")
    healthy = time.monotonic() - start
    until(lambda: composed.state("trainer")["Status"] == "exited", "the last train step")
    assert composed.state("trainer")["ExitCode"] == 0, composed("logs", "--tail", "40", "trainer")
    steps = composed("logs", "--no-color", "trainer").count("step_trained")
    assert steps == 4
    seen = gateway_says(composed, "/api/v1/about")
    assert '"compose"' in seen
    with capfd.disabled():
        print(f"\ncompose: healthy after {healthy:.0f} s, {steps} steps trained after {time.monotonic() - start:.0f} s")
        print(f"  the gateway says: {seen[:160]}")
    for service in ("generator", "rollout", "reward", "gateway"):
        container = composed.container(service)
        assert composed.images.engine("inspect", "--format", "{{.HostConfig.ReadonlyRootfs}}", container) == "true"
        assert composed.images.engine("exec", container, "id", "-u") == "10001"
        # All of them start at once: who needs another one waits for it, and does not fail until it is there.
        assert composed.restarts(service) == 0, composed("logs", "--tail", "200", service)
        # What the engine itself mounts shows up as added.
        added = {line[2:] for line in composed.images.engine("diff", container).splitlines() if line.startswith("A ")}
        assert added <= {"/usr/sbin/docker-init", "/sbin/docker-init", "/etc/rollmesh/run/run.yaml"}, service
    for service in ("generator", "rollout", "reward", "gateway"):
        composed("stop", "--timeout", "40", service)
        assert composed.state(service)["ExitCode"] == 0, composed("logs", "--tail", "40", service)
