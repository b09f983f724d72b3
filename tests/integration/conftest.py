"""Fixtures of the tests with processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .warm import close_templates


@pytest.fixture(scope="session", autouse=True)
def _templates_end_with_the_session() -> Iterator[None]:
    yield
    close_templates()
