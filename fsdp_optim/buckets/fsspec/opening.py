"""From a URL to a file system of fsspec. Nothing of fsspec is imported before a URL needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_optim.errors import CheckpointError, causes_of, one_line, pip_install, without, wrong_use
from fsdp_optim.storage.base import Undecided

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")
_SECRET = re.compile(r"secret|token|passw|key|credential|signature|sas|connection_string|account_key", re.IGNORECASE)
_LEAST_SECRET = 4  # letters; a shorter word is no secret, and could be part of any other word


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into the name of a bucket (the URL of the folder, without a password) and the key of a checkpoint in it."""
    matched = _URL.fullmatch(url.rstrip("/"))
    if matched is None:
        raise CheckpointError(f"{url}: is not a URL, such as gs://bucket/run/step-1000")
    if matched[1] in ("file", "local") and not matched[2].startswith("/"):
        raise CheckpointError(f"{url}: a URL of a file has three slashes: {matched[1]}:///{matched[2]}")
    name, slash, prefix = _PASSWORD.sub(r"\1@", matched[0]).rpartition("/")
    if not slash or name.endswith(":/"):
        return matched[0], ""
    return name, prefix


def file_system_at(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Raises CheckpointError for an unknown scheme and for a missing
    package.

    The file system is not shared with other users of fsspec in this process, and keeps no listings.
    """
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import available_protocols, known_implementations
    except ImportError as error:
        raise _lacking(scheme, "fsspec", error) from Undecided(str(error))
    try:
        fs, path = url_to_fs(url, **{**options, "skip_instance_cache": True})
    except ImportError as error:
        known = known_implementations.get(scheme, {}).get("class", "")
        package = known.partition(".")[0]
        if package in ("", "fsspec"):
            names = [cause.name for cause in causes_of(error) if isinstance(cause, ImportError) and cause.name]
            package = names[0].partition(".")[0] if names else ""
        raise _lacking(scheme, package, error) from Undecided(str(error))
    except ValueError as error:
        if scheme in available_protocols():
            raise _refused(url, error, options) from error
        schemes = "one of fsspec's, such as gs, az, hf, file or memory, or s3"
        raise wrong_use(f"{scheme}://: is not the scheme of a store that is known: give {schemes}") from error
    except OSError as error:
        raise _refused(url, error, options) from Undecided(str(error))
    except Exception as error:
        raise _refused(url, error, options) from error
    listings = getattr(fs, "dircache", None)
    if listings is not None:
        listings.use_listings_cache = False  # not all file systems take it as an option
    return fs, path


def is_seen_at_its_end(file: Any) -> bool:
    """Return whether a file that is open for writing is seen only when it is complete, as in object stores."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)


def is_local(fs: Any) -> bool:
    """Return whether the files are on this machine, or mounted on it."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def _lacking(scheme: str, package: str, error: ImportError) -> CheckpointError:
    if package:
        return CheckpointError(f"{scheme}://: needs the package {package}: {pip_install(package)}")
    return CheckpointError(f"{scheme}://: needs a package that is not installed: {one_line(error)}")


def _refused(url: str, error: Exception, options: Mapping[str, Any]) -> CheckpointError:
    name = _PASSWORD.sub(r"\1@", url)
    words = without(secrets_in(options), one_line(error))
    return CheckpointError(f"{name}: cannot be opened with these storage_options: {type(error).__name__}: {words}")


def secrets_in(options: object, name: str = "") -> Iterator[str]:
    """Yield the words among options that must not be in an error: passwords, keys, tokens."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from secrets_in(value, f"{name} {key}")
    elif isinstance(options, str) and len(options) >= _LEAST_SECRET and _SECRET.search(name):
        yield options
