"""Finding tables: the search order, damaged and hostile files, neighbours, tables gone stale."""

from __future__ import annotations

import errno
import os
import socket
import threading
import tracemalloc
from pathlib import Path

import pytest

import tritonops
from dispatch_cases import SOURCE_OF_ONE, Heard, cuda, leaf, make_table, pretend, put, section
from tritonops import _compat
from tritonops.device import CPU, INTERPRETER
from tritonops.dispatch import source, store, table

GPU = cuda()


def says(variant: str, **changes):
    """A table whose one leaf names `variant`."""
    return make_table(section(leaf(variant)), **changes)


def snapshot(directory: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(p.relative_to(directory)): (s.st_ino, s.st_size, s.st_mtime_ns)
        for p in directory.rglob("*")
        for s in [p.lstat()]
    }


# The search order


@pytest.fixture
def checkout(tmp_path: Path, tables: Path) -> list[Path]:
    """The four places, first to last, in an installed package that is a checkout."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "pyproject.toml").touch()
    installed = tmp_path / "installed"
    return [tables, tmp_path / "cache", installed / "tritonops" / "dispatch_tables", installed / "dispatch_tables"]


def test_places_are_the_override_the_cache_the_package_and_the_checkout(checkout, monkeypatch) -> None:
    names = ["TRITONOPS_TABLE_DIR", "user cache", "package", "checkout"]
    assert store.places() == list(zip(names, checkout, strict=True))
    monkeypatch.delenv("TRITONOPS_TABLE_DIR")
    assert [place for place, _ in store.places()] == names[1:]
    (checkout[3].parent / "pyproject.toml").unlink()
    assert [place for place, _ in store.places()] == names[1:3]


def test_the_checkout_of_this_repository_is_searched() -> None:
    root = Path(__file__).parents[2]
    assert ("checkout", root / "dispatch_tables") in store.places()
    assert ("package", root / "tritonops" / "dispatch_tables") in store.places()


@pytest.mark.parametrize("first", range(4))
def test_the_first_place_that_has_a_table_serves_and_shadows_the_rest(toy, checkout, first: int) -> None:
    variants = ["one/a", "one/b", "two/a", "steady/a"]
    for directory, variant in list(zip(checkout, variants, strict=True))[first:]:
        put(directory, says(variant))
    assert toy(GPU) == variants[first]
    found = store.search(toy.spec, GPU)
    assert [f.status for f in found] == ["absent"] * first + ["used"] + ["shadowed"] * (3 - first)
    assert [f.path for f in found] == [d / "toy" / "sm_90-132.json" for d in checkout]
    assert store.load(toy.spec, GPU).searched == tuple(f.path for f in found)
    assert store.load(toy.spec, GPU).table.path == str(checkout[first] / "toy" / "sm_90-132.json")


def test_a_table_of_another_device_is_not_this_ones(toy, tables) -> None:
    put(tables, says("one/a", gpu=cuda(sms=114)), cuda(sms=114))
    with Heard() as heard:
        assert toy(GPU) == "vendor"
    assert heard == [
        "tritonops: no dispatch table for NVIDIA Test (sm_90-132), looked for toy in "
        + ", ".join(str(d / "toy" / "sm_90-132.json") for _, d in store.places())
        + "; torch's kernels serve. 'python -m tritonops.calibrate toy' measures this GPU."
    ]


def test_a_table_for_another_device_under_this_ones_name_is_damaged(toy, tables) -> None:
    path = put(tables, says("one/a", gpu=cuda(arch="sm_80", sms=108)))
    with Heard() as heard:
        assert toy(GPU) == "vendor"
    assert heard[0] == (f"tritonops: set aside: dispatch table {path}: device: is for sm_80-108, not sm_90-132")


def test_a_device_without_a_table_is_told_once_for_all_ops_and_calls(toys, tables) -> None:
    with Heard() as heard:
        for _ in range(100):
            for toy in toys:
                assert toy(GPU) == "vendor"
                tritonops.clear_cache()
    assert len(heard) == 1


def test_a_named_device_without_a_table_is_not_warned_of(toy, tables) -> None:
    with Heard() as heard:
        assert tritonops.explain("toy", 64, 64, device="sm_90-132").rule == "no table"
    assert heard == []


@pytest.mark.parametrize("device", [CPU, INTERPRETER])
def test_tables_are_not_read_without_a_gpu(toy, tables, device, monkeypatch) -> None:
    monkeypatch.setattr(store, "read", lambda *args: pytest.fail("a file was read"))
    assert store.load(toy.spec, device) == store.Loaded(None)


def test_a_table_is_read_once_and_again_after_clear_cache(toy, tables, monkeypatch) -> None:
    put(tables, says("one/a"))
    reads = []
    original = store.read
    monkeypatch.setattr(store, "read", lambda path, spec: reads.append(path) or original(path, spec))
    for m in range(1, 20):
        assert toy(GPU, m) == "one/a"
    assert len(reads) == len(store.places())
    put(tables, says("two/a"))
    assert toy(GPU) == "one/a"
    tritonops.clear_cache()
    assert toy(GPU) == "two/a"
    assert len(reads) == 2 * len(store.places())


# Damaged and hostile files


def _good() -> bytes:
    return table.dump(says("one/a"))


def _mutated(**changes) -> bytes:
    return table.dump(says("one/a", **changes))


BAD_CONTENT = {
    "empty": (b"", "(file)"),
    "truncated": (_good()[:-40], "(file)"),
    "trailing": (_good() + b"}", "(file)"),
    "latin-1": (_good().replace(b"raw/toy", b"raw/t\xf6y"), "(file)"),
    "byte order mark": (b"\xef\xbb\xbf" + _good(), "(file)"),
    "zeros after a power cut": (b"\0" * 4096, "(file)"),
    "nan": (_good().replace(b'"n": 3', b'"n": NaN'), "(file)"),
    "duplicate keys": (_good().replace(b'"op": "toy"', b'"op": "toy", "op": "toy"'), "(file)"),
    "deep": (b"[" * 100_000, "(file)"),
    "huge integer": (_good().replace(b'"n": 3', b'"n": ' + b"9" * 4000), "sections[0].tree.n"),
    "huge float": (_good().replace(b'"sms": 132', b'"l2_mib": ' + b"9" * 4000 + b', "sms": 132'), "device.l2_mib"),
    "null": (b"null", "(top)"),
    "list": (b"[]", "(top)"),
    "newer schema": (_mutated(schema=999), "schema"),
    "another op": (_mutated(op="matmul"), "op"),
    "unknown variant": (_mutated(default=["seven/a"]), "default[0]"),
    "unknown key": (_mutated(extra=1), "(top)"),
    "path in a variant's name": (_mutated(variants={"../../x": {}}), "variants"),
    "path in the op": (_mutated(op="../../x"), "op"),
    "path in the raw file's name": (_mutated(provenance={"kind": "measured", "raw": "raw/../../x"}), "provenance.raw"),
    "no section's feature": (_mutated(sections=[section(leaf("one/a"), {"K": [1, 2]})]), "sections[0].hull"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_a_damaged_file_is_one_warning_then_the_next_place(toy, tables, tmp_path, name: str) -> None:
    content, field = BAD_CONTENT[name]
    path = put(tables, content)
    put(tmp_path / "cache", says("two/a"))
    before = snapshot(tmp_path)
    with Heard() as heard:
        for m in range(1, 6):
            assert toy(GPU, m) == "two/a"
            tritonops.clear_cache()
    assert len(heard) == 1 and heard[0].startswith(f"tritonops: set aside: dispatch table {path}: {field}: ")
    assert len(heard[0]) < 500 + len(str(path)) and heard[0].isprintable()
    assert snapshot(tmp_path) == before
    assert [(f.status, bool(f.problem)) for f in store.search(toy.spec, GPU)][:2] == [
        ("damaged", True),
        ("used", False),
    ]


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_a_damaged_file_with_no_other_leaves_torch(toy, tables, tmp_path, name: str) -> None:
    path = put(tables, BAD_CONTENT[name][0])
    before = snapshot(tmp_path)
    with Heard() as heard:
        assert toy(GPU) == "vendor"
    assert [str(path) in h for h in heard] == [True, True] and "no dispatch table for" in heard[1]
    assert snapshot(tmp_path) == before


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's address is at most 107 characters long
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def _huge(path: Path) -> None:
    with path.open("wb") as f:
        f.write(_good())
        f.truncate(100 << 20)


NOT_FILES = {
    "fifo": (_fifo, "not a regular file"),
    "directory": (_directory, "Is a directory"),
    "symlink loop": (_loop, "Too many levels of symbolic links"),
    "device": (_device, "not a regular file"),
    "socket": (_socket, "No such device or address"),
    "100 MB": (_huge, "larger than 4194304 bytes"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", NOT_FILES)
def test_what_is_no_file_is_one_warning_then_the_next_place(toy, tables, tmp_path, name: str) -> None:
    make, problem = NOT_FILES[name]
    path = store.table_path(tables, "toy", GPU)
    path.parent.mkdir()
    make(path)
    put(tmp_path / "cache", says("two/a"))
    before, threads, descriptors = snapshot(tmp_path), threading.active_count(), len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    try:
        with Heard() as heard:
            assert toy(GPU) == "two/a"
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert heard == [f"tritonops: set aside: dispatch table {path}: (file): {problem}"]
    assert snapshot(tmp_path) == before
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.ESTALE, "Stale file handle"), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", ["open", "fstat"])
def test_a_file_that_cannot_be_read_is_damaged_and_one_that_vanished_is_absent(
    toy, tables, tmp_path, monkeypatch, error, problem, step
) -> None:
    path = put(tables, says("one/a"))
    put(tmp_path / "cache", says("two/a"))
    original = getattr(os, step)

    def fail_once(*args, **kwargs):
        monkeypatch.setattr(store.os, step, original)
        raise error

    monkeypatch.setattr(store.os, step, fail_once)
    with Heard() as heard:
        assert toy(GPU) == "two/a"
    assert heard == ([] if problem is None else [f"tritonops: set aside: dispatch table {path}: (file): {problem}"])


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_an_unreadable_file_and_directory_are_damaged(toy, tables) -> None:
    path = put(tables, says("one/a"))
    for closed in (path, path.parent):
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            with Heard() as heard:
                assert toy(GPU) == "vendor"
        finally:
            closed.chmod(mode)
        tritonops.clear_cache()
    assert "Permission denied" in heard[0]


def test_a_file_in_the_place_of_a_directory_is_absent(toy, tables) -> None:
    (tables / "toy").write_bytes(b"")
    assert {f.status for f in store.search(toy.spec, GPU)} == {"absent"}


def test_a_directory_name_that_cannot_exist_is_one_warning(toy, tables, monkeypatch) -> None:
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", "x" * 5000)
    with Heard() as heard:
        assert toy(GPU) == "vendor"
    assert "File name too long" in heard[0] and len(heard) == 2


def test_read_raises_what_a_strict_command_wants(toy, tables) -> None:
    path = put(tables, b"{")
    with pytest.raises(tritonops.TableError, match=r"toy/sm_90-132\.json: \(file\): not valid JSON"):
        store.read(path, toy.spec)
    with pytest.raises(FileNotFoundError):
        store.read(path.with_name("none.json"), toy.spec)


def test_real_ops_survive_a_damaged_table(clean, tmp_path, monkeypatch) -> None:
    """The call of a user: right result, one warning for the file."""
    import torch

    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path / "t"))
    pretend(monkeypatch, GPU)
    path = put(tmp_path / "t", b'{"schema": 1', op="matmul")
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    with Heard() as heard:
        for _ in range(3):
            assert torch.equal(tritonops.matmul(a, b), a @ b)
            tritonops.clear_cache()
    assert sum(str(path) in h and "set aside" in h for h in heard) == 1 and len(heard) == 2


# Neighbours


def neighbour(tables: Path, tree: dict, **changes):
    put(tables, make_table(section(tree), gpu=cuda("NVIDIA Other"), **changes))


def test_a_card_of_another_name_is_a_neighbour_and_told_so_once(toys, tables) -> None:
    path = store.table_path(tables, "toy", GPU)
    neighbour(tables, leaf("one/a", gain=1.5))
    with Heard() as heard:
        for m in range(1, 50):
            assert toys[0](GPU, m) == "one/a"
            tritonops.clear_cache()
    assert heard == [
        f"tritonops: {path} was made on NVIDIA Other, this is NVIDIA Test; only choices at least 10 % ahead of torch "
        "there are taken. 'python -m tritonops.calibrate toy' measures this GPU."
    ]
    assert store.load(toys[0].spec, GPU).neighbour
    assert not store.load(toys[0].spec, cuda("NVIDIA Other")).neighbour
    assert not store.load(toys[0].spec, cuda("")).neighbour


# Stale tables


@pytest.mark.parametrize(
    ("made", "reasons"),
    [
        ({"triton": "3.6.9", "ptxas": "12.8.93"}, []),
        ({}, []),
        ({"triton": None, "ptxas": None}, []),
        ({"triton": "3.5.1"}, ["made with triton 3.5.1, running triton 3.6.0"]),
        ({"triton": "4.6.0"}, ["made with triton 4.6.0, running triton 3.6.0"]),
        ({"triton": "main"}, ["made with triton main, running triton 3.6.0"]),
        ({"ptxas": "12.9.1"}, ["made with ptxas 12.9.1, running ptxas 12.8"]),
        ({"triton": "3.4.0", "ptxas": "13.0"},
         ["made with triton 3.4.0, running triton 3.6.0", "made with ptxas 13.0, running ptxas 12.8"]),
    ],
)  # fmt: skip
def test_versions_that_make_a_table_stale(toy, tables, made, reasons) -> None:
    path = put(tables, says("one/a", made_with=made))
    with Heard() as heard:
        for m in range(1, 20):
            assert toy(GPU, m) == "one/a"  # it still serves
            tritonops.clear_cache()
    assert store.load(toy.spec, GPU).stale == tuple(reasons)
    said = f"tritonops: {path} may be out of date ({'; '.join(reasons)}); it still serves. " + (
        "'python -m tritonops.calibrate toy' measures anew."
    )
    assert heard == ([said] if reasons else [])
    assert tritonops.explain("toy", 8, 8, device="sm_90-132").stale == tuple(reasons)


def test_a_changed_kernel_makes_a_table_stale(toy, tables) -> None:
    put(
        tables,
        says("one/a", kernels={"one": {"source": "0" * 64}, "two": {"source": "2" * 64}, "gone": {"source": "3" * 64}}),
    )
    with Heard() as heard:
        assert toy(GPU) == "one/a"
    assert store.load(toy.spec, GPU).stale == ("kernel 'one' has changed since it was measured",)
    assert len(heard) == 1


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("x"),
        SyntaxError("x"),
        PermissionError(13, "x"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
    ],
)
def test_a_kernel_whose_source_cannot_be_read_is_stale_and_no_error(toy, tables, monkeypatch, error) -> None:
    def unreadable(name: str) -> str:
        if name == "toy_kernels:two_kernel":
            raise error
        return SOURCE_OF_ONE

    monkeypatch.setattr(source, "source_hash", unreadable)
    put(tables, says("one/a"))
    with Heard() as heard:
        assert toy(GPU) == "one/a"
    assert store.load(toy.spec, GPU).stale == (
        "whether kernel 'two' has changed cannot be told: its source cannot be read",
    )
    assert len(heard) == 1


def test_no_assembler_is_asked_for_a_table_that_names_none(toy, tables, monkeypatch) -> None:
    monkeypatch.setattr(_compat, "ptxas_version", lambda capability: pytest.fail("ptxas was run"))
    put(tables, says("one/a", made_with={"triton": "3.6.0"}))
    assert toy(GPU) == "one/a"


def test_without_triton_a_table_is_not_stale_and_torch_serves(toy, tables, monkeypatch) -> None:
    monkeypatch.setattr(_compat, "triton_version", lambda: None)
    monkeypatch.setattr(_compat, "ptxas_version", lambda capability: None)
    monkeypatch.setattr(_compat, "has_triton", lambda: False)
    put(tables, says("one/a"))
    assert toy(GPU) == "vendor"
    assert store.load(toy.spec, GPU).stale == ()


# Warnings


def test_warn_once_says_a_thing_once_from_many_threads(clean) -> None:
    with Heard() as heard:
        threads = [threading.Thread(target=store.warn_once, args=("k", "said")) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        store.warn_once("other", "too")
    assert heard == ["said", "too"]
