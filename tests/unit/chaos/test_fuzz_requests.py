"""Random requests are repeatable, and those with a lasting effect are left out."""

from __future__ import annotations

import random

import pytest

from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import reward_service_pb2 as reward

from ...fuzz.messages import Values
from ...fuzz.ports import may_send

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
    assert not any(may_send("Drain", kind, data, random.Random(seed)) for seed in range(200))
