import json
from pathlib import Path

from rollmesh.runtime.endpoints import published_endpoint, read_endpoints


def test_a_service_is_found_by_people_and_by_prometheus_while_it_runs(tmp_path: Path) -> None:
    with published_endpoint(tmp_path, service="reward", index=1, grpc="127.0.0.1:5", admin="127.0.0.1:6", run="mine"):
        assert [endpoint.admin for endpoint in read_endpoints(tmp_path)] == ["127.0.0.1:6"]
        (target,) = json.loads((tmp_path / "scrape" / "reward-1.json").read_text())
        assert target == {
            "targets": ["127.0.0.1:6"],
            "labels": {"run": "mine", "service": "reward", "index": "1"},
        }
    assert read_endpoints(tmp_path) == []
    assert not list((tmp_path / "scrape").iterdir())


def test_a_service_leaves_the_files_of_its_successor_alone(tmp_path: Path) -> None:
    with published_endpoint(tmp_path, service="rollout", index=0, grpc="", admin="127.0.0.1:6"):
        endpoint = json.loads((tmp_path / "services" / "rollout-0.json").read_text())
        (tmp_path / "services" / "rollout-0.json").write_text(json.dumps(endpoint | {"pid": endpoint["pid"] + 1}))
    assert (tmp_path / "services" / "rollout-0.json").exists()
    assert (tmp_path / "scrape" / "rollout-0.json").exists()
