"""S3 and the stores that speak its protocol, through boto3: requests (client.py), errors (errors.py), the Bucket (bucket.py)."""
