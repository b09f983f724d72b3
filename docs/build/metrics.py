"""Write docs/metrics.md, every metric of every service as exported at startup: ``python -m docs.build.metrics``."""

from prometheus_client import Metric

from docs.build.page_text import templates, write_pages
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.errors import EngineError
from rollmesh.gateway.events import GatewayMetrics
from rollmesh.generator.engines.engine_protocol import EngineStatus
from rollmesh.generator.generator_metrics import EngineCollector, GeneratorMetrics
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Waits
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.service_host import CertificateCollector
from rollmesh.store.redis_connection import StoreCallObserver
from rollmesh.teacher.teacher_service import TeacherMetrics
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.worker.worker_metrics import WorkerMetrics

_SERVICES = ("rollout", "generator", "reward", "teacher", "trainer", "gateway", "agents")


def metrics_document() -> str:
    """Generate ``docs/metrics.md``."""
    environment = templates()
    environment.filters.update(exported=_exported, labels=_labels)
    template = environment.get_template("metrics.md.j2")
    return template.render(services=service_metrics(), agent_metrics=agent_metrics()).rstrip("\n") + "\n"


def agent_metrics() -> list[Metric]:
    """Collect the worker metrics that the agents service exports additionally with rollout.program=agent."""
    metrics = Metrics("agents")
    WorkerMetrics(metrics)
    return [family for family in metrics.registry.collect() if family.name.startswith("rollmesh_rollout_")]


def service_metrics() -> dict[str, list[Metric]]:
    """Collect the metric families by service, in alphabetical order, without those of the Python process."""
    registries = {service: Metrics(service) for service in _SERVICES}
    for service, metrics in registries.items():
        metrics.registry.register(CertificateCollector(service, None))
    for service in ("rollout", "generator", "trainer", "gateway", "agents"):
        StoreCallObserver(Waits(), registries[service])
    RolloutMetrics(registries["rollout"])
    GeneratorMetrics(registries["generator"])
    registries["generator"].registry.register(EngineCollector(_not_started, lambda: False))
    RewardMetrics(registries["reward"]).expect(["countdown"])
    TeacherMetrics(registries["teacher"], "NAME")
    TrainerMetrics(registries["trainer"])
    GatewayMetrics(registries["gateway"])
    OpenAiMetrics(registries["agents"])
    for service in ("gateway", "agents"):
        RequestMetrics(registries[service])
    return {
        service: sorted(
            (f for f in metrics.registry.collect() if f.name.startswith("rollmesh_")), key=lambda family: family.name
        )
        for service, metrics in registries.items()
    }


def _not_started() -> EngineStatus:
    raise EngineError("not started")


def _exported(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels(family: Metric) -> str:
    names = {name for sample in family.samples for name in sample.labels if name != "le"}
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    write_pages({"metrics.md": metrics_document()})
