"""Reading a cubin in plain Python: its sections, and the resources that the assembler recorded for each kernel.

Format: ELF64, little endian. ``.nv.info`` holds attributes of 4 bytes (format, kind, value or size), those of
format 4 followed by `size` bytes. Checked on ELF ABI 7 (ptxas 12.x) and 8 (ptxas 13.4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SIZED = 4
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F
# From sm_90 on a kernel's shared section starts with 1 KiB that the system keeps and no limit counts.
_RESERVED, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024


@dataclass(frozen=True, slots=True)
class Section:
    """One section: where its bytes lie in the file, and the fields that a symbol table needs."""

    name: str
    offset: int
    size: int
    occupies_file: bool

    def bytes_of(self, cubin: bytes) -> bytes:
        return cubin[self.offset : self.offset + self.size] if self.occupies_file else b""


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What a cubin states of one kernel; None where it states nothing. Sizes in bytes, the frame per thread."""

    registers: int | None
    frame: int | None
    static_shared: int


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def sections(cubin: bytes) -> dict[str, Section]:
    """The sections of a cubin by name.

    Raises:
        ValueError: the bytes are no 64-bit little-endian ELF file.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a cubin: it starts with {cubin[:6]!r}")
    try:
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        entry_size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        rows = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
        names_at = rows[names][4]
        out: dict[str, Section] = {}
        for name, kind, _flags, _address, offset, size in rows:
            section = Section(_text(cubin, names_at + name), offset, size, kind != 8)
            out.setdefault(section.name, section)
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"damaged cubin of {len(cubin)} bytes: {error}") from error
    return out


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, kind, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield kind, data[at : at + value]
            at += value


def kernels(cubin: bytes) -> list[str]:
    """Names of the kernels (and device functions that were not inlined) in a cubin."""
    return [name.removeprefix(".text.") for name in sections(cubin) if name.startswith(".text.")]


def kernel_info(cubin: bytes, kernel: str) -> KernelInfo:
    """Registers, frame and static shared memory of one kernel.

    Raises:
        ValueError: damaged file, or no such kernel in it.
    """
    table = sections(cubin)
    if f".text.{kernel}" not in table:
        raise ValueError(f"no kernel {kernel!r} in the cubin; it has {kernels(cubin)}")
    stated: dict[int, int] = {}
    if {".nv.info", ".symtab", ".strtab"} <= table.keys():
        symbols, strings = table[".symtab"], table[".strtab"]
        for kind, data in _attributes(table[".nv.info"].bytes_of(cubin)):
            if kind in (_FRAME_SIZE, _REGISTER_COUNT) and len(data) == 8:
                symbol, value = struct.unpack("<II", data)
                (name,) = struct.unpack_from("<I", cubin, symbols.offset + 24 * symbol)
                if _text(cubin, strings.offset + name) == kernel:
                    stated[kind] = value
    shared = table.get(f".nv.shared.{kernel}")
    static = shared.size if shared else 0
    if _RESERVED in table:
        static = max(static - _RESERVED_BYTES, 0)
    return KernelInfo(stated.get(_REGISTER_COUNT), stated.get(_FRAME_SIZE), static)
