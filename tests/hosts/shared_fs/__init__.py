"""A file system that several mounts share, one for each host, and that shows what network file systems may do.

It speaks with Linux's /dev/fuse itself: no libfuse and no binding of it. A binding by paths cannot tell a file from the one
that has replaced it on another host, and none of those by inodes has locks.
"""

from __future__ import annotations

from hosts.shared_fs.mounting import Mount, command, mounted, why_not

__all__ = ["Mount", "command", "mounted", "why_not"]
