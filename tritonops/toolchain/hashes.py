"""Hashes that tell whether a kernel's source or its machine code has changed."""

from __future__ import annotations

import hashlib

from ..dispatch.source import source_hash
from .cubin import kernels, sections

__all__ = ["source_hash", "text_hash"]


def text_hash(cubin: bytes, kernel: str) -> str:
    """sha256 of the machine code of one kernel, its section ``.text.<kernel>``, and of nothing else in the file.

    Line tables and the file's notes (path of the assembler's input, its version) do not enter. Equal hashes mean
    equal code; different ones may be the same code from an assembler that is not reproducible (ptxas 12.9.86 swaps
    registers between runs on one input for some sm_100 kernels).

    Raises:
        ValueError: damaged file, or no such kernel in it.
    """
    text = sections(cubin).get(f".text.{kernel}")
    if text is None:
        raise ValueError(f"no kernel {kernel!r} in the cubin; it has {kernels(cubin)}")
    return hashlib.sha256(text.bytes_of(cubin)).hexdigest()
