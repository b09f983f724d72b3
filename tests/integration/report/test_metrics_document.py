import re
from pathlib import Path

from docs.build.metrics import metrics_document, service_metrics

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_committed_table_is_that_of_the_code() -> None:
    assert DOCUMENT.read_text() == metrics_document(), "run: python -m docs.build.metrics"


def test_every_row_has_four_cells_and_the_metrics_of_an_agent_run_are_told_of() -> None:
    text = DOCUMENT.read_text()
    for row in (line for line in text.splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) == 5, row
    agents = text.partition("## agents")[2]
    assert "`rollmesh_rollout_in_flight_trajectories`" in agents
    assert "`rollmesh_rollout_leader`" not in agents


def test_names_follow_the_rules() -> None:
    for service, families in service_metrics().items():
        for family in families:
            # The gateway served the API of the agents once, and dashboards out there read these names.
            prefix = "rollmesh_(agents|gateway_openai)" if service == "agents" else f"rollmesh_{service}"
            assert re.fullmatch(rf"{prefix}_[a-z0-9_]+", family.name)
            assert family.documentation.endswith(".")
            assert not {"trajectory", "group", "policy_version", "version"} & _labels(family) or family.name.endswith(
                "build_info"
            )


def test_every_label_set_exists_before_its_first_event() -> None:
    # What a start measures is not known before it, and no run needs a certificate.
    late = {"rollmesh_reward_isolation_enforced"}
    for service, families in service_metrics().items():
        guarded = {f"rollmesh_{service}_certificate_{end}_timestamp_seconds" for end in ("start", "expiry")}
        for family in families:
            assert bool(family.samples) != (family.name in late | guarded), f"{family.name}: {family.samples}"


def test_every_service_says_when_it_last_did_something_and_counts_failures_beside_attempts() -> None:
    for service, families in service_metrics().items():
        names = {family.name for family in families}
        assert f"rollmesh_{service}_build_info" in names
        assert any(name.endswith("_timestamp_seconds") and "_certificate_" not in name for name in names)


def _labels(family) -> set[str]:
    return {name for sample in family.samples for name in sample.labels}
