"""Checkpoints in object stores. Nothing in the core imports this package: stores are found by the scheme of a URL.

objects/                     any `Bucket` as a `Store`: leases, parts, versions; and a bucket in memory
s3/, fsspec/                 buckets of S3 and of every file system of fsspec
schemes.py                   the scheme of a URL -> a bucket, `file://` too; boto3 and fsspec are imported when a URL needs them
cached.py, blocks.py         local_cache=: blocks of remote files, kept in a folder of this machine
"""
