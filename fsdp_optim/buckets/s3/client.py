"""Requests to an S3 store through boto3: a client per process, repeated within a stated time, with fresh credentials.

boto3 is imported when the first request is made. It refreshes credentials that it knows to expire. Requests are repeated here,
not by boto3: its retries have a quota per client, which an outage uses up, and never read on in a body that breaks off.
"""

from __future__ import annotations

import functools
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from os import getpid
from typing import Any, NoReturn, TypeVar

from fsdp_optim.buckets.objects.base import MissingObjectError
from fsdp_optim.buckets.s3.errors import (
    Answered,
    answer_of,
    is_passing,
    line_of_answer,
    line_of_error,
)
from fsdp_optim.errors import CheckpointError, pip_install, without
from fsdp_optim.storage.base import Undecided

T = TypeVar("T")

_RETRY_SECONDS = 120.0
_CONNECTIONS = 64  # at most, per process
_LONGEST_PAUSE = 10.0  # seconds
_OF_SESSION = {
    *("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_account_id", "region_name"),
    *("profile_name", "botocore_session"),
}
_OF_CLIENT = {"api_version", "use_ssl", "verify", "endpoint_url", "config"}
_OURS = {"retry_seconds", "part_nbytes"}


def _check_options(options: Mapping[str, Any]) -> None:
    known = _OF_SESSION | _OF_CLIENT | _OURS
    for name in options:
        if name not in known:
            raise CheckpointError(
                f"s3://: {name!r} is not a storage option; the options are: {', '.join(sorted(known))}"
            )
    for name in sorted(_OURS & set(options)):
        if isinstance(options[name], bool) or not isinstance(options[name], (int, float)) or options[name] <= 0:
            raise CheckpointError(f"s3://: the storage option {name} must be a number above 0, not {options[name]!r}")


@functools.lru_cache(maxsize=2)
def _descriptions(data_path: str | None) -> Any:
    """Load boto3's descriptions of services once, for all clients: they take 6 MiB and some tenths of a second.

    They hold nothing of a user and no connection, so that forked processes can share them too.
    """
    from botocore.loaders import create_loader

    loader = create_loader(data_path)
    loader.load_service_model("s3", "service-2")  # before several threads do
    return loader


@dataclass(frozen=True, repr=False)
class ProcessClient:
    """A client, the process that made it, and the secrets of its credentials."""

    client: Any
    pid: int
    secrets: tuple[str, ...]


class Clients:
    """The client of this process for some storage options. A forked process makes its own: connections cannot be shared."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        _check_options(options)
        self._options = dict(options)
        self.retry_seconds = float(options.get("retry_seconds", _RETRY_SECONDS))
        self._client: ProcessClient | None = None
        self._lock, self._lock_pid = threading.Lock(), getpid()

    def __repr__(self) -> str:
        return "Clients()"

    def get(self) -> ProcessClient:
        """Return the client of this process."""
        pid, client = getpid(), self._client
        if client is not None and client.pid == pid:
            return client
        if self._lock_pid != pid:  # another thread of the parent may have had it when this process was forked
            self._lock, self._lock_pid = threading.Lock(), pid
        with self._lock:
            if self._client is None or self._client.pid != pid:
                self._client = self._new_client(pid)
            return self._client

    def forget(self, client: ProcessClient) -> None:
        """Let the next request make a client, which asks for credentials again; unless another thread has done so."""
        with self._lock:
            if self._client is client:
                self._client = None

    def without_secrets(self, line: str) -> str:
        """Return a line without secrets."""
        client = self._client
        return re.sub(r"//[^/@\s]*@", "//", without(client.secrets if client else self._secrets(), line))

    def _secrets(self, *more: str | None) -> tuple[str, ...]:
        names = ("aws_secret_access_key", "aws_session_token")
        return tuple(str(secret) for secret in (*(self._options.get(name) for name in names), *more) if secret)

    def _new_client(self, pid: int) -> ProcessClient:
        try:
            import boto3
            from botocore.config import Config
            from botocore.session import get_session
        except ImportError:
            raise CheckpointError(f"s3://: needs boto3: {pip_install('boto3')}") from Undecided("boto3")
        config = Config(
            max_pool_connections=_CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=min(10.0, max(1.0, self.retry_seconds / 4)),
            read_timeout=min(60.0, max(1.0, self.retry_seconds / 2)),
            tcp_keepalive=True,
            response_checksum_validation="when_required",  # some servers give the checksum of the whole with a range of it
        )
        given = self._options.get("config")
        users_config = Config(**given) if isinstance(given, Mapping) else given
        config = config if users_config is None else config.merge(users_config)
        of_session = {name: value for name, value in self._options.items() if name in _OF_SESSION}
        core = of_session.setdefault("botocore_session", None) or get_session()
        session = boto3.Session(**{**of_session, "botocore_session": core})
        if of_session["botocore_session"] is None:
            core.register_component("data_loader", _descriptions(core.get_config_variable("data_path")))
        options = {name: value for name, value in self._options.items() if name in _OF_CLIENT - {"config"}}
        client = session.client("s3", config=config, **options)
        s3 = client.meta.config.s3 or {}
        if client.meta.endpoint_url.startswith("https:") and "payload_signing_enabled" not in s3:
            # TLS and the CRC protect a body already; to sign it as well would take as long as to send it.
            client.meta.config.s3 = {**s3, "payload_signing_enabled": False}
        credentials = session.get_credentials()
        frozen = credentials.get_frozen_credentials() if credentials is not None else None
        return ProcessClient(
            client, pid, self._secrets(*((frozen.secret_key, frozen.token) if frozen is not None else ()))
        )


class Requests:
    """The requests to one bucket. `where`: the URL of the bucket, for errors."""

    def __init__(self, where: str, bucket: str, clients: Clients) -> None:
        self._where, self._bucket, self._clients = where, bucket, clients

    def __repr__(self) -> str:
        return f"Requests({self._where!r})"

    def named(self, key: str | None) -> str:
        """Return the URL of an object, or of the bucket."""
        return self._where if key is None else f"{self._where}/{key}"

    def send(
        self,
        operation: str,
        key: str | None = None,
        *,
        body: memoryview | None = None,
        expected: Collection[str | int] = (),
        **arguments: Any,
    ) -> dict[str, Any]:
        """Make one request of the bucket, or of one of its objects, and return the parsed answer.

        Raises Answered for an error whose status or code is `expected`, and CheckpointError for any other one.
        """
        given = {"Bucket": self._bucket, **({} if key is None else {"Key": key}), **arguments}

        def make(client: Any) -> dict[str, Any]:
            sent = {} if body is None else {"Body": Body(body)}  # from its beginning each time
            answer: dict[str, Any] = getattr(client, operation)(**given, **sent)
            return answer

        return self.repeat(operation, key, make, expected=expected)

    def repeat(
        self,
        operation: str,
        key: str | None,
        make: Callable[[Any], T],
        *,
        expected: Collection[str | int] = (),
        progress: Callable[[], int] = int,
    ) -> T:
        """Call `make(client)` until it succeeds, fails for good, or the time is over without `progress`. Raises as `send`."""
        seconds = self._clients.retry_seconds
        began, tries, refreshed, reached = time.monotonic(), 0, False, progress()
        while True:
            process_client: ProcessClient | None = None
            try:
                process_client = self._clients.get()
                return make(process_client.client)
            except CheckpointError:
                raise
            except Exception as error:
                answered = answer_of(
                    operation, error, process_client.client.meta.region_name if process_client is not None else ""
                )
                if answered is not None and answered.may_have_expired and not refreshed and process_client is not None:
                    refreshed = True
                    self._clients.forget(process_client)
                    continue
                if progress() != reached:
                    began, tries, reached = time.monotonic(), 0, progress()
                elapsed = time.monotonic() - began
                if not is_passing(error, answered) or elapsed >= seconds:
                    if answered is not None:
                        answered.was_repeated |= tries > 0
                        if answered.words & set(expected):
                            raise answered from None
                        raise_alone(self.failure(key, answered, elapsed))
                    raise self._failure(operation, key, error, elapsed) from Undecided(operation)
            tries += 1
            pause = min(_LONGEST_PAUSE, 0.1 * 2**tries) * random.uniform(0.5, 1)
            time.sleep(max(0.0, min(pause, began + seconds - time.monotonic())))

    def failure(self, key: str | None, answered: Answered, seconds: float = 0.0) -> CheckpointError:
        """Return the one-line error for an answer that a caller had expected but cannot use."""
        failure = self._failure(answered.operation, key, answered, seconds)
        failure.__cause__ = None if answered.lacks_bucket else Undecided(answered.operation)
        return failure

    def _failure(self, operation: str, key: str | None, error: BaseException, seconds: float) -> CheckpointError:
        """`seconds`: for how long the request was repeated, if its reason may pass."""
        kind = CheckpointError
        if isinstance(error, Answered):
            line, may_pass = line_of_answer(self._where, self.named(key), error), is_passing(error, error)
            kind = MissingObjectError if error.lacks_bucket else kind
        else:
            line, may_pass = line_of_error(self._where, self.named(key), operation, error), is_passing(error, None)
        if may_pass:
            line = f"{line}; it was repeated for {seconds:.0f} s"
        return kind(self._clients.without_secrets(line))


def raise_alone(error: Exception) -> NoReturn:
    """Raise an error with its own cause, inside the handling of another one, which its traceback need not show."""
    raise error from error.__cause__


class Body:
    """Memory as a file that boto3 sends without a copy.

    `read` may give more than was asked for: the HTTP library asks for a few KiB at a time, and sends whatever it gets.
    """

    _LEAST = 1 << 20

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data.cast("B"), 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, nbytes: int | None = None) -> memoryview:
        """Return the next bytes; none at the end."""
        end = len(self._data) if nbytes is None or nbytes < 0 else self._at + max(nbytes, self._LEAST)
        block = self._data[self._at : end]
        self._at += len(block)
        return block

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position: from the beginning (0), from here (1), or from the end (2)."""
        self._at = (0, self._at, len(self._data))[whence] + offset
        return self._at
