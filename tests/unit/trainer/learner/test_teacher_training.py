"""Train steps that learn from the columns of teachers, beside plain loops in float64."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollmesh.errors import DataError
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, TeacherColumn, Trajectory

from ....kit.made_batches import batch_of, forked_groups, random_batch, with_teacher
from ....kit.trainer_reference import ReferenceTrainer, largest_difference
from .conftest import VERSIONS, ModelMaker, exported, make_trainer

FORKS = batch_of(*forked_groups(5, count=3))
PLAIN = random_batch(4, groups=3, members=3)


def trainer_of(folder: Path, teacher: dict[str, Any], **algorithm: Any) -> PolicyTrainer:
    """A float64 trainer with this objective; its micro-batches are small and share what begins alike."""
    objective = {"teacher": teacher, **algorithm}
    return make_trainer(folder, exact=True, tokens_per_microbatch=60, share_prefixes=True, algorithm=objective)


def by_hand(member: Trajectory, coefficient: float, discount: float) -> list[float | None]:
    """The advantages of a response by the reverse KL; None for a token of the environment."""
    ratios: list[float | None] = []
    for segment in member.segments:
        for k in range(len(segment)):
            at = len(ratios)
            if segment.behavior_logprobs is None:
                ratios.append(None)
            else:
                ratios.append(float(member.teacher.logprobs[at]) - float(segment.behavior_logprobs[k]))
    sums: list[float | None] = []
    for at, own in enumerate(ratios):
        later = [ratio for ratio in ratios[at:] if ratio is not None]
        sums.append(None if own is None else coefficient * sum(discount**k * r for k, r in enumerate(later)))
    return sums


def mean_reverse_kl(batch: Batch) -> float:
    """Mean of log mu - log T over the tokens that a policy wrote."""
    members = (t for group in batch.groups for t in group.trajectories)
    return -statistics.fmean(ratio for t in members for ratio in by_hand(t, 1.0, 0.0) if ratio is not None)


def forward_kl(row: Tensor, member: Trajectory, at: int) -> Tensor:
    """KL of the teacher's top tokens and of all others as one to the policy, whose log-probabilities are ``row``."""
    column = member.teacher
    assert column is not None and column.top_ids is not None and column.top_logprobs is not None
    kl, left, others = torch.zeros((), dtype=torch.float64), 1.0, torch.ones((), dtype=torch.float64)
    for token, logprob in zip(column.top_ids[at].tolist(), column.top_logprobs[at].tolist(), strict=True):
        kl = kl + math.exp(logprob) * (logprob - row[token])
        left, others = left - math.exp(logprob), others - row[token].exp()
    return kl + left * (math.log(left) - others.log())


class TaughtReference(ReferenceTrainer):
    """The reference with an advantage of its own for each token."""

    def __init__(self, folder: Path, teacher: dict[str, Any]) -> None:
        super().__init__(folder, 1e-2, 1.0, 10.0)
        self.teacher = {"discount": 0.0, "with_reward": False, "reverse_kl_coefficient": 0.0} | teacher
        self.forward_kls = list[float]()

    def _loss(self, member: Trajectory, advantage: float, oldest_version: int) -> Tensor:
        ids = [*member.prompt.token_ids.tolist(), *member.response_ids.tolist()]
        logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        added = by_hand(member, self.teacher["reverse_kl_coefficient"], self.teacher["discount"])
        behavior = [
            (None if s.behavior_logprobs is None else float(s.behavior_logprobs[k]), s.temperature)
            for s in member.segments
            for k in range(len(s))
        ]
        total = torch.zeros((), dtype=torch.float64) * logits.sum()
        for at, ((logprob, temperature), own) in enumerate(zip(behavior, added, strict=True)):
            if logprob is None or own is None:
                continue
            position = len(member.prompt.token_ids) + at
            row = (logits[position - 1] / temperature).log_softmax(-1)
            ratio = (row[ids[position]] - logprob).exp()
            total = total + self._token(ratio, own + advantage * self.teacher["with_reward"])
            if weight := self.teacher.get("forward_kl_coefficient"):
                kl = forward_kl(row, member, at)
                self.forward_kls.append(float(kl.detach()))
                total = total + weight * kl
        return total


@pytest.mark.parametrize("batch", [FORKS, PLAIN], ids=["shared beginnings", "environments"])
@pytest.mark.parametrize(
    "teacher",
    [
        {"reverse_kl_coefficient": 1.0},
        {"reverse_kl_coefficient": 0.3, "discount": 0.9},
        {"reverse_kl_coefficient": 0.5, "discount": 1.0, "with_reward": True},
        {"forward_kl_coefficient": 2.0},
        {"forward_kl_coefficient": 0.5, "reverse_kl_coefficient": 0.5, "with_reward": True},
    ],
)
def test_a_step_is_that_of_plain_loops(
    make_model: ModelMaker, tmp_path: Path, batch: Batch, teacher: dict[str, Any]
) -> None:
    folder, taught = make_model("qwen2"), with_teacher(batch, 1, top_k=5)
    # A group of one has no deviation for the loops; it has no advantage of the reward in the trainer either.
    taught = batch_of(*(list(g.trajectories) for g in taught.groups if len(g.trajectories) > 1))
    trainer, reference = trainer_of(folder, teacher), TaughtReference(folder, teacher)
    loss, norm = reference.step(taught)
    report = trainer.train(taught, VERSIONS)
    assert report.batch.reverse_kl == pytest.approx(mean_reverse_kl(taught), abs=1e-5)
    kls = reference.forward_kls
    assert report.policy.forward_kl == (pytest.approx(statistics.fmean(kls), rel=1e-5) if kls else None)
    assert report.loss == pytest.approx(loss, rel=1e-5, abs=1e-8)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert largest_difference(exported(trainer, tmp_path), dict(reference.model.named_parameters())) < 1e-5


@pytest.mark.parametrize("with_reward", [False, True])
def test_every_token_is_explained_by_its_own_advantage(make_model: ModelMaker, with_reward: bool) -> None:
    teacher = {"reverse_kl_coefficient": 2.0, "discount": 0.5, "with_reward": with_reward}
    batch = with_teacher(PLAIN, 2)
    rewards = [[t.shaped_reward for t in group.trajectories] for group in batch.groups]
    wanted, columns = list[float](), list[float]()
    for group, given in zip(batch.groups, rewards, strict=True):
        for member in group.trajectories:
            own = (member.shaped_reward - statistics.fmean(given)) if with_reward else 0.0
            wanted += [0.0 if value is None else value + own for value in by_hand(member, 2.0, 0.5)]
            columns += member.teacher.logprobs.tolist()
    tokens = list(trainer_of(make_model("qwen2"), teacher, advantage="dr_grpo").explain(batch, VERSIONS))
    assert [token.advantage for token in tokens] == pytest.approx(wanted, abs=1e-5)
    assert [token.teacher_logprob for token in tokens] == columns
    assert {token.reason for token in tokens if token.policy_version is None} == {"environment"}


def test_gspo_gives_every_token_its_own_advantage_times_the_ratio_of_its_answer(make_model: ModelMaker) -> None:
    trainer = trainer_of(make_model("qwen2"), {"reverse_kl_coefficient": 1.0}, loss="gspo", clip_low=1, clip_high=99)
    tokens = [t for t in trainer.explain(with_teacher(PLAIN, 2), VERSIONS) if t.policy_version is not None]
    for name in {token.trajectory_id for token in tokens}:
        mine = [token for token in tokens if token.trajectory_id == name]
        ratio = np.exp(np.mean([token.logprob - token.behavior_logprob for token in mine]))
        assert [token.weight for token in mine] == pytest.approx([ratio] * len(mine), rel=1e-5)
        assert len({token.advantage for token in mine}) == len(mine)


def test_a_trajectory_without_an_advantage_of_the_reward_has_a_pass(make_model: ModelMaker) -> None:
    batch = with_teacher(PLAIN, 3)
    equal = batch_of(*([replace(t, shaped_reward=1.0) for t in g.trajectories] for g in batch.groups))
    options = {"reverse_kl_coefficient": 1.0, "with_reward": True}
    trainer = trainer_of(make_model("qwen2"), options, skip_zero_advantage=True)
    report = trainer.train(equal, VERSIONS)
    assert report.batch.skipped_trajectories == 0 and report.grad_norm > 0


def test_a_cut_response_takes_the_beginning_of_its_column(make_model: ModelMaker) -> None:
    whole = with_teacher(PLAIN, 6)
    first = whole.groups[0].trajectories[0]
    longer = replace(first.teacher, logprobs=np.append(first.teacher.logprobs, np.float32(-1)))
    trainer = trainer_of(make_model("qwen2"), {"reverse_kl_coefficient": 1.0})
    cut = with_member(whole, replace(first, teacher=longer, cut_token_count=1))
    assert list(trainer.explain(cut, VERSIONS)) == list(trainer.explain(whole, VERSIONS))


def with_member(batch: Batch, member: Trajectory) -> Batch:
    """The batch with another first trajectory."""
    first, *groups = ([*group.trajectories] for group in batch.groups)
    return batch_of([member, *first[1:]], *groups)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            None,
            r"trajectory g0\.0: no teacher has scored it; its prompt has the domain code: .*\(teachers\.\*\.domains",
        ),
        ([-1.0], r"trajectory g0\.0: teacher large has no finite log-probability for each of \d+ tokens"),
        ([np.nan], r"teacher large has no finite log-probability"),
    ],
)
def test_a_column_that_is_missing_short_or_not_finite_is_refused_by_name(
    make_model: ModelMaker, tmp_path: Path, values: list[float] | None, problem: str
) -> None:
    batch = with_teacher(PLAIN, 6)
    first = batch.groups[0].trajectories[0]
    column = first.teacher
    if values is not None and column is not None:
        many = 1 if np.isfinite(values[0]) else first.response_token_count
        column = replace(column, logprobs=np.array(values * many, np.float32))
    broken = replace(first, teacher=column if values else None, prompt=replace(first.prompt, domain="code"))
    trainer = trainer_of(make_model("qwen2"), {"reverse_kl_coefficient": 1.0})
    before = exported(trainer, tmp_path / "before")
    with pytest.raises(DataError, match=problem):
        trainer.train(with_member(batch, broken), VERSIONS)
    assert trainer.train_step == 0
    assert largest_difference(exported(trainer, tmp_path / "after"), before) == 0


def test_forward_kl_without_top_tokens_is_refused_by_name(make_model: ModelMaker) -> None:
    trainer = trainer_of(make_model("qwen2"), {"forward_kl_coefficient": 1.0})
    one = with_teacher(PLAIN, 1, top_k=2).groups[0]
    mixed = batch_of(
        list(one.trajectories), *(list(g.trajectories) for g in with_teacher(PLAIN, 1, top_k=3).groups[1:])
    )
    for batch in (with_teacher(PLAIN, 1), mixed):
        with pytest.raises(DataError, match=r"no top tokens, or different numbers of them; .* teachers\.\*\.top_k"):
            trainer.train(batch, VERSIONS)


def test_top_tokens_are_counted_where_the_policy_sampled_one_of_them(make_model: ModelMaker) -> None:
    batch, found = with_teacher(PLAIN, 1, top_k=9), list[bool]()
    for member in (t for g in batch.groups for t in g.trajectories):
        assert member.teacher is not None and member.teacher.top_ids is not None
        tops = iter(member.teacher.top_ids.tolist())
        for segment in member.segments:
            among = [token in next(tops) for token in segment.token_ids.tolist()]
            found += among if segment.behavior_logprobs is not None else []
    report = trainer_of(make_model("qwen2"), {"forward_kl_coefficient": 1.0}).train(batch, VERSIONS)
    assert 0 < statistics.fmean(found) < 1
    assert report.batch.top_token_share == pytest.approx(statistics.fmean(found))


def test_a_teacher_is_the_reference_of_the_kl_instead_of_a_second_model(make_model: ModelMaker, tmp_path: Path) -> None:
    """Its column, which has the log-probabilities of the pinned version, gives the step of that version."""
    folder, other = make_model("qwen2"), make_model("qwen2", seed=1)
    scorer = PolicyScorer.from_folder(other, device="cpu", dtype=torch.float64)

    def scored(member: Trajectory) -> Trajectory:
        (values,) = scorer.logprobs([np.concatenate([member.prompt.token_ids, member.response_ids])])
        mine = values[len(member.prompt.token_ids) - 1 :].astype(np.float32)
        return replace(member, teacher=TeacherColumn(teacher="large", manifest_digest="0" * 64, logprobs=mine))

    batch, reports = batch_of(*([scored(t) for t in g.trajectories] for g in PLAIN.groups)), []
    for reference in ("version", "teacher"):
        algorithm = {"kl_coefficient": 0.5, "kl_reference": reference}
        kept = {0: other} if reference == "version" else {}
        trainer = make_trainer(folder, exact=True, kept=kept, algorithm=algorithm)
        reports.append(trainer.train(batch, VERSIONS))
    pinned, taught = reports
    assert taught.policy.kl_reference == pytest.approx(pinned.policy.kl_reference, rel=1e-5)
    assert taught.loss == pytest.approx(pinned.loss, rel=1e-5)
    assert taught.grad_norm == pytest.approx(pinned.grad_norm, rel=1e-5)
