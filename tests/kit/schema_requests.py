"""Requests generated from an OpenAPI document, and the checks that every answer has to pass."""

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi import checks as openapi_checks

EXAMPLES = 12
"""Per operation."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def not_a_failure(ctx: Any, response: Any, case: Any) -> None:
    """Every 5xx but 503, which says when to try again, is a fault."""
    if response.status_code == 503 and "Retry-After" in {name.title() for name in response.headers}:
        return
    checks.not_a_server_error(ctx, response, case)


PROMISED: list[CheckFunction] = [
    not_a_failure,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]


def ask_everything(
    document: str, token: str, prefix: str, fixed: dict[str, Any] | None = None, *, accepts_valid: bool = True
) -> int:
    """Send generated requests to every operation below ``prefix`` but the endless one; returns how many operations.

    ``document``: the URL of the OpenAPI document.

    ``fixed``: fields that a generated body gets where it is an object, so that some requests come further than the
    first refusal.

    ``accepts_valid`` is False for an API whose clients expect a 400 that depends on more than the request, such as a
    prompt that is longer than the model's context.
    """
    promised = [*PROMISED, *([openapi_checks.positive_data_acceptance] if accepts_valid else [])]
    schema = schemathesis.openapi.from_url(document)
    schema = schema.include(path_regex=f"^{prefix}").exclude(path="/api/v1/events")
    count = asked = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        count += 1

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),  # an answer depends on the state of the run, so that shrinking proves nothing
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            nonlocal asked
            asked += 1
            if isinstance(case.body, dict):
                case.body |= {name: value for name, value in (fixed or {}).items() if name in case.body}
            case.call_and_validate(headers={"Authorization": f"Bearer {token}"}, checks=promised, timeout=120)

        ask()
    print(f"{prefix}: {count} operations, {asked} requests, every answer as documented")
    return count


def wrong_methods(document: str, token: str, prefix: str) -> list[str]:
    """Send every method that a path does not have; returns what is wrong with the answers."""
    paths = httpx.get(document, timeout=120).json()["paths"]
    faults = []
    with httpx.Client(
        base_url=httpx.URL(document).join("/"), headers={"Authorization": f"Bearer {token}"}, timeout=120
    ) as client:
        for path, operations in paths.items():
            if not path.startswith(prefix):
                continue
            documented = {method.upper() for method in operations}
            for method in sorted(set(METHODS) - documented):
                answer = client.request(method, path.replace("{version}", "0").lstrip("/"))
                allowed = set(answer.headers.get("Allow", "").split(", "))
                if answer.status_code != 405 or allowed != documented:
                    faults.append(f"{method} {path}: {answer.status_code}, Allow: {allowed}, documented: {documented}")
    return faults
