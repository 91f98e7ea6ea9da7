"""Installing a calibrated table into the user's cache and taking exactly it away again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from tritonops.calibrate import install, raw
from tritonops.device import named_device
from tritonops.dispatch import store
from tritonops.dispatch.variant import REGISTRY
from tritonops.errors import TableError

DEVICE = named_device("sm_90-132")


def made(out: Path, rows: bytes = b"rows\n", op: str = "rms_norm") -> raw.Paths:
    """A table and its packed raw file, as emit leaves them."""
    paths = raw.Paths(out, op, DEVICE)
    paths.packed.parent.mkdir(parents=True, exist_ok=True)
    paths.packed.write_bytes(raw.pack(rows))
    sha256 = hashlib.sha256(paths.packed.read_bytes()).hexdigest()
    table = {
        "schema": 1, "op": op, "device": {"arch": "sm_90", "sms": 132, "names": ["NVIDIA Test"]}, "made_with": {},
        "provenance": {"kind": "measured", "raw": f"raw/{paths.packed.name}", "sha256": sha256},
        "kernels": {}, "variants": {}, "sections": [], "default": ["vendor"],
    }  # fmt: skip
    paths.table.write_text(json.dumps(table))
    return paths


@pytest.fixture
def cache(clean, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def used() -> Path | None:
    return next((f.path for f in store.search(REGISTRY["rms_norm"], DEVICE) if f.status == "used"), None)


def test_what_is_installed_is_what_dispatch_uses_and_is_undone_exactly(cache, tmp_path) -> None:
    paths = made(tmp_path / "out")
    store.load(REGISTRY["rms_norm"], DEVICE)
    table, packed = install.install(paths)
    assert table == cache / "rms_norm" / "sm_90-132.json" == used()
    assert store.load(REGISTRY["rms_norm"], DEVICE).table.path == str(table)  # what was loaded before is forgotten
    assert (table.read_bytes(), packed.read_bytes()) == (paths.table.read_bytes(), paths.packed.read_bytes())
    others = [table.with_name("sm_80-108.json"), packed.with_name("mine.txt"), cache / "calibration" / "x"]
    others[2].parent.mkdir()
    for other in others:
        other.write_text("{}")
    assert install.uninstall(paths) == ([table, packed], "")
    assert store.load(REGISTRY["rms_norm"], DEVICE).table is None
    assert sorted(p for p in cache.rglob("*") if p.is_file()) == sorted(others)
    assert install.uninstall(paths) == ([], "")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"provenance": {"kind": "published", "source": "x"}}', b"[" * 100_000, b"\xff"],
    ids=["empty", "list", "published", "deep", "bytes"],
)  # fmt: skip
def test_a_table_of_somebody_else_is_left(cache, tmp_path, content) -> None:
    table = cache / "rms_norm" / "sm_90-132.json"
    table.parent.mkdir(parents=True)
    table.write_bytes(content)
    removed, why = install.uninstall(raw.Paths(tmp_path, "rms_norm", DEVICE))
    assert removed == [] and str(table) in why and table.read_bytes() == content


def test_many_installing_at_once_leave_one_table_with_its_own_raw_file(cache, tmp_path) -> None:
    sources = [made(tmp_path / str(i), f"rows {i}\n".encode()) for i in range(6)]
    threads = [threading.Thread(target=install.install, args=(s,)) for s in sources for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = json.loads((cache / "rms_norm" / "sm_90-132.json").read_bytes())
    packed = (cache / "rms_norm" / "raw" / "rms_norm-sm_90-132.jsonl.gz").read_bytes()
    assert table["provenance"]["sha256"] == hashlib.sha256(packed).hexdigest()
    assert sum(p.is_file() for p in cache.rglob("*")) == 2


def test_a_failure_leaves_the_installed_table(cache, tmp_path, monkeypatch) -> None:
    table, _ = install.install(made(tmp_path / "old"))
    before = table.read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        install.install(made(tmp_path / "new", b"other\n"))
    assert table.read_bytes() == before and sum(p.is_file() for p in cache.rglob("*")) == 2


def test_nothing_to_install_is_an_error_and_makes_nothing(cache, tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        install.install(raw.Paths(tmp_path / "out", "rms_norm", DEVICE))
    assert not cache.exists()


def test_a_folder_is_held_by_one_at_a_time(tmp_path) -> None:
    out = tmp_path / "new"
    with install.alone(out) as first, install.alone(out) as second:
        assert (first, second) == (True, False)
    with install.alone(out) as again:
        assert again


def test_a_table_and_a_raw_file_are_checked_to_belong_together(cache, tmp_path) -> None:
    paths = made(tmp_path / "out")
    install.check(paths, REGISTRY["rms_norm"])
    with pytest.raises(TableError):
        install.check(paths, REGISTRY["layer_norm"])
    other = raw.Paths(tmp_path / "out", "rms_norm", named_device("sm_80-108"))
    other.table.write_bytes(paths.table.read_bytes())
    with pytest.raises(raw.RawError, match="sm_80-108.json is for sm_90-132, not sm_80-108"):
        install.check(other, REGISTRY["rms_norm"])
    paths.packed.write_bytes(raw.pack(b"others\n"))
    with pytest.raises(raw.RawError, match="is not the file that .*sm_90-132.json was made from"):
        install.check(paths, REGISTRY["rms_norm"])
