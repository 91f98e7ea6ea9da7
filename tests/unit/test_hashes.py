"""source_hash changes with a kernel's meaning and only with it, on every Python; text_hash with its machine code."""

from __future__ import annotations

import hashlib
import importlib
import struct
import sys
from pathlib import Path

import pytest

from tritonops.dispatch import source
from tritonops.dispatch.source import source_hash
from tritonops.toolchain.cubin import kernel_info, sections
from tritonops.toolchain.hashes import text_hash

KERNEL = '''
"""Module docstring."""
import triton
import triton.language as tl
from .helpers import scale, OFFSET
from . import tiles as t


@triton.jit(do_not_specialize=["M"])
def copy_kernel(x_ptr, M, BLOCK: tl.constexpr = 128, *, mode="a"):
    """Docstring."""
    row = tl.program_id(0)  # a comment
    value = tl.load(x_ptr + row * BLOCK, mask=row < M, other=-1.5e-3)
    name = f"{row!r:>{M}}x{{}}" "tail" + b"\\x00".decode()
    if not (row < M and value is not None):
        return
    total = [v ** 2 for v in (1, 2j, 0x10, "é\\u2028", None, ...)]
    tl.store(x_ptr, scale(value, *total, **{**{}, "k": t.SIZE}) + OFFSET)


class Empty:
    """Only a docstring."""
'''
HELPERS = "from .deeper.leaf import LEAF\n\n\ndef scale(v, *rest, k):\n    return v * LEAF\n\n\nOFFSET = 3\n"
FILES = {
    "__init__.py": "from . import unrelated\n",
    "unrelated.py": "A = 1\n",
    "kernels/__init__.py": "B = 2\n",
    "kernels/copy.py": KERNEL,
    "kernels/helpers.py": HELPERS,
    "kernels/tiles.py": "SIZE = 64\n",
    "kernels/deeper/__init__.py": "",
    "kernels/deeper/leaf.py": "from ...unrelated import A\nLEAF = A\n",
}
# Of FILES, by CPython 3.11.7, 3.12.1 and 3.13.0.
GOLDEN = "08fdd83702f244ce1f2b0a9693be4f6cd6d9eaf66b33ee6031bb68a3a12a1eab"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package on disk named hashed_package; returns a function that edits a file and gives the new hash."""
    root = tmp_path / "hashed_package"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def rehash(name: str | None = None, old: str = "", new: str = "", count: int = -1) -> str:
        if name is not None:
            text = (root / name).read_text(encoding="utf-8")
            assert old in text
            (root / name).write_text(text.replace(old, new, count), encoding="utf-8")
        importlib.invalidate_caches()
        source_hash.cache_clear()
        source._roots.cache_clear()
        return source_hash("hashed_package.kernels.copy:copy_kernel")

    yield rehash
    source_hash.cache_clear()
    source._roots.cache_clear()


def test_the_hash_is_the_same_on_every_python(package):
    assert package() == GOLDEN


def test_hashing_imports_nothing(package):
    package()
    assert not [name for name in sys.modules if name.startswith("hashed_package")]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kernels/copy.py", "  # a comment", "   # another comment, é"),
        ("kernels/copy.py", '"""Docstring."""', '"""Quite another docstring."""'),
        ("kernels/copy.py", '"""Module docstring."""', '"""Another."""'),
        ("kernels/copy.py", '    """Only a docstring."""', '    """Another."""'),
        ("kernels/copy.py", "    row = tl", "\n\n\n    row = tl"),
        (
            "kernels/copy.py",
            "x_ptr, M, BLOCK: tl.constexpr = 128,",
            "x_ptr,\n    M,\n    BLOCK: tl.constexpr=128,\n   ",
        ),
        ("kernels/copy.py", "0x10", "16"),
        ("kernels/copy.py", '"tail"', "'tail'"),
        ("kernels/copy.py", '"tail"', '"ta" "il"'),
        ("kernels/copy.py", "\n", "\r\n"),
        ("kernels/helpers.py", "OFFSET = 3", "OFFSET = 3  # three"),
        ("kernels/helpers.py", "OFFSET = 3", "OFFSET = (3)"),
        ("unrelated.py", "A = 1", "A =    1"),
        ("__init__.py", "unrelated", "unrelated as u"),
        ("kernels/__init__.py", "B = 2", "B = 3"),
    ],
)
def test_formatting_comments_and_docstrings_do_not_count(package, name, old, new):
    before = package()
    assert package(name, old, new) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kernels/copy.py", "row", "line"),
        ("kernels/copy.py", "-1.5e-3", "-1.6e-3"),
        ("kernels/copy.py", "2j", "2"),
        ("kernels/copy.py", "None, ...", "..., None"),
        ("kernels/copy.py", '"tail"', '"tails"'),
        ("kernels/copy.py", "BLOCK: tl.constexpr = 128", "BLOCK: tl.constexpr = 256"),
        ("kernels/copy.py", '["M"]', "[]"),
        ("kernels/copy.py", "row < M and", "row <= M and"),
        ("kernels/copy.py", "!r", "!s"),
        ("kernels/copy.py", "*, mode", "mode"),
        ("kernels/helpers.py", "OFFSET = 3", "OFFSET = True"),
        ("kernels/helpers.py", "v * LEAF", "v + LEAF"),
        ("kernels/tiles.py", "64", "128"),
        ("kernels/deeper/leaf.py", "LEAF = A", "LEAF = -A"),
        ("unrelated.py", "A = 1", "A = 2"),
    ],
)
def test_code_counts_here_and_in_what_is_imported(package, name, old, new):
    before = package()
    assert package(name, old, new) != before


def test_hashes_are_remembered_until_cleared(package, tmp_path):
    before = package()
    (tmp_path / "hashed_package" / "unrelated.py").write_text("A = 5\n", encoding="utf-8")
    assert source_hash("hashed_package.kernels.copy:copy_kernel") == before
    assert package() != before


@pytest.mark.parametrize(
    "name", ["no_such_package.kernels:k", "no_such_package", "hashed_package.kernels.nowhere:k", "sys:k"]
)
def test_a_module_without_source_is_named(package, name):
    package()
    with pytest.raises(ModuleNotFoundError, match=f"'{name.partition('.')[0].partition(':')[0]}"):
        source_hash(name)


def test_a_missing_relative_import_is_named(package):
    with pytest.raises(ModuleNotFoundError, match=r"hashed_package\.kernels\.gone"):
        package("kernels/copy.py", "from .helpers import", "from .gone import")


def elf(texts: dict[str, bytes], note: bytes = b"") -> bytes:
    """A minimal ELF64 file with one ``.text.<kernel>`` section for each kernel."""
    names = [f".text.{kernel}" for kernel in texts] + [".note", ".shstrtab"]
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    bodies = [*texts.values(), note, strings]
    out, rows, at = bytearray(64), [(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)], 1
    for name, body in zip(names, bodies, strict=True):
        rows.append((at, 1, 0, 0, len(out), len(body), 0, 0, 1, 0))
        out += body
        at += len(name) + 1
    table = len(out)
    for row in rows:
        out += struct.pack("<IIQQQQIIQQ", *row)
    out[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", out, 0x28, table)
    struct.pack_into("<HHH", out, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(out)


def test_text_hash_is_that_of_the_section_alone():
    cubin = elf({"k1": b"code one", "k2": b"code two"})
    assert text_hash(cubin, "k1") == hashlib.sha256(b"code one").hexdigest()
    assert text_hash(cubin, "k2") == hashlib.sha256(b"code two").hexdigest()
    assert text_hash(elf({"k1": b"code one"}, b"assembled on a Tuesday"), "k1") == text_hash(cubin, "k1")


def test_an_absent_kernel_is_named():
    with pytest.raises(ValueError, match=r"no kernel 'k3'.*'k1'"):
        text_hash(elf({"k1": b"x"}), "k3")
    with pytest.raises(ValueError, match=r"no kernel 'k3'.*'k1'"):
        kernel_info(elf({"k1": b"x"}), "k3")


def test_resources_that_a_cubin_does_not_state_are_unknown():
    info = kernel_info(elf({"k1": b"x"}), "k1")
    assert (info.registers, info.frame, info.static_shared) == (None, None, 0)


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b"MZ" + b[2:], lambda b: b[: len(b) // 2], lambda b: b[:64]]
)
def test_a_damaged_cubin_is_a_value_error(damage):
    whole = elf({"k1": b"x" * 100})
    assert len(sections(whole)[".text.k1"].bytes_of(whole)) == 100
    with pytest.raises(ValueError, match="cubin"):
        text_hash(damage(whole), "k1")


def test_every_kernel_of_the_package_has_a_source_hash():
    import tritonops  # noqa: F401
    from tritonops.dispatch.variant import REGISTRY

    kernels = {v.kernel for spec in REGISTRY.values() for v in spec.variants().values() if v.kernel}
    own = sorted(k for k in kernels if k.startswith("tritonops."))
    assert len({source_hash(k) for k in own}) == len({k.partition(":")[0] for k in own}) >= 3
