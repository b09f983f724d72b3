"""Checks of the Dockerfile and the compose file that need no engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OURS = ("trainer", "generator", "rollout", "reward", "gateway", "agents")
TARGET_OF = {"generator": "generator-cpu"}
"""Images that are not called like their target."""
VALUES = yaml.safe_load((ROOT / "helm" / "rollmesh" / "values.yaml").read_text())


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_follows_the_compose_specification() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_of_the_compose_file_is_a_target_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM service AS (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    assert targets == {"rollout", "generator-cpu", "generator-sglang", "reward", "trainer", "gateway", "agents"}
    used = {re.search(r"rollmesh/([\w-]+):", COMPOSE["services"][service]["image"])[1] for service in OURS}
    assert {TARGET_OF.get(name, name) for name in used} == targets - {"generator-sglang"}


def test_every_image_of_the_chart_is_a_target_of_the_dockerfile() -> None:
    repositories = {VALUES[service]["image"]["repository"].rpartition("/")[2] for service in (*OURS, "teacher")}
    text = (DEPLOY / "Dockerfile").read_text()
    for repository in repositories:
        assert f"FROM service AS {TARGET_OF.get(repository, repository)}\n" in text, repository


@pytest.mark.parametrize("service", sorted(COMPOSE["services"]))
def test_every_container_is_confined(service: str) -> None:
    section = COMPOSE["services"][service]
    assert section["read_only"] and section["cap_drop"] == ["ALL"]
    assert section["security_opt"] == ["no-new-privileges:true"]
    for port in section.get("ports", []):
        assert port.startswith("127.0.0.1:")
    if service in OURS:
        assert section["user"] == "10001:10001" and section["init"]


def test_the_reward_service_has_no_password_and_no_checkpoints() -> None:
    reward = COMPOSE["services"]["reward"]
    assert not [name for name in reward["environment"] if "STORE" in name or "SECRET" in name or "CHECKPOINT" in name]
    assert not [volume for volume in reward["volumes"] if volume.startswith("shared:")]
    assert reward["networks"] == ["mesh"] and COMPOSE["networks"]["mesh"]["internal"]


def test_no_secret_has_a_default_and_secrets_are_made_fresh() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    named = set(re.findall(r"\$\{(\w*(?:PASSWORD|SECRET|TOKEN)\w*)(:\?|:-|\})", text))
    assert {sign for _, sign in named} == {":?"}
    runs = [
        subprocess.run(["sh", DEPLOY / "secrets.sh"], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    made = [dict(line.split("=") for line in run.splitlines()) for run in runs]
    assert set(made[0]) == {name for name, _ in named}
    assert all(len(value) == 48 and value != made[1][name] for name, value in made[0].items())


def test_the_file_with_the_secrets_is_for_its_owner_alone_and_is_never_committed(tmp_path: Path) -> None:
    made = tmp_path / ".env"
    subprocess.run(["sh", "-c", f'umask 022; "{DEPLOY}/secrets.sh" > "{made}"'], check=True)
    assert made.stat().st_mode & 0o777 == 0o600
    assert "REDIS_PASSWORD=" in made.read_text()
    assert "/deploy/.env" in (DEPLOY.parent / ".gitignore").read_text().splitlines()


def test_every_mounted_file_of_the_compose_file_exists() -> None:
    for name, section in COMPOSE["services"].items():
        for volume in section.get("volumes", []):
            source = re.sub(r"^\$\{ROLLMESH_RUN_FILE:-(.*?)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), (name, source)
            else:
                assert source in COMPOSE["volumes"], (name, source)


def test_ports_are_those_of_the_images_and_of_the_chart() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    grpc, admin = VALUES["network"]["grpcPort"], VALUES["network"]["adminPort"]
    assert f"ROLLMESH_NETWORK__GRPC_PORT={grpc} " in text and f"ROLLMESH_NETWORK__ADMIN_PORT={admin}\n" in text
    assert f"reward:{grpc}" in COMPOSE["services"]["rollout"]["environment"]["ROLLMESH_REWARD__ADDRESS"]


def test_prometheus_of_the_compose_file_knows_the_run_by_its_name_and_every_service_by_its_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    labels = {label["target_label"]: label.get("replacement") for label in job["relabel_configs"]}
    named = {COMPOSE["services"][service]["environment"]["ROLLMESH_NAME"] for service in OURS}
    (found,) = job["dns_sd_configs"]
    assert named == {labels["run"]}, "queries and alerts say the name that the page says"
    assert set(found["names"]) == set(OURS) and found["port"] == VALUES["network"]["adminPort"]
    mounted = [volume.split(":")[:2] for volume in COMPOSE["services"]["prometheus"]["volumes"]]
    for rule_file in config["rule_files"]:
        folder, _, name = rule_file.rpartition("/")
        (source,) = [Path(source) for source, target in mounted if target == folder]
        assert (DEPLOY / source / name).exists(), rule_file
