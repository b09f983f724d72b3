"""Random requests of the fuzz bench: they are repeatable, and orders with a lasting meaning are left out."""

from __future__ import annotations

import random

import pytest

from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import reward_service_pb2 as reward

from ...fuzz.fuzz_grpc import may_send_grpc
from ...fuzz.fuzz_http import may_send_http
from ...fuzz.fuzz_values import Values

MESSAGES = (generation.GenerateRequest, generation.InterruptRequest, generation.LoadPolicyRequest, reward.ScoreRequest)


def drawn(seed: int) -> list[bytes]:
    values = Values(random.Random(seed), {"temperature": (1.0,)}, 0.3)
    return [values.message(kind).SerializeToString(deterministic=True) for kind in MESSAGES]


def test_messages_are_equal_for_equal_seeds_and_cover_every_field() -> None:
    assert drawn(3) == drawn(3)
    drawn_messages = [generation.GenerateRequest.FromString(drawn(seed)[0]) for seed in range(60)]
    set_fields = {field.name for message in drawn_messages for field, _ in message.ListFields()}
    assert set_fields == set(generation.GenerateRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x08\x01"])
def test_a_drain_is_never_sent_with_the_right_token(data: bytes) -> None:
    kind = generation.DrainRequest.DESCRIPTOR
    assert not any(may_send_grpc("Drain", kind, data, random.Random(seed)) for seed in range(200))


@pytest.mark.parametrize(
    ("path", "target", "body"),
    [
        ("/api/v1/policies/{version}/rollback", "/api/v1/policies/0/rollback", b""),
        ("/api/v1/policies/{version}/rollback", "/api/v1/policies/-0.0/rollback", b""),
        ("/api/v1/policies/{version}/rollback", "/api/v1/policies/%201e0/rollback", b""),
        ("/api/v1/scale", "/api/v1/scale", b'{"service": "generator", "replicas": 0}'),
    ],
)
def test_a_rollback_or_scaling_that_could_be_carried_out_is_never_asked(path: str, target: str, body: bytes) -> None:
    assert not any(may_send_http("POST", path, target, body, random.Random(seed)) for seed in range(200))


def test_refusable_orders_are_asked() -> None:
    rng = random.Random(0)
    assert may_send_http("POST", "/api/v1/policies/{version}/rollback", f"/api/v1/policies/{2**62}/rollback", b"", rng)
    assert may_send_http("POST", "/api/v1/scale", "/api/v1/scale", b'{"service": "redis"}', rng)
