"""``rollmesh bench deltas``: bytes and seconds of a policy version over a slow link, as a delta and in full.

A trainer makes real updates (AdamW, learning rate 1e-6) of a model of 60 MB in bfloat16. Every version is published to
two object stores on this disk in turn, one with deltas and one without. Four nodes with caches of their own pull and
verify it at the same time over one link of 200 MB/s. Seconds run from the start of the publication until all four have
the verified folder. On one machine the nodes share its cores, which real nodes do not.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.bench.measure import Measure, at_most, compared
from rollmesh.bench.models import RandomModel
from rollmesh.bench.train import ragged_batch
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch

NODES = 4
LINK_BYTES_PER_SECOND = 200e6
RATE = 1e-6
_TOKENS = 2_048
_SECRET = b"secret of the bench of the deltas"
_SHAPE = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 8192}


def run(*, quick: bool = False) -> list[Measure]:
    """Measure 3 versions after the first one; ``quick``: one of a small model. Below 1 is better."""
    torch.set_num_threads(1)
    shape = {**_SHAPE, "num_hidden_layers": 1, "vocab_size": 96} if quick else _SHAPE
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        root = Path(folder)
        RandomModel(shape={**shape, "max_position_embeddings": 1024}).write(root / "model")
        trainer = PolicyTrainer.from_folder(
            root / "model", TrainerConfig(learning_rate=RATE), dtype="bfloat16", device="cpu"
        )
        meshes = {
            "full": _Mesh(root=root / "full", anchor_every=1),
            "delta": _Mesh(root=root / "delta", anchor_every=100),
        }
        batch = ragged_batch(seed=0, tokens=_TOKENS)
        changed: list[float] = []
        for version in range(2 if quick else 4):
            if version:
                before = _published(trainer)
                trainer.train(Batch(train_step=version, groups=batch.groups), {0: 0})
                changed.append(_changed_share(before, _published(trainer)))
            for mesh in meshes.values():
                mesh.publish(trainer, version)
    full, delta = meshes["full"], meshes["delta"]
    unit = f"seconds, published to verified on {NODES} nodes"
    return [
        Measure(name="weights that changed", value=statistics.median(changed), unit="share"),
        compared("bytes of a version", delta.byte_count, "bytes", "full", full.byte_count, (at_most("ratio", 1 / 20),)),
        compared("a version over 200 MB/s", delta.seconds, unit, "full", full.seconds),
    ]


def _published(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """Copy the weights in the publishing dtype."""
    return {name: t.to(torch.bfloat16) for name, t in trainer.state_tensors().items() if name.startswith("model.")}


def _changed_share(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    changed = sum(int((before[name] != tensor).sum()) for name, tensor in after.items())
    return changed / sum(tensor.numel() for tensor in after.values())


class _Link:
    """Link that all nodes share: a transfer ends when its bytes have had their turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, size_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / LINK_BYTES_PER_SECOND
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))


class _LinkedStore(ObjectStore):
    """Object store on this disk at the other end of a link."""

    def __init__(self, folder: Path, link: _Link) -> None:
        super().__init__(folder.as_uri(), {"auto_mkdir": True})
        self._link = link

    def get(self, key: str, target: Path) -> None:
        super().get(key, target)
        self._link.carry(target.stat().st_size)


@dataclass(eq=False, kw_only=True)
class _Mesh:
    """A trainer's store and those of the nodes, with one object store between them."""

    root: Path
    anchor_every: int
    taken: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "objects").mkdir(parents=True)
        link = _Link()
        self._trainer, *self._nodes = (
            BucketStore(
                self.root / name,
                _SECRET,
                _LinkedStore(self.root / "objects", link),
                cache_policies=3,
                anchor_every=self.anchor_every,
            )
            for name in ("trainer", *(f"node-{number}" for number in range(NODES)))
        )

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """Publish the trainer's weights and let every node open them."""
        write = trainer.copy_out().write
        started = time.monotonic()
        record = self._trainer.publish(
            session="bench",
            policy_version=version,
            train_step=version,
            parent=version - 1 if version else None,
            write=write,
            canary=[CanarySequence(token_ids=[0, 1], logprobs=[-1.0])],
        )
        with ThreadPoolExecutor(NODES) as pool:
            list(pool.map(lambda node: node.open(record), self._nodes))
        self.taken.append(time.monotonic() - started)
        self.stored.append(sum(self._trainer.objects.sizes(record.path).values()))

    @property
    def seconds(self) -> float:
        """Median of the versions after the first one, which both stores have in full."""
        return statistics.median(self.taken[1:])

    @property
    def byte_count(self) -> float:
        """Median bytes in the object store, of the versions after the first one."""
        return statistics.median(self.stored[1:])
