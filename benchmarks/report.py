"""README's benchmark section from published results; judging result files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tritonops.dispatch.table import write_atomically

from . import page, published, trials
from .published import PUBLISHED, ROOT
from .results import ResultsError
from .scores import HEAD, File, cells, load, scores, text_table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description="Write README's benchmark section and its figures from published result files. With --compare, "
        "--aa or --planted: judge result files instead; README stays as it is.",
        epilog="Exit code: 0 done, in step, or the bar is met; 1 out of step, or a bar is missed; 2 wrong usage or a "
        "damaged file.",
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE|DIR", help=f"default: {PUBLISHED.as_posix()}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; name what is out of step")
    what.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"),
                      help="two runs of a suite: 90 %% of the verdicts agree, no win became a loss")  # fmt: skip
    what.add_argument(
        "--aa", type=Path, metavar="FILE", help="torch#2 is called different from torch no more than stated"
    )
    what.add_argument(
        "--planted",
        type=Path,
        metavar="FILE",
        help="slowed:torch is found slower in 95 %% of the rows of 20 us and more, faster in none",
    )
    what.add_argument("--show", action="store_true", help="print the table of wins and losses; change nothing")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE", help="default: README.md")
    return parser


def _judged(o: argparse.Namespace) -> trials.Outcome | None:
    if o.compare:
        return trials.compare(*map(load, o.compare))
    if o.aa:
        return trials.same_twice(load(o.aa))
    return trials.planted(load(o.planted)) if o.planted else None


def table(files: Sequence[File]) -> list[str]:
    """Wins and losses of every provider by op, pass and mode."""
    body = [[*s.key, *cells(s)] for s in scores(published.rows_of(files), "op", "pass", "mode")]
    return text_table(("op", "pass", "mode", "provider", *HEAD), body, 4)


def _publish(o: argparse.Namespace, files: Sequence[File], place: Path, out: TextIO) -> int:
    root = o.readme.parent
    if o.check:
        wrong = published.out_of_step(files, o.readme, root, place)
        for line in wrong:
            out.write(f"out of step: {line}; run python -m benchmarks.report\n")
        return 1 if wrong else 0
    if files and (why := page.missing()):
        raise ResultsError(why)
    text = o.readme.read_text(encoding="utf-8")
    new = published.filled(text, published.section(files, place))
    written = [root / place / f"{name}.png" for name in published.FIGURES]
    for path, png in zip(written, published.figures(files).values(), strict=False):
        write_atomically(path, png)
        out.write(f"{path}\n")
    if new != text:
        write_atomically(o.readme, new.encode())
    out.write(f"{o.readme}: {'in step already' if new == text else 'written'}\n")
    return 0


def main(arguments: Sequence[str] | None = None, stdout: TextIO | None = None) -> int:
    """The command; see --help for its exit codes."""
    parser = _parser()
    o = parser.parse_args(arguments)
    out = stdout or sys.stdout
    if o.results and (o.compare or o.aa or o.planted):
        parser.error("FILE|DIR: --compare, --aa and --planted name their own files")
    for path in o.results:
        if not path.exists():
            parser.error(f"FILE|DIR: {path} is not there")
    try:
        judged = _judged(o)
        if judged is not None:
            out.writelines(f"{line}\n" for line in judged.lines)
            out.write("the bar is met\n" if judged.passed else "THE BAR IS MISSED\n")
            return 0 if judged.passed else 1
        files = published.load_all(o.results or [o.readme.parent / PUBLISHED])
        if o.show:
            out.writelines(f"{line}\n" for line in (table(files) if files else [published.NOTHING]))
            return 0
        return _publish(o, files, PUBLISHED, out)
    except (ResultsError, OSError, ValueError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        where = f"{o.readme}: " if isinstance(error, ValueError) and not isinstance(error, ResultsError) else ""
        sys.stderr.write(f"benchmarks.report: {where}{what}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
