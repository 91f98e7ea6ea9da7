"""Public reports about tuning: what is measured decides, each class of shapes for itself, and noise decides nothing."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from learn_cases import SPEC, measured, raw_of, shuffled, walk
from tritonops.calibrate import __main__ as calibrate
from tritonops.calibrate.case import Case
from tritonops.calibrate.emit import emit
from tritonops.calibrate.install import install
from tritonops.calibrate.learn import learn
from tritonops.calibrate.raw import Measured, Paths, Raw, pack
from tritonops.calibrate.verify import verify
from tritonops.device import named_device
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import VENDOR

SHAPES = [(m, 4096) for m in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]


def winner(raw: Raw, m: int, n: int = 4096) -> str:
    section = next(s for s in learn(raw, SPEC).sections if s.when["mode"] == "graph")
    features = SPEC.all_features(Problem(SPEC.name, {"M": m, "N": n}, "bfloat16"), named_device("sm_90-132"))
    return str(walk(section.tree, features)["use"][0])


def table_of(raw: Raw) -> bytes:
    learned = learn(raw, SPEC)
    return emit(raw, learned, verify(raw, learned, SPEC), "toy.jsonl.gz", "0" * 64)


def timed(rival_us: float, seed: int, spread: float = 0.03) -> Raw:
    """A timer that says 100 us of the default and `rival_us` of the rival, each time 3 % off."""
    rng = random.Random(seed)

    def times(us: float) -> tuple[float, ...]:
        return tuple(us / 1000 * (1 + rng.uniform(-spread, spread)) for _ in range(20))

    cases = [Case(Problem(SPEC.name, {"M": m, "N": n}, "bfloat16")) for m, n in SHAPES]
    return raw_of([Measured(case, {VENDOR: times(100.0), "wide/a": times(rival_us)}) for case in cases])


def test_tun12_a_shape_class_is_not_answered_from_another_ones_measurement() -> None:
    """tile-ai/tilelang#1250: the first tuned shape decided for all."""
    large = [measured(m, n, {"wide/a": 2.0, "small/a": 0.5}) for m, n in ((4096, 4096), (8192, 4096), (4096, 8192))]
    small = [measured(m, n, {"wide/a": 0.5, "small/a": 2.0}) for m, n in ((16, 8192), (32, 8192), (16, 4096))]
    both = raw_of([*large, *small])
    assert winner(both, 4096) == "wide/a" and winner(both, 16, 8192) == "small/a"
    # Where only the one class was measured, the other is torch's.
    learned = learn(raw_of(large), SPEC)
    assert learned.sections[0].hull == {"M": [4096, 8192], "N": [4096, 8192]}
    lone = [*large, measured(16, 8192, {"wide/a": 0.5, "small/a": 2.0}, heldout=True)]
    found = verify(raw_of(lone), learn(raw_of(lone), SPEC), SPEC)
    assert {row.choice for s in found.scores for row in s.rows} == {VENDOR}


@pytest.mark.parametrize("seed", range(8))
def test_tun18_a_rival_within_the_spread_does_not_replace_the_default_and_one_beyond_it_does(seed: int) -> None:
    """NVIDIA/Megatron-LM#6966, triton-lang/triton#2306: candidates within noise swapped places from run to run."""
    assert {winner(timed(99.2, seed), m) for m, _ in SHAPES} == {VENDOR}
    assert {winner(timed(80.0, seed), m) for m, _ in SHAPES} == {"wide/a"}


def test_tun18_the_same_times_give_the_same_bytes_in_any_order() -> None:
    first, again = timed(80.0, 1), timed(80.0, 1)
    assert first is not again and table_of(first) == table_of(again)
    assert table_of(shuffled(first, 1)) == table_of(shuffled(first, 2))


# TUN-20: triton-lang/triton#4002; sgl-project/sglang#472; pytorch/pytorch#173679


@pytest.fixture
def linked(tmp_path, monkeypatch) -> Iterator[Path]:
    """The user's cache: a link to a directory on another file system than the working directory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no second file system at hand")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as real:
        assert os.stat(real).st_dev != os.stat(tmp_path).st_dev
        (tmp_path / "link").symlink_to(real)
        monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "link"))
        monkeypatch.chdir(tmp_path)
        yield Path(real)


def test_tun20_calibration_replaces_files_within_the_file_system_that_a_link_leads_to(linked, monkeypatch) -> None:
    replaced, original = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: replaced.append((Path(a), Path(b))) or original(a, b))
    assert calibrate.main(["rms_norm", "plan", "--smoke", "--target", "sm_90-132"]) == 0
    paths = Paths(linked / "calibration", "rms_norm", named_device("sm_90-132"))
    paths.packed.write_bytes(pack(b"rows\n"))
    paths.table.write_bytes(b"{}")
    install(paths)
    assert [b.relative_to(linked) for _, b in replaced] == [
        Path("calibration/rms_norm/raw/rms_norm-sm_90-132.plan.json"),
        Path("rms_norm/raw/rms_norm-sm_90-132.jsonl.gz"),
        Path("rms_norm/sm_90-132.json"),
    ]
    assert all(a.parent == b.parent for a, b in replaced)
    assert sum(p.is_file() for p in linked.rglob("*")) == 5


def test_tun20_a_replace_that_fails_is_one_sentence_and_leaves_what_was_there(linked, monkeypatch, capsys) -> None:
    arguments = ["rms_norm", "plan", "--smoke", "--target", "sm_90-132"]
    assert calibrate.main(arguments) == 0
    before = {p: p.read_bytes() for p in linked.rglob("*") if p.is_file()}
    capsys.readouterr()

    def crossing(a: str, b: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(a))

    monkeypatch.setattr(os, "replace", crossing)
    assert calibrate.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "link/calibration/rms_norm/raw: Invalid cross-device link" in line
    assert {p: p.read_bytes() for p in linked.rglob("*") if p.is_file()} == before and len(before) == 1


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), OSError(errno.ESTALE, "Stale file handle")])
def test_tun20_a_file_that_vanishes_between_check_and_open_is_one_sentence(linked, monkeypatch, capsys, error) -> None:
    assert calibrate.main(["rms_norm", "plan", "--smoke", "--target", "sm_90-132"]) == 0
    capsys.readouterr()
    original = Path.read_bytes

    def vanishing(path: Path) -> bytes:
        if path.name.endswith(".jsonl.gz"):
            raise error
        return original(path)

    Paths(linked / "calibration", "rms_norm", named_device("sm_90-132")).packed.write_bytes(pack(b"rows\n"))
    monkeypatch.setattr(Path, "read_bytes", vanishing)
    assert calibrate.main(["rms_norm", "learn", "--target", "sm_90-132"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "link/calibration/rms_norm/raw" in line and error.strerror in line
