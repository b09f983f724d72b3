"""The generator in an image that has SGLang: built, and a mesh that trains on it.

The upstream image is in a registry and wants a GPU. In its place stands our base with the environment in which the
tests run the real server on a CPU: another build of the same server, at a path of its own as SGLANG_PYTHON says.
"""

import json
import time
from pathlib import Path

import pytest

from ...kit.environments import python_of
from ...kit.waiting import until
from .composing import composed_mesh, health
from .conftest import Images, build
from .pip_access import pip_secrets

PYTHON = "/opt/sglang/bin/python3"
DOCKERFILE = """\
ARG BASE
FROM ${BASE}
COPY lib /opt/sglang/lib
RUN python3 -m venv --without-pip /opt/sglang
"""

pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def upstream(images: Images, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with SGLang in it."""
    environment = python_of("sglang-cpu").parents[1]
    if not (environment / "lib" / "python3.11").exists():
        pytest.skip("the base image has Python 3.11, the environment with SGLang another one")
    file = tmp_path_factory.mktemp("upstream") / "Dockerfile"
    file.write_text(DOCKERFILE)
    file.with_name("Dockerfile.dockerignore").write_text("*\n!lib\n")
    name = "rollmesh-test-sglang"
    words = ("--build-arg", f"BASE={images.base}", "--tag", name, "--file", str(file), str(environment))
    images.engine("build", *words, timeout=1200)
    return name


@pytest.fixture(scope="module")
def generator_image(images: Images, upstream: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    with pip_secrets(tmp_path_factory.mktemp("pip")) as secrets:
        build(images, "generator-sglang", upstream, secrets, SGLANG_PYTHON=PYTHON)
    return "rollmesh/generator-sglang:test"


def test_an_image_without_sglang_is_not_built(images: Images, tmp_path: Path) -> None:
    with pip_secrets(tmp_path) as secrets, pytest.raises(AssertionError, match="BASE_IMAGE has no SGLang"):
        build(images, "generator-sglang", images.base, secrets)


def test_the_image_adds_our_process_to_sglang_and_nothing_to_its_packages(
    images: Images, upstream: str, generator_image: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(images.engine("image", "inspect", generator_image))[0]["Config"]
    assert config["User"] == "10001:10001" and f"ROLLMESH_GENERATOR__SGLANG__PYTHON={PYTHON}" in config["Env"]
    script = "import importlib.util as u; print([m for m in ('sglang', 'rollmesh', 'grpc') if u.find_spec(m)])"
    run = ("run", "--rm", "--read-only", "--entrypoint")
    assert images.engine(*run, PYTHON, generator_image, "-c", script).splitlines()[-1] == "['sglang']"
    assert images.engine(*run, "python3", generator_image, "-c", script) == "['rollmesh', 'grpc']"
    before, after = images.megabytes(upstream), images.megabytes(generator_image)
    with capfd.disabled():
        print(f"\ngenerator-sglang: {after - before:.0f} MB on top of {before:.0f} MB with SGLang")
    assert after - before < 300


def test_a_mesh_trains_on_the_sglang_of_the_image(
    images: Images, generator_image: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    override = tmp_path / "override.yaml"
    override.write_text(
        f"services:\n  generator:\n    image: {generator_image}\n    environment:\n"
        '      {HF_HUB_OFFLINE: "1", TRANSFORMERS_OFFLINE: "1"}\n'
    )
    sections = {"engine": "sglang", "device": "cpu", "slots": 32, "sglang": {"start_timeout_seconds": 900}}
    services = ("redis", "trainer", "generator", "rollout", "reward")
    with composed_mesh(images, tmp_path, sections, override) as mesh:
        start = time.monotonic()
        mesh("up", "--detach", *services)
        until(lambda: health(mesh, "generator") == "healthy", "the generator to be healthy", 900)
        until(lambda: mesh.state("trainer")["Status"] == "exited", "the last train step", 900)
        assert mesh.state("trainer")["ExitCode"] == 0, mesh("logs", "--tail", "40", "trainer")
        logs = mesh("logs", "--no-color", "generator")
        assert "server_started" in logs, logs[-4000:]
        assert images.engine("exec", mesh.container("generator"), "id", "-u") == "10001"
        assert mesh.restarts("generator") == 0, logs[-4000:]
        steps = mesh("logs", "--no-color", "trainer").count("step_trained")
        with capfd.disabled():
            print(f"\ngenerator-sglang: {steps} steps trained on it after {time.monotonic() - start:.0f} s")
        assert steps == 4
        mesh("stop", "--timeout", "40", "generator")
        assert mesh.state("generator")["ExitCode"] == 0, mesh("logs", "--tail", "40", "generator")
