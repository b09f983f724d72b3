"""A run with its checkpoints in a real S3, most of them deltas, and no page, audited from the bucket alone."""

import json
import shutil
import socket

import pytest

pytest.importorskip("moto", reason="the S3 server of the tests is moto's")
pytest.importorskip("s3fs", reason="object stores need the extra s3")

from rollmesh.checkpoints.objects import ObjectStore

from ..kit.s3_server import CREDENTIALS, Bucket

pytestmark = pytest.mark.long


def test_a_run_trains_without_its_page_and_with_its_checkpoints_in_a_bucket_and_is_audited_from_there(
    small_run, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(tmp_path / "moto.log")
    try:
        section = bucket.section("runs/small").model_dump(include={"folder", "object_store"})
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            line = small_run(
                checkpoints={**section, "keep_last": 64, "anchor_every_versions": 4},
                model={"path": "recipe:countdown", "dtype": "bfloat16"},
                trainer={"learning_rate": 1e-5},  # of large models: most bfloat16 weights then keep their bits
                evaluation={"before_and_after": False},
                gateway={"enabled": True, "port": port},
            )
            done = line.succeeds("up", str(line.run_file))
        assert "the run continues without its page" in done.stdout
        assert f"gateway.port={port}" in done.stdout
        names = {
            key.rpartition("/")[2] for key in ObjectStore(section["folder"], section["object_store"]).sizes("policies")
        }
        assert {"model.safetensors", "model.safetensors.delta"} <= names
        shutil.rmtree(line.folder / "checkpoints")
        again = line.succeeds("audit", str(line.folder), "--json")
        refused = line.run("backup", str(line.folder), str(tmp_path / "copy"))
    finally:
        bucket.stop()
    verdict = json.loads(again.stdout)
    assert verdict["green"] and verdict["lost"] == [] and verdict["trained_twice"] == {}
    assert verdict["rescoring"]["tokens"] > 0 and verdict["rescoring"]["dtype"] == "bfloat16"
    assert not any(version["over_bound"] or version["skipped"] for version in verdict["rescoring"]["versions"])
    assert refused.returncode == 2 and "is an object store: copy it with that store's tools" in refused.stderr
