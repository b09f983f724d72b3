"""Errors of object stores: an outage, which is waited for, or a refusal that no retry changes, with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError

_PASSING = frozenset(
    {
        "BadDigest",
        "ExpiredToken",
        "IncompleteBody",
        "QuotaExceeded",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "TokenRefreshRequired",
        "XMinioAdminBucketQuotaExceeded",
    }
)
"""Codes of refusals that a later attempt may not meet; a full quota is one, like a full disk."""
_MANUAL = "see docs/object-stores.md"
_CHECKSUMS = (
    "if the server does not know the checksums of newer clients, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required "
    f"and AWS_RESPONSE_CHECKSUM_VALIDATION=when_required in the environment of all services ({_MANUAL})"
)
_REMEDIES = {
    301: "the bucket is in another region or at another endpoint: set AWS_DEFAULT_REGION, or endpoint_url in "
    "checkpoints.object_store",
    400: f"check the bucket's name and checkpoints.object_store; {_CHECKSUMS}",
    401: "check the credentials in the environment of all services",
    403: "check the credentials in the environment of all services, and allow them to list the bucket and to read, "
    f"write and delete its objects ({_MANUAL})",
    404: "create the bucket, or correct checkpoints.folder",
    405: f"endpoint_url in checkpoints.object_store is no object store, or one without this operation ({_MANUAL})",
    411: _CHECKSUMS,
    501: f"the server lacks a function: conditional writes (If-None-Match) are required ({_MANUAL}); {_CHECKSUMS}",
}
_REMEDY_WITHOUT_CREDENTIALS = f"set the credentials in the environment of all services ({_MANUAL})"
_REMEDY_OF_ENDPOINT = "correct endpoint_url in checkpoints.object_store, for example https://minio.example.org:9000"
_TLS_REFUSALS = {
    "CERTIFICATE_VERIFY_FAILED": "set AWS_CA_BUNDLE to the authority that signed the certificate in the environment "
    f"of all services ({_MANUAL}), and use a host name of the certificate in checkpoints.object_store",
    "WRONG_VERSION_NUMBER": "the server of endpoint_url in checkpoints.object_store does not speak TLS: use http://",
}
"""Remedies by the code of OpenSSL, which is in the text of the error of any client."""
_LOCAL_REFUSALS = {
    "NoCredentialsError": _REMEDY_WITHOUT_CREDENTIALS,
    "PartialCredentialsError": _REMEDY_WITHOUT_CREDENTIALS,
    "ProfileNotFound": _REMEDY_WITHOUT_CREDENTIALS,
    "DefaultCredentialsError": _REMEDY_WITHOUT_CREDENTIALS,
    "NoRegionError": _REMEDIES[301],
    "InvalidRegionError": _REMEDIES[301],
    "UnknownEndpointError": _REMEDY_OF_ENDPOINT,
    "EndpointProviderError": _REMEDY_OF_ENDPOINT,
    "ParamValidationError": "correct checkpoints.folder and checkpoints.object_store",
}
"""Remedies by the class of an error that a client raises before it sends a request."""


def store_error(where: str, error: BaseException, *, writing: bool = False) -> CheckpointError:
    """Convert an error of a client of an object store; ``where`` names the store and the operation.

    The reason is ``refused``, which is final, or ``unreachable``.
    """
    message = f"{where}: {str(error) or type(error).__name__}"
    remedy = refusal(error, writing=writing)
    if remedy:
        return CheckpointError(f"{message}; {remedy}", reason=Reason.REFUSED)
    return CheckpointError(message, reason=Reason.UNREACHABLE)


def refusal(error: BaseException, *, writing: bool = False) -> str:
    """Return the remedy of a refusal that no retry changes; empty for an outage, and for an object that is missing."""
    for each in _causes(error):
        code, status = _answer(each)
        if code in _PASSING:
            return ""
        if code == "NoSuchBucket" or (status == 404 and writing):
            return _REMEDIES[404]
        if status in _REMEDIES and status != 404:
            return _REMEDIES[status]
        if type(each).__name__ in _LOCAL_REFUSALS:
            return _LOCAL_REFUSALS[type(each).__name__]
        tls = next((remedy for code, remedy in _TLS_REFUSALS.items() if code in str(each)), "")
        if tls and "has expired" not in str(each):  # such a certificate is renewed
            return tls
        if isinstance(each, ValueError) and "endpoint" in str(each).lower():
            return _REMEDY_OF_ENDPOINT
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _answer(error: BaseException) -> tuple[str, int]:
    """Return code and HTTP status of the answer that a client of S3 (botocore) or Google (gcsfs) has converted."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    status = getattr(error, "code", None)
    return "", status if isinstance(status, int) else 0
