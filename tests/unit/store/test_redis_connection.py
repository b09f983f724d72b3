"""Server versions, URLs and what errors become."""

from contextlib import nullcontext

import pytest
from redis import exceptions as redis_errors

from rollmesh.errors import ConfigError, Conflict, SessionLost, StoreError, StoreUnavailable
from rollmesh.store.redis_client import create_client
from rollmesh.store.redis_connection import check_version
from rollmesh.store.scripts import RunUnknown, UploadExpired, store_error

NEW = dict.fromkeys(("7.0.0", "7.2.4", "7.0.15", "8.0", "10.1.3"))
OLD = {version: f"Redis {version} is too old" for version in ("6.2.14", "5.0", "6.9.9")}
UNREADABLE = dict.fromkeys(("", "unstable", "x7.0"), "is not a version number")


@pytest.mark.parametrize(("version", "refusal"), (NEW | OLD | UNREADABLE).items())
def test_servers_before_version_7_and_versions_that_cannot_be_read_are_refused(
    version: str, refusal: str | None
) -> None:
    with nullcontext() if refusal is None else pytest.raises(StoreUnavailable, match=refusal):
        check_version(version)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (redis_errors.ResponseError("CONFLICT cursor moved script: 9f, on @user_script:12."), Conflict, "cursor moved"),
        (redis_errors.ResponseError("SESSION_LOST gone script: on @user_script:1."), SessionLost, "gone"),
        (redis_errors.ResponseError("RECOVERING admit: wait"), StoreUnavailable, "retry later"),
        (redis_errors.ResponseError("UPLOAD_EXPIRED prompt of e0-0"), UploadExpired, "prompt of e0-0"),
        (redis_errors.ResponseError("RUN_UNKNOWN init it"), RunUnknown, "init it"),
        (
            redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
            StoreUnavailable,
            "maxmemory",
        ),
        (
            redis_errors.AuthenticationError("invalid username-password pair"),
            StoreUnavailable,
            "ROLLMESH_STORE__PASSWORD",
        ),
        (redis_errors.ResponseError("NOAUTH Authentication required."), StoreUnavailable, "credentials"),
        (redis_errors.NoPermissionError("User mesh has no permissions"), StoreUnavailable, "credentials"),
        (redis_errors.ConnectionError("refused"), StoreUnavailable, "is unreachable"),
        (redis_errors.TimeoutError(), StoreUnavailable, "is unreachable: TimeoutError"),
        (
            redis_errors.ResponseError("MISCONF Errors writing to the AOF file: No space left"),
            StoreUnavailable,
            "space",
        ),
        (redis_errors.TryAgainError("Multiple keys request"), StoreUnavailable, "not the master"),
        (redis_errors.ResponseError("BUSYGROUP Consumer Group name exists"), StoreError, "BUSYGROUP"),
        (redis_errors.ResponseError("WRONGTYPE Operation"), StoreError, "Redis reports: WRONGTYPE"),
    ],
)
def test_every_refusal_becomes_its_own_error(error: redis_errors.RedisError, kind: type[StoreError], text: str) -> None:
    converted = store_error(error, "cut")
    assert type(converted) is kind
    assert text in str(converted)
    assert "user_script" not in str(converted)


def test_a_conflict_reads_as_a_sentence_without_the_name_of_a_script() -> None:
    raised = redis_errors.ResponseError(
        "CONFLICT policy version 9 has not been announced script: abc, on @user_script:12."
    )
    assert str(store_error(raised, "pin_policy")) == "policy version 9 has not been announced"


async def test_a_sentinel_url_names_hosts_service_and_database() -> None:
    client = create_client("redis+sentinel://:secret@one:26380,two/mymaster/3")
    pool = client.connection_pool
    assert pool.service_name == "mymaster"
    addresses = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(a["host"], a["port"]) for a in addresses] == [("one", 26380), ("two", 26379)]
    assert (pool.connection_kwargs["password"], pool.connection_kwargs["db"]) == ("secret", 3)
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis+sentinel://host:26379", "service"),
        ("redis+sentinel://:secret@host:port/service", "is not host:port"),
        ("redis+sentinel://host/service/first", "database 'first' is not a number"),
        ("amqp://:secret@host", "store.url"),
        ("redis://:secret/x@host/?ssl_ca_certs=x", "store.tls"),
    ],
)
def test_a_wrong_url_names_the_field_and_hides_the_password(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        create_client(url)
    assert "secret" not in str(caught.value)
