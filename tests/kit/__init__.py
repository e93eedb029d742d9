"""The common code of the tests: models, wrappings, training, oracles, comparisons, and independent readers of files.

In the processes of the tests a bucket may have any number of bytes, so that few elements already need many buckets. The least
value that users may give is put back in `tests/verbs/test_least_bucket.py`.
"""

import sys
from pathlib import Path

from fsdp_optim import options

sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugin_package"))  # a wrapper and a format, not installed

LEAST_OF_USERS = options.LEAST_BUCKET_NBYTES
options.LEAST_BUCKET_NBYTES = 1
