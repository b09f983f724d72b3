"""``docs/metrics.md`` from the code: every metric of every service, as its ``/metrics`` answers before any work."""

from __future__ import annotations

from textwrap import fill

from prometheus_client import Metric

from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.errors import EngineError
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.generator.engines.engine_protocol import EngineStatus
from rollmesh.generator.generator_metrics import EngineCollector, GeneratorMetrics
from rollmesh.generator.serving_state import ServingState
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.certificate_metrics import CertificateCollector
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.store_metrics import StoreCallMetrics
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.worker.worker_metrics import WorkerMetrics

_HEAD = """\
# Metrics

Written by `rollmesh metrics-table`; a test compares it with the code, and another one scrapes a run and finds every
name. Each service answers `/metrics` on its admin port (`services/<service>-<index>.json` in the run folder), beside
the standard `process_*` metrics. A policy version is a value, never a label.

[monitoring.md](monitoring.md) says how to scrape a run and lists the recording rules, alerts and dashboards. Shares and
ratios that Prometheus computes better than a service, and that the rules record:

```
# goodput
sum(rate(rollmesh_trainer_trained_tokens_total[5m]))
  / sum(rate(rollmesh_generator_generated_tokens_total[5m]))
# re-prefill share
sum(rate(rollmesh_generator_reprefill_tokens_total[5m]))
  / sum(rate(rollmesh_generator_prefill_tokens_total[5m]))
# bubble ratio; the rule sums the slots over the window as well
1 - sum(rate(rollmesh_generator_running_slot_seconds_total[5m]))
  / sum(rollmesh_generator_slots * rollmesh_generator_serving)
# trained share by length decile
rollmesh_trainer_groups_total
  / (rollmesh_trainer_groups_total + rollmesh_trainer_dropped_groups_total)
```

Per step, `metrics.jsonl` has the same numbers and those that would need a label without bound: ratio and clip
statistics by token staleness (`policy.ratio_by_staleness`), histograms of staleness and version span (`batch`), length
deciles, goodput, drops, wasted tokens by reason and the trained share by length decile (`mesh`), re-prefill share and
bubble ratio since the step before (`mesh.engines`, from what the generators register with their heartbeats).
`timeline.jsonl` has the mesh about once a second, `samples.jsonl` sample completions.

`mesh.goodput` and `rollmesh_trainer_goodput_ratio` are the goodput of the run so far: all tokens trained on
(`mesh.trained_token_total`) per token that the generators sampled (`mesh.generated_token_total`), those for evaluations
and for unrecorded calls of the gateway included, as above. The trainer keeps both totals in its state; the second one
grows by what each generator has added to the total of its process since the trainer last saw it, so that neither a
restart of one of them nor a Redis that comes back empty takes anything away. Not counted is what a generator samples in
its last seconds, after the trainer's last look (one look per `store.heartbeat_seconds`), and what it sampled while no
trainer ran if it is gone when one starts. The goodput is null (NaN) where it is not known: before the first token,
where fewer tokens are counted than were trained on, and in a run that an older release began or takes part in as a
generator. Older releases wrote trained per saved tokens there.
"""
_AGENTS = """\
With `rollout.program: agent` the gateway holds the trajectories of outside agents as a rollout worker holds its own.
It exports the worker's metrics under the same names, with its own `service` and `instance`: a sum over a run counts
both, and `service="rollout"` leaves the gateway out. They are"""


def metrics_document() -> str:
    """The whole of ``docs/metrics.md``."""
    parts = [_HEAD]
    for service, families in service_metrics().items():
        rows = [f"| `{_exported(f)}` | {f.type} | {_labels(f)} | {_text(f)} |" for f in families]
        table = ["| name | type | labels | meaning |", "|---|---|---|---|", *rows]
        parts.append(f"## {service}\n\n" + "\n".join(table) + "\n")
    names = ", ".join(f"`{name}`" for name in sorted(map(_exported, agent_metrics())))
    parts.append(fill(f"{_AGENTS} {names}.", width=120, break_long_words=False, break_on_hyphens=False) + "\n")
    return "\n".join(parts)


def agent_metrics() -> list[Metric]:
    """What the gateway of an agent run exports besides its own: the metrics of a worker."""
    metrics = Metrics("gateway")
    WorkerMetrics(metrics)
    return [family for family in metrics.registry.collect() if family.name.startswith("rollmesh_rollout_")]


def service_metrics() -> dict[str, list[Metric]]:
    """Metric families by service, in alphabetical order, without those of the Python process."""
    registries = {service: Metrics(service) for service in ("rollout", "generator", "reward", "trainer", "gateway")}
    for service, metrics in registries.items():
        metrics.registry.register(CertificateCollector(service, None))
    for service in ("rollout", "generator", "trainer", "gateway"):
        StoreCallMetrics(registries[service])
    RolloutMetrics(registries["rollout"])
    GeneratorMetrics(registries["generator"])
    registries["generator"].registry.register(EngineCollector(_not_started, ServingState()))
    RewardMetrics(registries["reward"]).expect(["countdown"])
    TrainerMetrics(registries["trainer"])
    GatewayMetrics(registries["gateway"])
    OpenAiMetrics(registries["gateway"])
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


def _text(family: Metric) -> str:
    """What a family means; a bar would end the cell of the table."""
    return family.documentation.replace("|", "\\|")


def _labels(family: Metric) -> str:
    """Label names of a family; empty cells for one without labels."""
    names = {name for sample in family.samples for name in sample.labels if name != "le"}
    return ", ".join(f"`{name}`" for name in sorted(names))
