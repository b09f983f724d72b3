from pathlib import Path

from rollmesh.runtime.metrics import Metrics
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics


def shown(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"rollmesh_trainer_checkpoint_{name}") or 0.0


def test_the_disk_of_the_checkpoints_is_shown_and_an_unreachable_one_keeps_its_figures(tmp_path: Path) -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    trainer.disk.observe(tmp_path)
    free, size = shown(metrics, "free_bytes"), shown(metrics, "disk_bytes")
    assert 0 < free <= size
    trainer.disk.observe(tmp_path / "gone")
    assert (shown(metrics, "free_bytes"), shown(metrics, "disk_bytes")) == (free, size)
