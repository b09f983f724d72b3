"""A trainer that starts again beside a damaged bucket, with a good copy of every policy in the cache of its node."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.checkpoints.bucket import BucketStore, open_location
from rollmesh.runtime.lifecycle import EXIT_UNFINISHED
from rollmesh.types import PolicyRecord

from ...kit.checkpoint_samples import flip_object
from ...kit.s3_server import Bucket
from .trainer_run import SECRET, Runs, TrainerRun

pytestmark = pytest.mark.long

Damage = Callable[[BucketStore, list[PolicyRecord]], None]


def weights_of(store: BucketStore, record: PolicyRecord) -> str:
    (name,) = (key for key in store.objects.sizes(record.path) if "model.safetensors" in key)
    return name


DAMAGES: dict[str, Damage] = {
    "a byte of the weights": lambda store, records: flip_object(store.objects, weights_of(store, records[-1])),
    "a byte of the manifest": lambda store, records: flip_object(store.objects, f"{records[-1].path}/manifest.json"),
    "no weights": lambda store, records: store.objects.delete([weights_of(store, records[-1])]),
    "nothing left": lambda store, records: store.objects.delete(list(store.objects.sizes(records[-1].path))),
    "the policy that it is a difference to": lambda store, records: flip_object(
        store.objects, weights_of(store, records[0])
    ),
}


def announced(run: TrainerRun) -> list[str]:
    """Paths that the trainer's log names as announced."""
    lines = run.events("policy_announced")
    return [line["path"] for line in lines]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_newest_policy_that_no_other_node_can_read_is_published_again(
    runs: Runs, tmp_path: Path, own_bucket: Bucket, damage: str
) -> None:
    section = own_bucket.section("run", anchor_every_versions=4)
    checkpoints = section.model_dump(include={"folder", "object_store", "anchor_every_versions"})
    async with runs(model={"dtype": "bfloat16"}, checkpoints=checkpoints) as run:
        process = run.start()
        async with run.fed(4):
            await run.until("the second version", lambda: len(announced(run)) > 1, pause=0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) in (0, EXIT_UNFINISHED)
            records = await run.store.policies.announced()
            store, newest = run.checkpoints, records[-1]
            assert isinstance(store, BucketStore)
            DAMAGES[damage](store, records)
            weights = (store.root / newest.path / "model.safetensors").read_bytes()
            run.start()
            await run.until_finished()
        policies = await run.store.policies.announced()
        repaired = policies[newest.policy_version + 1]
        assert (repaired.train_step, policies[-1].train_step) == (newest.train_step, 4)
        other_node = open_location(run.config.checkpoints, tmp_path / "other", SECRET.encode())
        assert (other_node.open(repaired).folder / "model.safetensors").read_bytes() == weights
