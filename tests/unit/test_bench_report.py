"""Verdicts on simulated result files, README's section, pictures and the page."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from bench_cases import ENVIRONMENT
from benchmarks import page, published, report, trials
from benchmarks.entries import of_suite
from benchmarks.providers import make
from benchmarks.scores import load, verdict_of
from result_cases import HOSTILE, simulated, suite, write

PNG = b"\x89PNG\r\n\x1a\n"
ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> tuple[int, str]:
    out = io.StringIO()
    return report.main([str(a) for a in arguments], out), out.getvalue()


def trial(path: Path, speed: float, name: str, *, sigma: float = 0.01, ms: float | None = 0.05) -> Path:
    entries = of_suite("tritonbench-gemm")
    rows = [r for seed in range(4) for r in simulated(entries, {name: lambda e: speed}, sigma=sigma, seed=seed,
                                                      torch_ms=ms)]  # fmt: skip
    return write(path, rows)


def test_readme_is_in_step() -> None:
    assert run("--check") == (0, "")


@pytest.mark.parametrize("sigma", [0.002, 0.01])
def test_equals_are_told_apart_no_more_often_than_stated(tmp_path: Path, sigma: float) -> None:
    code, text = run("--aa", trial(tmp_path / "a.json", 1.0, "torch#2", sigma=sigma))
    assert code == 0 and "the bar is met" in text and "called different" in text


def test_unequals_under_the_name_of_an_equal_miss_the_bar(tmp_path: Path) -> None:
    code, text = run("--aa", trial(tmp_path / "a.json", 1 / 1.05, "torch#2"))
    assert code == 1 and "THE BAR IS MISSED" in text


def test_five_per_cent_are_found_and_nothing_is_not(tmp_path: Path) -> None:
    assert run("--planted", trial(tmp_path / "slow.json", 1 / 1.05, "slowed:torch"))[0] == 0
    assert run("--planted", trial(tmp_path / "same.json", 1.0, "slowed:torch"))[0] == 1
    assert run("--planted", trial(tmp_path / "fast.json", 1.05, "slowed:torch"))[0] == 1


def test_a_trial_without_a_long_row_is_no_trial(tmp_path: Path, capsys) -> None:
    assert run("--planted", trial(tmp_path / "short.json", 1 / 1.05, "slowed:torch", ms=0.005))[0] == 2
    assert "20 us" in capsys.readouterr().err


def test_a_slowed_provider_is_charged_five_per_cent() -> None:
    slowed = make("slowed:torch")
    assert (slowed.name, slowed.charge, make("torch").charge) == ("slowed:torch", 1.05, 1.0)
    with pytest.raises(ValueError, match="slowed:NAME"):
        make("slowed:slowed:torch")


def test_two_runs_agree_and_a_win_turned_loss_does_not(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", suite("tritonbench-gemm"))
    again = write(tmp_path / "b.json", suite("tritonbench-gemm", seed=1))
    code, text = run("--compare", first, again)
    assert code == 0 and "wins turned losses: 0" in text
    rows = suite("tritonbench-gemm", seed=1)
    win = next(r for r in rows if verdict_of(r) == "win")
    win.update(speedup=0.8, speedup_ci95=[0.79, 0.81])
    code, text = run("--compare", first, write(tmp_path / "c.json", rows))
    assert code == 1 and "wins turned losses: 1" in text


def test_bad_files_are_one_line_naming_them(tmp_path: Path, capsys) -> None:
    (tmp_path / "junk.json").write_text("{")
    assert run("--aa", tmp_path / "junk.json")[0] == 2
    error = capsys.readouterr().err
    assert "junk.json" in error and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "missing.json")
    assert "missing.json is not there" in capsys.readouterr().err


@pytest.fixture
def book(tmp_path: Path) -> Path:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{published.BEGIN}\nold\n{published.END}\nafter\n")
    return readme


def test_publishing_fills_the_section_and_check_finds_what_moved(book: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(book.parent / published.PUBLISHED / "gemm.json", suite("tritonbench-gemm"))
    assert run("--readme", book, "--check")[0] == 1
    assert run("--readme", book)[0] == 0
    text = book.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    mine = [r for r in suite("tritonbench-gemm") if r["provider"] == "ours"]
    worst = min(mine, key=lambda r: r["speedup"])
    lost = sum(verdict_of(r) == "loss" for r in mine)
    assert f"Losses of ours: {lost} of {len(mine)} rows" in text and f"{worst['speedup']:.2f}" in text and lost > 20
    assert run("--readme", book, "--check") == (0, "")
    figures = list(path.parent.glob("*.png"))
    assert figures and all(f.read_bytes().startswith(PNG) for f in figures)
    write(path, suite("tritonbench-gemm", seed=5))
    code, out = run("--readme", book, "--check")
    assert code == 1 and "out of step" in out


def test_without_results_the_section_says_so_and_without_markers_nothing_is_written(book: Path, capsys) -> None:
    assert run("--readme", book)[0] == 0
    assert published.NOTHING in book.read_text()
    book.write_text("no markers")
    assert run("--readme", book)[0] == 2 and book.read_text() == "no markers"
    assert "README.md" in capsys.readouterr().err


def test_the_page_needs_no_network_and_escapes_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = suite("tritonbench-gemm")
    rows[1]["failed"] = HOSTILE
    paths = page.write(tmp_path / "out", rows, ENVIRONMENT, "python -m benchmarks.run " + HOSTILE)
    html = paths[-1].read_text()
    assert len(paths) >= 3 and all(p.read_bytes().startswith(PNG) for p in paths[:-1])
    assert html.count("data:image/png;base64,") == len(paths) - 1
    assert "<script" not in html and not re.search(r"(src|href)=\"?https?:", html)
    assert "verdict" in html and 'class="loss"' in html


def test_the_chance_of_many_false_positives() -> None:
    assert trials.tail(0, 10) == pytest.approx(1.0)
    assert trials.tail(1, 2, 0.5) == pytest.approx(0.75)
    assert trials.tail(10, 20, 0.05) < 1e-6


def test_published_rows_load(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.json", suite("tritonbench-layer-norm")))
    assert found.rows and {verdict_of(r) for r in found.rows if r["provider"] == "compile"} <= {"loss", "tie"}
