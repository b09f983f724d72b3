"""Check of the replayed groups of a run: every draw is repeated from the batch files that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollmesh.checkpoints.batches import BatchFooter, StoredBatch
from rollmesh.checkpoints.replay_draw import ReplayDraw
from rollmesh.config.old_logprob_methods import MOST_BATCHES, ReplayConfig, replayed_count
from rollmesh.curriculum.replay import ReplayCandidate, draw_replay, replay_candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRule:
    """Settings of a run that its draws depend on; ``replay`` None if the run replays no groups."""

    replay: ReplayConfig | None
    seed: int
    max_staleness: int

    def differences(self, draw: ReplayDraw | None) -> dict[str, tuple[object, object]]:
        """Return (recorded value, value of the run) by setting that differs."""
        if draw is None or self.replay is None:
            return {} if draw is None and self.replay is None else {"replay": (draw is not None, draw is None)}
        ours: Mapping[str, object] = self.replay.model_dump() | {
            "seed": self.seed,
            "max_staleness": self.max_staleness,
        }
        return {name: (getattr(draw, name), value) for name, value in ours.items() if getattr(draw, name) != value}


@dataclass(slots=True, kw_only=True)
class Replays:
    """Replayed groups over the batch files, read in order. They are no second training of their own batch."""

    rule: ReplayRule | None = None
    """Settings of the run; without them, draws are compared with the settings in their own file only."""
    groups: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of replayed groups by the staleness of their oldest token."""
    problems: list[str] = field(default_factory=list)
    _start: int = 1
    """First train step after the last rollback that a draw has recorded."""
    _digests: dict[int, str] = field(default_factory=dict)
    _candidates: dict[int, list[ReplayCandidate]] = field(default_factory=dict)

    def add(self, stored: StoredBatch, *, counted: bool) -> None:
        """Check the draw of a batch file; ``counted`` if its step is committed."""
        step, draw = stored.batch.train_step, stored.footer.replay
        if counted and self.rule is not None:
            for name, (recorded, ours) in self.rule.differences(draw).items():
                self.problems.append(f"train step {step} records replay with {name}={recorded}; the run has {ours}")
        if draw is not None and counted:
            self.problems += self._differences(stored.footer, draw)
            self.groups += len(draw.groups)
            drawn = set(draw.groups)
            for source in draw.sources:
                chosen = (c for c in self._candidates.get(source, ()) if (source, c.group_id) in drawn)
                for staleness in (step - 1 - candidate.oldest for candidate in chosen):
                    self.staleness[staleness] += 1
                    if self.rule is not None and staleness > self.rule.max_staleness:
                        self.problems.append(
                            f"train step {step} replayed a group of batch {source} with staleness {staleness}; "
                            f"max_staleness={self.rule.max_staleness}"
                        )
        self._digests[step] = stored.footer.payload_sha256
        self._candidates[step] = replay_candidates(stored.batch, stored.footer.version_train_steps)
        for old in [known for known in self._candidates if known <= step - MOST_BATCHES]:
            del self._candidates[old], self._digests[old]

    def _differences(self, footer: BatchFooter, draw: ReplayDraw) -> Iterator[str]:
        step = footer.train_step
        outside = [source for source in draw.sources if not step - draw.batches <= source < step]
        if outside:
            yield f"train step {step} drew from batch {outside[0]}, which is none of the {draw.batches} before it"
        window = min(draw.batches, draw.max_staleness)
        for missed in range(max(draw.first, step - window), step):
            if missed in self._digests and missed not in draw.sources:
                yield f"train step {step} did not draw from batch {missed}, which has a valid file"
        if draw.first == step:  # the first step, or the first after a rollback
            self._start = step
        if draw.first != max(step - window, self._start):
            yield f"train step {step} drew from batch {draw.first} on instead of {max(step - window, self._start)}"
        for source, digest in draw.sources.items():
            if source not in self._digests:
                yield f"train step {step} drew from batch {source}, which has no valid file"
            elif self._digests[source] != digest:
                yield f"train step {step} drew from batch {source}, whose file has other trajectories now"
        again = draw_replay(
            [candidate for source in draw.sources for candidate in self._candidates.get(source, ())],
            replayed_count(len(footer.group_ids), draw.share),
            by=draw.by,
            seed=draw.seed,
            train_step=step,
            max_staleness=draw.max_staleness,
        )
        if [(c.train_step, c.group_id) for c in again] != draw.groups:
            yield f"train step {step} replayed {len(draw.groups)} groups, which are not those that its seed draws"
