"""Published adapters: PEFT folders above a policy of full weights that their manifest names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE, Manifest
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError

from ...kit.checkpoint_samples import SECRET, publish, publish_adapter


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", SECRET)


def test_an_adapter_opens_with_its_base(store: CheckpointStore) -> None:
    base = publish(store, 0)
    policy = store.open(publish_adapter(store, 1, base))
    assert policy.base is not None
    assert policy.base.folder == store.root / base.path
    assert (policy.manifest.kind, policy.base.manifest.kind) == ("adapter", "full")
    assert {f.path for f in policy.manifest.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (policy.manifest.dtype, policy.manifest.parameter_count) == ("F32", 32)
    store.open(base).manifest.check_compatible(policy.manifest)


def test_an_adapter_whose_base_changed_is_refused(store: CheckpointStore) -> None:
    base = publish(store, 0)
    record = publish_adapter(store, 1, base)
    weights = store.root / base.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError) as caught:
        store.at(store.root).open(record)
    assert caught.value.reason == Reason.TAMPERED
    assert base.path in str(caught.value)


def test_an_adapter_without_its_base_is_refused(store: CheckpointStore) -> None:
    base = publish(store, 0)
    record = publish_adapter(store, 1, base)
    store.open(record)
    (store.root / base.path).rename(store.root / "elsewhere")
    with pytest.raises(CheckpointError) as caught:
        store.open(record)
    assert caught.value.reason == Reason.MISSING


def test_a_manifest_of_full_weights_reads_as_before_there_were_adapters(store: CheckpointStore) -> None:
    record = publish(store, 0)
    fields = json.loads((store.root / record.path / MANIFEST_FILE).read_bytes())
    assert "base" not in fields
    manifest = store.open(record).manifest
    with pytest.raises(ValidationError, match="kind adapter requires a base"):
        Manifest.model_validate({**manifest.model_dump(), "kind": "adapter"})
