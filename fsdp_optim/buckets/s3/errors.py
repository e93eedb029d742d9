"""The meaning of S3's errors: which may pass, and the one line that a user reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_optim.errors import one_line

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
"""The codes of answers to credentials that have expired."""

_PASSING_STATUSES = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {  # of other statuses
    *("ConditionalRequestConflict", "OperationAborted", "PriorRequestNotComplete", "RequestTimeout"),
    *("BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
    *("RequestLimitExceeded", "RequestThrottled", "Throttling", "ThrottlingException"),
}
_OF_ACCESS = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden"}
_RIGHTS = (
    "a load needs s3:GetObject and s3:ListBucket; a save also s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and "
    "s3:ListBucketMultipartUploads"
)
_OF_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId"}
_OF_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "301", "IllegalLocationConstraintException"}


@dataclass(eq=False)
class Answered(Exception):
    """An answer of the store that is an error.

    Attributes:
        region: the region that the answer names; "" where it names none, or the region of the request.
        was_repeated: whether the request had been made before without an answer that came through; it may have succeeded then.
    """

    operation: str
    status: int
    code: str
    message: str
    region: str = ""
    was_repeated: bool = False

    def __str__(self) -> str:
        status = f" (HTTP {self.status})" if self.status and str(self.status) != self.code else ""
        return f"{self.code}{status}{': ' if self.message else ''}{self.message}"

    @property
    def words(self) -> set[str | int]:
        """The status and the code of the answer. A caller may expect either."""
        return {self.status, self.code}

    @property
    def lacks_bucket(self) -> bool:
        """Whether there is no bucket."""
        return self.code == "NoSuchBucket" or (self.operation == "head_bucket" and self.status == 404)

    @property
    def is_of_region(self) -> bool:
        """Whether the bucket is in another region. An answer to HEAD has no code but its status."""
        return self.code in _OF_REGION or (self.code == "400" and self.region != "")

    @property
    def may_have_expired(self) -> bool:
        """Whether the credentials may have expired. An answer to HEAD has no code but its status."""
        return self.code in EXPIRED or (self.code == "400" and self.operation.startswith("head_"))


def answer_of(operation: str, error: BaseException, region: str) -> Answered | None:
    """Return the answer of the store in an error of boto3; None where no answer came. `region`: the region of the request."""
    response: Mapping[str, Any] | None = getattr(error, "response", None)
    if not isinstance(response, Mapping) or "Error" not in response:
        return None
    about, meta = response["Error"], response.get("ResponseMetadata", {})
    headers = meta.get("HTTPHeaders", {})
    named = about.get("Region") or headers.get("x-amz-bucket-region") or ""
    status, code = int(meta.get("HTTPStatusCode", 0)), str(about.get("Code", "an error"))
    message, region = " ".join(str(about.get("Message", "")).split()), "" if named == region else named
    return Answered(operation, status, code, message, region, was_repeated=meta.get("RetryAttempts", 0) > 0)


def is_passing(error: BaseException, answered: Answered | None) -> bool:
    """Return whether the same request may succeed later."""
    if answered is not None:
        return answered.status in _PASSING_STATUSES or answered.code in _PASSING_CODES
    from botocore import exceptions
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    lasting = (exceptions.SSLError, exceptions.ProxyConnectionError)
    passing = (
        *(exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError, ResponseParserError),
        *(exceptions.CredentialRetrievalError, exceptions.MetadataRetrievalError),
        *(HTTPError, ConnectionError, TimeoutError),
    )
    return isinstance(error, passing) and not isinstance(error, lasting)


def _verb(operation: str) -> str:
    return " ".join(word for word in operation.split("_") if word != "v2")


def line_of_answer(bucket: str, where: str, answered: Answered) -> str:
    """Return the line that a user reads about an answer. `bucket`: its URL; `where`: the URL of the object, or of the bucket."""
    verb = _verb(answered.operation)
    if answered.lacks_bucket:
        return f"{bucket}: there is no such bucket"
    if answered.code in _OF_ACCESS:
        missing = " (without s3:ListBucket also where there is none)" if answered.operation == "head_object" else ""
        return f"{where}: may not {verb}{missing}: {_RIGHTS}; it answered {answered}"
    if answered.code in _OF_KEYS:
        return f"{where}: the store does not accept the credentials: it answered {answered}"
    if answered.is_of_region:
        region = (
            f"region {answered.region!r}: give region_name={answered.region!r}" if answered.region else "another region"
        )
        return f"{bucket}: the bucket is in {region}, in storage_options or the configuration; it answered {answered}"
    if answered.code in EXPIRED:
        return f"{where}: the credentials have expired, and so have those that were asked for again: it answered {answered}"
    return f"{where}: cannot {verb}: the store answered {answered}"


def line_of_error(bucket: str, where: str, operation: str, error: BaseException) -> str:
    """Return the line that a user reads where no answer came."""
    from botocore import exceptions

    words = one_line(error)
    if isinstance(
        error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.ProfileNotFound)
    ):
        ways = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give storage_options"
        return f"{bucket}: no credentials for S3: {words}: {ways}"
    if isinstance(error, (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError)):
        return f"{where}: the store cannot be reached, check endpoint_url: {words}"
    return f"{where}: cannot {_verb(operation)}: {type(error).__name__}: {words}"
