"""The file systems of fsspec as buckets: opening.py, infos.py, uploads.py, and the Bucket in bucket.py."""
