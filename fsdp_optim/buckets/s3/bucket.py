"""Buckets of S3 and of the stores that speak its protocol, through boto3."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any

from fsdp_optim.buckets.objects.base import ABSENT, Bucket, BucketCan, MissingObjectError, ObjectInfo, OvertakenError
from fsdp_optim.buckets.s3.client import Clients, Requests, raise_alone
from fsdp_optim.buckets.s3.errors import Answered
from fsdp_optim.errors import CheckpointError

_LEAST_PART = 5 << 20
_AT_ONCE = 256 << 10  # bytes that are read from a connection at a time: they stay in the processor's cache
_KEYS_PER_DELETE = 1000
_READS = 16  # at the same time; they hold no copy
_NOT_THERE = (404, "NoSuchKey", "NotFound")
_OVERTAKEN = (412, "PreconditionFailed")
_NOT_KNOWN = (501, "NotImplemented")
_CANNOT_DELETE_MANY = (*_NOT_KNOWN, 405, "MethodNotAllowed", "MissingContentMD5")


def _least_part_of(name: str, options: Mapping[str, Any]) -> int:
    """Return the least size of a part. Raises CheckpointError for a size that S3 would refuse only when all parts are there."""
    asked = options.get("part_nbytes", _LEAST_PART)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise CheckpointError(f"{name}: part_nbytes must be a number of bytes, not {asked!r}")
    if asked < _LEAST_PART and "endpoint_url" not in options:
        raise CheckpointError(
            f"{name}: part_nbytes={asked}: S3 takes parts of at least {_LEAST_PART} bytes; smaller ones are for stores with an "
            "endpoint_url of their own"
        )
    return asked


class S3Bucket(Bucket):
    """A bucket of S3.

    Args:
        options: arguments of boto3's `Session` and `client`, such as `endpoint_url`, `region_name`, `aws_access_key_id`,
            `aws_secret_access_key`, `aws_session_token`, `profile_name`, `config` (a `botocore.config.Config` or its
            arguments); boto3 finds the others as usual. Two more: `retry_seconds`, the time for which requests are repeated
            whose failure may pass (120); `part_nbytes`, the least size of a part, for a store with another one than 5 MiB.
        clients: what makes connections; None: this bucket's own.
    """

    def __init__(
        self, bucket: str, options: Mapping[str, Any] | None = None, *, clients: Clients | None = None
    ) -> None:
        self._name = f"s3://{bucket}"
        self._requests = Requests(self._name, bucket, Clients(options or {}) if clients is None else clients)
        self._can = BucketCan(True, least_part_nbytes=_least_part_of(self._name, options or {}), most_reads=_READS)
        self._was_reached = False  # an object or a listing was seen, so the bucket is there
        self._knows_crc = True

    def __repr__(self) -> str:
        return f"S3Bucket({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def can(self) -> BucketCan:
        return self._can

    def look(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._requests.send("head_object", key, expected=_NOT_THERE)
        except Answered:
            self._check_bucket()
            return None
        self._was_reached = True
        return ObjectInfo(key, answer["ContentLength"], _version(answer), _age(answer, answer["LastModified"]))

    def _check_bucket(self) -> None:
        """Raise MissingObjectError where there is no bucket: an answer that an object is missing does not show it."""
        if not self._was_reached:
            try:
                self._requests.send("head_bucket", expected=(403,))
            except Answered:
                return  # rights to see objects, but not to see the bucket
            self._was_reached = True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for answer in self._pages(prefix):
            for entry in answer.get("Contents", ()):
                yield ObjectInfo(entry["Key"], entry["Size"], _version(entry), _age(answer, entry["LastModified"]))

    def folders(self, prefix: str) -> Iterator[str]:
        for answer in self._pages(prefix, Delimiter="/"):
            for entry in answer.get("CommonPrefixes", ()):
                yield entry["Prefix"].removesuffix("/")

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        while True:
            answer = self._requests.send("list_objects_v2", Prefix=prefix, **arguments)
            self._was_reached = True
            yield answer
            if not answer.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = answer["NextContinuationToken"]

    def read_into(self, key: str, pieces: Sequence[memoryview], offset: int, *, version: str | None = None) -> None:
        pieces = [piece.cast("B") for piece in pieces if piece.nbytes]
        if not pieces:
            self._check_version(key, version)
            return
        reading = _Reading(self._requests.named(key), pieces, offset, version)
        try:
            self._requests.repeat(
                *("get_object", key, lambda client: reading.resume(client, self._bucket_name, key)),
                expected=(*_NOT_THERE, *_OVERTAKEN, 416, "InvalidRange"),
                progress=lambda: reading.num_read,
            )
        except Answered as answered:
            raise_alone(self._no_read(key, answered, reading))

    @property
    def _bucket_name(self) -> str:
        return self._name.removeprefix("s3://")

    def _check_version(self, key: str, version: str | None) -> None:
        info = self.look(key)
        if info is None:
            raise MissingObjectError(f"{self._requests.named(key)}: there is no such object")
        if version not in (None, info.version):
            raise OvertakenError(f"{self._requests.named(key)}: was written again since it was listed")

    def _no_read(self, key: str, answered: Answered, reading: _Reading | None = None) -> CheckpointError:
        """Return the error for an answer that is no object."""
        where = self._requests.named(key)
        if answered.code == "NoSuchBucket":
            return self._requests.failure(key, answered)
        if answered.status == 404:
            return MissingObjectError(f"{where}: there is no such object")
        if answered.status == 412:
            return OvertakenError(f"{where}: was written again since it was listed")
        if reading is not None and answered.status == 416:
            return CheckpointError(f"{where}: ends before byte {reading.offset}: it was cut short")
        return self._requests.failure(key, answered)

    def read(self, key: str) -> tuple[bytes, str]:
        def get(client: Any) -> tuple[bytes, str]:
            answer = client.get_object(Bucket=self._bucket_name, Key=key)
            with answer["Body"] as _:
                return answer["Body"].read(), _version(answer)

        try:
            return self._requests.repeat("get_object", key, get, expected=_NOT_THERE)
        except Answered as answered:
            raise_alone(self._no_read(key, answered))

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> str:
        try:
            answer, _ = self._send(
                "put_object", key, memoryview(data), _condition(only_if), expected=(*_OVERTAKEN, *_NOT_THERE)
            )
        except Answered as answered:
            if answered.was_repeated and answered.status == 412:
                with contextlib.suppress(MissingObjectError):
                    there, version = self.read(key)
                    if there == data:
                        return version  # the first attempt had succeeded, but its answer was lost
            raise_alone(self._no_put(key, answered, only_if))
        return _version(answer)

    def _no_put(self, key: str, answered: Answered, only_if: str | None) -> CheckpointError:
        where = self._requests.named(key)
        gone = answered.status == 404 and answered.code not in ("NoSuchBucket", "NoSuchUpload")
        if only_if is not None and (answered.status == 412 or gone):
            what = "there is an object already" if only_if == ABSENT else "the object was written again, or removed"
            return OvertakenError(f"{where}: {what}: another process was faster")
        return self._requests.failure(key, answered)

    def _send(
        self,
        operation: str,
        key: str,
        data: memoryview,
        condition: Mapping[str, str] | None = None,
        *,
        expected: Collection[str | int] = (),
        **arguments: Any,
    ) -> tuple[dict[str, Any], str]:
        """Send bytes with a checksum that the store verifies; the answer and the CRC.

        A store that does not know the condition gets the bytes without it, and one that does not know CRC32 gets an MD5.
        """
        crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        ways = [
            (given, by) for by in ((True, False) if self._knows_crc else (False,)) for given in (condition or {}, {})
        ]
        for given, by_crc in dict.fromkeys((tuple(given.items()), by) for given, by in ways):
            sums = {"ChecksumCRC32": crc} if by_crc else {"ContentMD5": _md5(data)}
            try:
                answer = self._requests.send(
                    *(operation, key),
                    expected=(*_NOT_KNOWN, *expected),
                    body=data,
                    **{**sums, **dict(given), **arguments},
                )
            except Answered as answered:
                if answered.status != 501:
                    raise
                refused = answered
                continue
            self._knows_crc = by_crc
            return answer, crc if by_crc else ""
        raise self._requests.failure(key, refused)

    def begin_upload(self, key: str) -> str:
        if self._knows_crc:
            try:
                answer = self._requests.send(
                    "create_multipart_upload", key, expected=_NOT_KNOWN, ChecksumAlgorithm="CRC32"
                )
                return str(answer["UploadId"])
            except Answered:
                self._knows_crc = False
        return str(self._requests.send("create_multipart_upload", key)["UploadId"])

    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        answer, crc = self._send("upload_part", key, data, UploadId=upload, PartNumber=number + 1)
        return f"{data.nbytes} {crc or '-'} {answer['ETag']}"

    def end_upload(self, key: str, upload: str, receipts: Sequence[str], *, only_if: str | None = None) -> str:
        if not receipts:  # S3 knows no upload without parts
            version = self.put(key, b"", only_if=only_if)
            self.drop_upload(key, upload)
            return version
        parts, nbytes = [], 0
        for number, receipt in enumerate(receipts, 1):
            size, crc, etag = receipt.split(" ", 2)
            parts.append({"PartNumber": number, "ETag": etag, **({} if crc == "-" else {"ChecksumCRC32": crc})})
            nbytes += int(size)
        began = time.monotonic()
        try:
            version = self._complete(key, upload, parts, _condition(only_if))
        except Answered as answered:
            info = self.look(key) if answered.was_repeated else None
            if info is not None and info.nbytes == nbytes and info.age <= time.monotonic() - began + 2:
                return info.version  # the first attempt had succeeded, but its answer was lost
            raise_alone(self._no_put(key, answered, only_if))
        info = self.look(key)  # some stores list another ETag than they answer here
        return info.version if info is not None and info.nbytes == nbytes else version

    def _complete(self, key: str, upload: str, parts: Sequence[Mapping[str, Any]], condition: Mapping[str, str]) -> str:
        given: dict[str, Any] = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        expected = (*_OVERTAKEN, *_NOT_THERE, "NoSuchUpload")
        if condition:
            try:
                expected_here = (*_NOT_KNOWN, *expected)
                return _version(
                    self._requests.send(
                        "complete_multipart_upload", key, expected=expected_here, **{**given, **condition}
                    )
                )
            except Answered as answered:
                if answered.status != 501:
                    raise
        return _version(self._requests.send("complete_multipart_upload", key, expected=expected, **given))

    def drop_upload(self, key: str, upload: str) -> None:
        try:
            self._requests.send("abort_multipart_upload", key, expected=("NoSuchUpload", 404), UploadId=upload)
        except Answered as answered:
            if answered.code == "NoSuchBucket":
                raise_alone(self._requests.failure(key, answered))

    def uploads(self, prefix: str) -> Iterator[ObjectInfo]:
        after: dict[str, Any] = {}
        while True:
            try:
                answer = self._requests.send(
                    "list_multipart_uploads", Prefix=prefix, expected=("NoSuchUpload", *_NOT_KNOWN), **after
                )
            except Answered:  # so rclone says that there is none; another store may not list them at all
                return
            for entry in answer.get("Uploads", ()):
                if entry["Key"].startswith(prefix):
                    yield ObjectInfo(entry["Key"], 0, entry["UploadId"], _age(answer, entry["Initiated"]))
            if not answer.get("IsTruncated"):
                return
            after = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(keys)
        while some := list(islice(left, _KEYS_PER_DELETE)):
            self._delete(some)

    def _delete(self, keys: Sequence[str]) -> None:
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            answer = self._requests.send("delete_objects", Delete=objects, expected=_CANNOT_DELETE_MANY)
        except Answered:
            for key in keys:
                self._delete_one(key)
            return
        for error in answer.get("Errors", ()):
            if error.get("Code") not in ("NoSuchKey", "404"):
                self._delete_one(error["Key"])  # repeats errors that may pass, and has the words for the others

    def _delete_one(self, key: str) -> None:
        try:
            self._requests.send("delete_object", key, expected=("NoSuchKey",))
        except Answered:
            return


class _Reading:
    """A range of an object on its way into pieces of memory; it can resume where a body ended too early."""

    def __init__(self, where: str, pieces: Sequence[memoryview], offset: int, version: str | None) -> None:
        self._where, self._pieces, self._version, self.offset = where, pieces, version, offset
        self._nbytes = sum(len(piece) for piece in pieces)
        self.num_read = 0

    def resume(self, client: Any, bucket: str, key: str) -> None:
        """Make one request for the missing bytes."""
        start, wanted = self.offset + self.num_read, self._nbytes - self.num_read
        match = _condition(self._version)
        answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{start + wanted - 1}", **match)
        body = answer["Body"]
        try:
            if self._version not in (None, _version(answer)):  # not every store knows the condition
                raise OvertakenError(f"{self._where}: was written again since it was listed")
            self._version = _version(answer)  # of one object, however often it is asked for
            given = answer["ContentLength"]
            if start > 0 and "ContentRange" not in answer:
                raise CheckpointError(f"{self._where}: the store gives the whole object for a range of it")
            if given < wanted:
                raise CheckpointError(f"{self._where}: ends at byte {start + given}: it was cut short")
            self._fill(body)
        finally:
            body.close()

    def _fill(self, body: Any) -> None:
        done = 0
        for piece in self._pieces:
            at = max(0, self.num_read - done)
            while at < len(piece):
                num_read = body.readinto(piece[at : at + _AT_ONCE])
                if not num_read:
                    raise ConnectionError("the body of an answer ended too early")
                at += num_read
                self.num_read += num_read
            done += len(piece)


def _condition(only_if: str | None) -> dict[str, str]:
    if only_if is None:
        return {}
    return {"IfNoneMatch": "*"} if only_if == ABSENT else {"IfMatch": f'"{only_if}"'}


def _version(answer: Mapping[str, Any]) -> str:
    """Return the ETag without its quotes, which some stores leave out of listings."""
    return str(answer["ETag"]).strip('"')


def _md5(data: memoryview) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _age(answer: Mapping[str, Any], written: datetime) -> float:
    """Seconds since a time of the store, by its own clock; 0 where its answer has no date: our clock may show anything."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return max(0.0, (parsedate_to_datetime(date) - written).total_seconds()) if date else 0.0
