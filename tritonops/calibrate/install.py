"""Tables in the user's cache, where dispatch finds them: putting them there and taking them away."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from .. import _env
from ..dispatch import store
from ..dispatch.memo import clear_cache
from ..dispatch.table import MAX_BYTES, write_atomically
from ..dispatch.variant import OpSpec
from .raw import Paths, RawError


def installed(paths: Paths) -> Paths:
    """Where the op's files lie once they are installed."""
    return Paths(_env.cache_dir(), paths.op, paths.device)


def check(paths: Paths, spec: OpSpec) -> None:
    """Whether the table and the packed raw file that `emit` wrote belong together, and to this op and device.

    Raises:
        TableError: the table is damaged, or for another op.
        RawError: the table is for another device, or the raw file is not the one that it was made from.
        OSError: one of them cannot be read.
    """
    made = store.read(paths.table, spec)
    if (made.arch, made.sms) != (paths.device.arch, paths.device.sms):
        raise RawError(f"{paths.table} is for {made.arch}-{made.sms}, not {paths.device.table_name}")
    if made.provenance.get("sha256") != hashlib.sha256(paths.packed.read_bytes()).hexdigest():
        raise RawError(f"{paths.packed} is not the file that {paths.table} was made from; emit it again")


def install(paths: Paths) -> tuple[Path, Path]:
    """Copy a table and the packed raw file it was made from into the user's cache; this process uses it at once.

    The raw file comes first, each in one step, and of two processes one installs after the other: a table that is there
    always has its own raw file beside it, except while the pair is being replaced.

    Returns:
        The installed table and raw file.

    Raises:
        FileNotFoundError: `emit` has not written them.
        OSError: the cache cannot be written.
    """
    table, packed = paths.table.read_bytes(), paths.packed.read_bytes()
    target = installed(paths)
    target.packed.parent.mkdir(parents=True, exist_ok=True)
    with alone(target.table.parent, wait=True):
        write_atomically(target.packed, packed)
        write_atomically(target.table, table)
    clear_cache()
    return target.table, target.packed


def uninstall(paths: Paths) -> tuple[list[Path], str]:
    """Remove what `install` wrote for one op and device, and nothing else.

    Returns:
        The files removed, and why a table that is there was left, or "".

    Raises:
        OSError: they cannot be removed.
    """
    target = installed(paths)
    if not target.table.parent.is_dir():
        return [], ""
    removed = []
    with alone(target.table.parent, wait=True):
        if target.table.exists() and not _ours(target):
            return [], f"{target.table} was not installed by this command; it is left as it is"
        for path in (target.table, target.packed):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed.append(path)
    clear_cache()
    return removed, ""


def _ours(target: Paths) -> bool:
    """Whether the table is a measured one that names the raw file `install` puts beside it."""
    with open(target.table, "rb") as f:
        data = f.read(MAX_BYTES + 1)
    try:
        provenance = json.loads(data)["provenance"]
        return bool(provenance["kind"] == "measured" and provenance["raw"] == f"raw/{target.packed.name}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


@contextlib.contextmanager
def alone(directory: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a directory against other processes; False where one has it. A file system without locks goes without.

    Raises:
        OSError: there is no such directory and it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        free = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass
        yield free
    finally:
        os.close(handle)
