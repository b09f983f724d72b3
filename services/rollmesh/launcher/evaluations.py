"""Evaluations as the launcher asks for them and writes them down."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rollmesh.config import RunConfig
from rollmesh.errors import StoreError
from rollmesh.launcher.local_mesh import LocalMesh
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.store import TrajectoryStore
from rollmesh.store.types import EvalRecord, EvalRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One line of ``evaluations.jsonl``."""

    policy_version: int
    n: int
    """Scores that count."""
    mean: float
    standard_error: float
    details: dict[str, float]
    """Mean length and the like."""
    discarded: int
    when: float
    """Unix seconds."""
    seconds: float
    """From the request to the result."""

    def to_json(self) -> str:
        """The line; details stand beside the other fields."""
        record = {
            "policy_version": self.policy_version,
            "n": self.n,
            "mean": self.mean,
            "standard_error": self.standard_error,
            "discarded": self.discarded,
            "when": self.when,
            "seconds": self.seconds,
            **self.details,
        }
        return json.dumps(record)


def evaluation_request(config: RunConfig, policy_version: int) -> EvalRequest:
    """The run's fixed evaluation of one policy version; asking twice gives the same request."""
    return EvalRequest(
        evaluation_id=f"version-{policy_version}",
        policy_version=policy_version,
        prompt_count=config.evaluation.prompt_count,
        samples_per_prompt=config.evaluation.samples_per_prompt,
    )


async def evaluate_version(mesh: LocalMesh, policy_version: int) -> Evaluation:
    """Evaluate one policy version on the idle mesh, unless an earlier start already did."""
    earlier = await finished_evaluation(mesh.store, policy_version)
    if earlier is not None:
        return earlier
    await mesh.until_idle()
    await mesh.store.request_evaluation(evaluation_request(mesh.config, policy_version))

    async def answered() -> bool:
        return await finished_evaluation(mesh.store, policy_version) is not None

    await mesh.until(answered, f"the evaluation of policy version {policy_version}")
    result = await finished_evaluation(mesh.store, policy_version)
    if result is None:
        raise StoreError(f"the evaluation of policy version {policy_version} is gone from the store")
    mesh.progress.note(
        f"policy version {policy_version}: accuracy {result.mean:.3f} ± {result.standard_error:.3f} (n={result.n})"
    )
    await collect_evaluations(mesh.store, mesh.folder)
    return result


async def finished_evaluation(store: TrajectoryStore, policy_version: int) -> Evaluation | None:
    """The result for one policy version, if there is one."""
    for record in await store.evaluations():
        if record.request.policy_version == policy_version and record.result is not None:
            return _evaluation(record)
    return None


async def collect_evaluations(store: TrajectoryStore, folder: RunFolder) -> None:
    """Write every finished evaluation to ``evaluations.jsonl``, by policy version."""
    found = [_evaluation(record) for record in await store.evaluations() if record.result is not None]
    lines = [evaluation.to_json() + "\n" for evaluation in sorted(found, key=lambda e: e.policy_version)]
    folder.evaluations.write_text("".join(lines), encoding="utf-8")


def _evaluation(record: EvalRecord) -> Evaluation:
    result = record.result
    finished = record.finish_time_seconds
    if result is None or finished is None:
        raise ValueError(f"evaluation {record.request.evaluation_id} has no result yet")
    return Evaluation(
        policy_version=record.request.policy_version,
        n=result.sample_count,
        mean=result.mean,
        standard_error=result.standard_error,
        details=dict(result.details),
        discarded=result.discarded_count,
        when=finished,
        seconds=finished - record.request_time_seconds,
    )
