"""A generator service in front of an SGLang server of its own, with the real policy watcher and registry."""

import numpy as np
import pytest

from rollmesh.errors import DataError, GenerationRefused
from rollmesh.types import FinishReason

from ...kit.generation import prompt_ids
from ...sglang_cpu.server import START_SECONDS
from ..generator.generator_run import make_call

pytestmark = [pytest.mark.long, pytest.mark.slow]

SERVERS = ["stand_in", "real"]


async def begun(run, streams, chunks=2):
    async def there() -> bool:
        return all(len(s.chunks) >= chunks or s.task.done() for s in streams)

    await run.until("the first chunks", there)


@pytest.mark.parametrize("which", SERVERS)
async def test_versions_follow_each_other_under_load_and_a_failed_canary_leaves_no_token(make_run, request, which):
    run = await make_run(request.getfixturevalue(which))
    await run.publish(0)
    generator = run.start()
    (record,) = await run.serving(0, seconds=START_SECONDS)

    with pytest.raises(DataError, match=r"context_ids\[0\]=99"):
        await run.stream(record, make_call(context=np.array([99], np.int32))).end()

    newer = [await run.prepare(version) for version in (1, 2)]  # the server decodes while one is written
    count, budget = (32, 200) if which == "real" else (12, 150)  # the stand-in decodes one row at a time
    calls = [make_call(f"t{i}", prompt_ids(i), max_new_token_count=budget) for i in range(count)]
    streams = [run.stream(record, call) for call in calls]
    for record_of_version in newer:
        await begun(run, streams)
        await run.announce(record_of_version)
        await run.serving(record_of_version.policy_version)
    for stream in streams:
        assert await stream.end() is FinishReason.LENGTH
        assert len(stream.tokens) == budget
        versions = [c.policy_version for c in stream.chunks]
        assert versions == sorted(versions)
        stream.check_pure(run.models)
    assert set().union(*(s.versions for s in streams)) >= {0, 2}

    streams = [run.stream(record, call) for call in calls]
    await begun(run, streams)
    await run.publish(3, canary_error=0.5)
    await run.out_of_rotation()
    for stream in streams:
        assert await stream.end() is FinishReason.LENGTH
        assert stream.versions == {2}
        stream.check_pure(run.models)
    with pytest.raises(GenerationRefused, match="canary"):
        await run.stream(record, make_call("late")).end()

    await run.publish(4)
    await run.serving(4)
    fresh = run.stream(record, make_call("fresh"), min_version=4)
    await fresh.end()
    assert fresh.versions == {4}
    await generator.stop()
    assert await run.store.generators.live() == []
