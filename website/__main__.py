"""Build the site into build/docs/site. Exits with 1, and says why, if anything is missing or leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from website import fetched, reference, stage

BUILD = stage.ROOT / "build" / "docs"


def main() -> int:
    found = reference.problems(stage.ROOT / "website" / "reference")
    found += stage.stage(BUILD)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "PYTHONPATH": str(stage.ROOT),
    }  # where the settings find website.docstrings
    built = subprocess.run(
        command, cwd=BUILD, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = re.sub(r"\x1b\[[\d;]*m", "", built.stdout)  # it colours what nobody sees
    print(said)
    found += [line for line in said.splitlines() if line.startswith("griffe: ")]  # it warns, and builds on
    if built.returncode == 0:
        found += fetched.problems(BUILD / "site")
    if found or built.returncode != 0:
        print(*found, "The site was not built, or has the faults above.", sep="\n", file=sys.stderr)
        return 1
    print(f"The site is in {BUILD / 'site'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
