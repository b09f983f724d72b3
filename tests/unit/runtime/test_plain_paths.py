"""Paths as clients build them from a base URL."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rollmesh.runtime.api_app import PlainPaths


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = FastAPI()

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, str]:
        return {"name": name}

    @app.get("/page/")
    def page() -> str:
        return "page"

    app.add_middleware(PlainPaths, prefix="/v1")
    with TestClient(app, follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/v1/models/a", "//v1/models/a", "/v1//models/a", "/v1/models/a/", "///v1//models//a//"]
)
def test_a_base_url_that_ends_in_a_slash_leads_to_the_same_route(client: TestClient, path: str) -> None:
    answer = client.get(f"http://testserver{path}?x=//")
    assert (answer.status_code, answer.json()) == (200, {"name": "a"})


def test_an_encoded_slash_stays_part_of_its_parameter(client: TestClient) -> None:
    assert client.get("/v1//models/a%2F%2Fb%20c").json() == {"name": "a//b c"}


def test_paths_outside_of_the_api_keep_their_last_slash(client: TestClient) -> None:
    assert client.get("/page/").json() == "page"
