"""`python -m fsdp_optim`: the command line."""

import sys

from fsdp_optim.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
