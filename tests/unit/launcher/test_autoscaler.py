"""Answers of Prometheus, as its HTTP API documents them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rollmesh.errors import ConfigError
from rollmesh.launcher.autoscaler import Prometheus, single_number


def vector(*values: str) -> dict[str, Any]:
    rows = [{"metric": {"at": str(at)}, "value": [1763710000.1, value]} for at, value in enumerate(values)]
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


def test_one_number_is_taken_from_a_vector_or_a_scalar() -> None:
    assert single_number(vector("0.25")) == 0.25
    assert single_number({"data": {"resultType": "scalar", "result": [1763710000.1, "3"]}}) == 3.0


@pytest.mark.parametrize("answer", [vector(), vector("1", "2"), vector("NaN"), vector("+Inf"), {"status": "error"}, []])
def test_everything_else_is_no_data(answer: Any) -> None:
    assert single_number(answer) is None


@pytest.mark.parametrize("status", [500, 503])
async def test_an_unreachable_prometheus_has_no_data_and_a_refused_query_is_an_error(status: int) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if b"bad" in request.content:
            return httpx.Response(400, json={"status": "error", "error": "parse error"})
        return httpx.Response(status, text="starting")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        prometheus = Prometheus("http://127.0.0.1:9090/", client)
        assert await prometheus.value("up") is None
        assert str(status) in prometheus.last_error
        with pytest.raises(ConfigError, match="parse error.*: bad"):
            await prometheus.value("bad")
        with pytest.raises(ConfigError, match="--prometheus 127.0.0.1"):
            Prometheus("127.0.0.1:9090", client)


async def asked(*answers: httpx.Response | httpx.HTTPError) -> tuple[list[float | None], str]:
    """Values of as many queries, and the trouble after the last one."""
    script = iter(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        reply = next(script)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        prometheus = Prometheus("http://127.0.0.1:9090", client)
        return [await prometheus.value("up") for _ in answers], prometheus.last_error


async def test_a_query_that_cannot_be_carried_out_for_a_moment_does_not_end_the_autoscaler() -> None:
    duplicate = {"status": "error", "errorType": "execution", "error": "found duplicate series for the match group"}
    values, trouble = await asked(httpx.Response(422, json=duplicate))
    assert values == [None] and "duplicate series" in trouble
    values, _ = await asked(httpx.Response(422, json=duplicate), httpx.Response(200, json=vector("1")))
    assert values == [None, 1.0]


async def test_no_data_is_no_trouble_and_a_prometheus_that_is_not_there_is_named() -> None:
    assert await asked(httpx.Response(200, json=vector())) == ([None], "")
    _, trouble = await asked(httpx.ConnectError("refused"))
    assert "http://127.0.0.1:9090" in trouble and "refused" in trouble
    _, trouble = await asked(httpx.Response(200, text="<html>"))
    assert "is not a Prometheus server" in trouble
