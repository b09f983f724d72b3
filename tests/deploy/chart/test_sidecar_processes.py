"""A generator beside the container of its SGLang server, run as processes of this machine."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.config.recipes import resolve_model

from ...kit.environments import python_of
from ...sglang_cpu.server import UNPINNED
from .pod_mesh import KIND, SMALL, machine_for, start_all, versions, wait_until
from .pods import pods_of
from .rendering import CHART, Helm

pytestmark = [pytest.mark.long, pytest.mark.slow]

SIDECAR: dict[str, Any] = {
    "run": {
        "model": {"path": "/models/countdown"},
        # Without a limit SGLang would take most of the machine's memory for its cache.
        "generator": {"engine": "sglang", "kv_token_capacity": 10240},
    },
    "model": {"existingClaim": "models"},
    "gateway": {"enabled": False},
    "generator": {
        "sglang": {
            "sidecar": {
                "enabled": True,
                "args": ["--device=cpu", "--attention-backend=torch_native"],
                "extraEnv": [{"name": "SGLANG_USE_CPU_ENGINE", "value": "1"}],
            }
        }
    },
}
"""Settings that a CPU needs beside the values of an example."""
ADAPTERS = {
    "run": {"model": {"adapter": {"rank": 4, "alpha": 8}}},
    "generator": {
        "sglang": {
            "sidecar": {"args": [*SIDECAR["generator"]["sglang"]["sidecar"]["args"], "--lora-backend=torch_native"]}
        }
    },
}
"""The same for a run that trains an adapter."""


@pytest.mark.timeout(1800)  # every deadline inside of the test passes first
@pytest.mark.parametrize("trained", [{}, ADAPTERS], ids=["all-weights", "an-adapter"])
def test_a_generator_with_an_sglang_sidecar_serves_the_mesh_of_its_manifests(
    helm4: Helm, commands: str, tmp_path: Path, trained: dict[str, Any]
) -> None:
    values, more = tmp_path / "sidecar.yaml", tmp_path / "trained.yaml"
    values.write_text(yaml.safe_dump(SIDECAR))
    more.write_text(yaml.safe_dump(trained))
    machine = machine_for(
        helm4.template(CHART, [KIND, values, more], [*SMALL, "run.trainer.train_steps=2"]), tmp_path, commands
    )
    machine.pythons = {"sglang": str(python_of("sglang-cpu"))}
    machine.image_variables = {"sglang": UNPINNED}
    shutil.copytree(resolve_model("recipe:countdown"), machine.folder / "claims" / "models" / "countdown")
    with pods_of(machine, {}) as pods:
        start_all(pods)
        (generator,) = pods["generator"]
        wait_until(pods, lambda: generator.passes("readinessProbe"), "the generator to be ready")
        (trainer,) = pods["trainer"]
        wait_until(pods, lambda: trainer.exit_status is not None, "the trainer to end with its last step")
        assert versions(pods) == [0, 1, 2]
        wait_until(pods, lambda: generator.sidecar_passes("sglang", "livenessProbe"), "the sidecar to be alive")
        # Every token is scored again with the checkpoint that it names.
        trainer.run("audit", "/var/lib/rollmesh/shared/chart/run")
        assert generator.stop() == 0, generator.log[-4000:]
