"""Totals of every domain of the prompts, on a real server."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.mesh import Cursor
from rollmesh.prompt_history import DomainTotals
from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh, group


async def test_a_domain_counts_groups_at_admission_and_trajectories_once_their_group_has_ended(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    assert await store.prompt_records.domain_totals() == {}
    opened = [group(index) for index in range(3)]
    domains = ("algebra", "code", "algebra")
    named = [replace(g, prompt=replace(g.prompt, domain=d)) for g, d in zip(opened, domains, strict=True)]
    after = Cursor(epoch=0, index=3)
    assert await store.leadership.admit(mesh.leader, named, Cursor(epoch=0, index=0), after) == 3
    while await store.trajectories.lease(mesh.session, 64):
        pass
    for member, (tokens, reward) in enumerate(((4, 1.0), (6, 0.0))):
        await mesh.finish(f"e0-0.{member}", 0, tokens)
        assert await mesh.score(f"e0-0.{member}", reward) == 1
    assert await store.prompt_records.domain_totals() == {
        "algebra": DomainTotals(drawn=2, completed=2, solved=1, tokens=10),
        "code": DomainTotals(drawn=1, completed=0, solved=0, tokens=0),
    }
