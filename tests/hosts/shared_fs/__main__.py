"""`python -m hosts.shared_fs BACKING MOUNT [switches]`: one host's mount, until it is unmounted."""

from __future__ import annotations

from hosts.shared_fs.serving import serve
from hosts.shared_fs.switches import parse

serve(*parse())
