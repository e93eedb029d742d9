"""Stores whose files are objects under keys: no folders, no rename, no writing into an object that exists.

bucket = MemoryBucket()                       # base.py: the methods of a `Bucket`
store = ObjectStore(bucket, prefix, probe)    # store.py: any bucket as a `Store` (fsdp_optim.storage.base)
opened = store.open()                         # opened.py: every object in the version that it had at first
staging = store.begin(...)                    # staging.py, saves.py: the claim of a save under way, renewed until it ends
writer = store.join(staging.address)          # writer.py, uploads.py: parts, several at the same time
store.new_file(overwrite=False)               # new_object.py: one object under the prefix itself
"""

from fsdp_optim.buckets.objects.base import ABSENT, Bucket, BucketCan, MissingObjectError, ObjectInfo, OvertakenError
from fsdp_optim.buckets.objects.keys import ObjectPlace
from fsdp_optim.buckets.objects.memory import Memory, MemoryBucket
from fsdp_optim.buckets.objects.staging import ObjectStaging
from fsdp_optim.buckets.objects.store import PART_NBYTES, ObjectStore
from fsdp_optim.buckets.objects.writer import Address, ObjectWriter

__all__ = [
    "ABSENT",
    "PART_NBYTES",
    "Address",
    "Bucket",
    "BucketCan",
    "Memory",
    "MemoryBucket",
    "MissingObjectError",
    "ObjectInfo",
    "ObjectPlace",
    "ObjectStaging",
    "ObjectStore",
    "ObjectWriter",
    "OvertakenError",
]
