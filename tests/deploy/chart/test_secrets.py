"""The Secret that the chart makes: random at the first install, unchanged by upgrades, replaced by an existing one."""

import base64

import pytest

from .api_server import installed, owned
from .object_checks import all_checks
from .rendering import CHART, NAMESPACE, Helm, HelmError

NAME = "demo-rollmesh-secrets"
PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}"
ENTRIES = {"redis-password", "checkpoint-secret", "gateway-token", "mesh-token", "sglang-admin-key"}


def test_one_command_on_an_empty_namespace_makes_every_secret_that_the_pods_need(helm: Helm) -> None:
    rendering = installed(helm, {}, "security.token.enabled=true")
    secret = rendering.one("Secret")
    words = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert secret["metadata"]["name"] == NAME and set(words) == ENTRIES
    assert all(len(word) == 48 and word.isalnum() for word in words.values()), "no default, no empty secret"
    assert len(set(words.values())) == len(words), "one for each purpose"
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for check in all_checks():
        assert not list(check(rendering)), check.__name__


def test_an_upgrade_and_an_install_after_an_uninstall_keep_the_secrets_and_add_missing_ones(helm: Helm) -> None:
    first = installed(helm, {}).one("Secret")
    old = {key: value for key, value in first["data"].items() if key != "mesh-token"}
    again = installed(helm, {PATH: owned({**first, "data": old})}).one("Secret")
    assert {key: again["data"][key] for key in old} == old
    assert set(again["data"]) == ENTRIES and again["data"]["mesh-token"] != first["data"]["mesh-token"]
    assert installed(helm, {PATH: owned(first)}).one("Secret")["data"] == first["data"]


def test_an_existing_secret_is_used_instead(helm4: Helm) -> None:
    rendering = helm4.template(CHART, (), ["secrets.existingSecret=ours"])
    assert not rendering.of_kind("Secret")
    references = [
        entry["valueFrom"]["secretKeyRef"]["name"]
        for _, _, container in rendering.containers()
        for entry in container.get("env", [])
        if "secretKeyRef" in entry.get("valueFrom", {})
    ]
    assert set(references) == {"ours"}


@pytest.mark.parametrize(
    "sets",
    [
        ["redis.enabled=false", "redis.externalUrl=redis://elsewhere:6379"],
        [
            "redis.enabled=false",
            "redis.externalUrl=redis+sentinel://elsewhere:26379/mymaster",
            "redis.externalPassword=false",
            "redis.externalSentinelPassword=true",
        ],
    ],
)
def test_the_password_of_an_external_redis_cannot_be_made_up(helm: Helm, sets: list[str]) -> None:
    with pytest.raises(HelmError, match=r"secrets\.create cannot make the password of an external Redis"):
        helm.template(CHART, (), sets)
    helm.template(CHART, (), [*sets, "secrets.existingSecret=ours"])
