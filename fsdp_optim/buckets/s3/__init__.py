"""S3 and the stores that speak its protocol, through boto3: requests (client.py), errors (errors.py), the Bucket (bucket.py)."""

from fsdp_optim.buckets.s3.bucket import S3Bucket
from fsdp_optim.buckets.s3.client import Clients

__all__ = ["Clients", "S3Bucket"]
