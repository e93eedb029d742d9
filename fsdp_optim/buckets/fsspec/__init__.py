"""The file systems of fsspec as buckets: opening.py, infos.py, uploads.py, and the Bucket in bucket.py."""

from fsdp_optim.buckets.fsspec.bucket import FsspecBucket

__all__ = [
    "FsspecBucket",
]
