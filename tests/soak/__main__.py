"""`python -m tests.soak`, with SOAK_SECONDS and SEED in the environment. SOAK_ONLY and SOAK_CASE run one failed case again,
SOAK_CASES ends each torture after that many cases, and SOAK_PATIENCE multiplies all time limits on a busy machine."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from soak.driver import main  # noqa: E402

if __name__ == "__main__":  # ranks import this file again
    sys.exit(main())
