"""Every environment variable tritonops reads, in one place.

Each function reads the variable when it is called, so a test or a launcher may set it at any time;
decisions already remembered are dropped by ``tritonops.clear_cache()``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLES = {
    "TRITONOPS_TABLE_DIR": "directory searched first for dispatch tables",
    "TRITONOPS_CACHE_DIR": "directory for the user's own tables; else XDG_CACHE_HOME, ~/.cache, temp",
    "TRITONOPS_LOG": "'decisions' logs each distinct decision once, at INFO on logger 'tritonops'",
    "TRITON_INTERPRET": "Triton's own switch; when 1, Triton variants run on CPU tensors",
}

_TRUE = frozenset({"1", "true", "on", "yes", "y"})


def interpret() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def log_decisions() -> bool:
    return "decisions" in os.environ.get("TRITONOPS_LOG", "").split(",")


def table_dir() -> Path | None:
    value = os.environ.get("TRITONOPS_TABLE_DIR")
    return Path(value) if value else None


def cache_dir() -> Path:
    value = os.environ.get("TRITONOPS_CACHE_DIR")
    if value:
        return Path(value)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):  # "must be absolute", else ignored: XDG Base Directory Specification 0.8
        return Path(xdg) / "tritonops"
    try:
        return Path.home() / ".cache" / "tritonops"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"tritonops-{os.getuid()}"
