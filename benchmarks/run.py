"""Time tritonops and its peers on this GPU: ``python -m benchmarks.run --op layer_norm --bwd --out ln.json``."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import torch

from tritonops.calibrate.progress import Progress
from tritonops.device import DeviceInfo, device_info

from . import entries, page, table
from .contender import BASE, ContextLost
from .entries import DTYPES, Entry, SuiteError
from .machine import MODES, CudaMachine, environment, roofs_of
from .providers import NAMES, Provider, make
from .results import Results, ResultsError, to_csv
from .runner import Plan, plan, run, yardstick
from .suites import OPS, SUITES, TUTORIALS

DEFAULT = ("torch", "compile", "liger", "quack", "flaggems", "tutorial", "ours")
DEFAULT_OVERHEAD = ("torch", "library", "ours")
DEFAULT_SUITE = {
    "matmul": "tutorial09-4k", "layer_norm": "tritonbench-layer-norm", "rms_norm": "tritonbench-layer-norm",
    "embedding": "tritonbench-embedding", "overhead": "overhead",
}  # fmt: skip


def _number(kind: type[int] | type[float], least: int = 1) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text!r}")
        return value

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Check every provider against the float64 oracle, then time all of them against torch, "
        "interleaved. The table goes to stdout, progress to stderr.",
        epilog=f"suites: {', '.join(SUITES)}. Exit code: 0 done, or the budget is spent (go on with --resume); 2 wrong "
        "usage or environment; 3 a kernel broke the CUDA context (go on with --resume); 130 interrupted.",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--op", action="append", choices=[*OPS, "overhead"], help="may be repeated; default: the suite's")
    what.add_argument("--fwd", action="store_true", help="the forward alone")
    what.add_argument("--bwd", action="store_true", help="the backward alone; of a product: the gradients' products")
    what.add_argument("--suite", choices=list(SUITES), help="a named list of shapes")
    what.add_argument("--shapes", metavar="LIST|FILE",
                      help="sizes such as 4096x4096x512,8192x8192x512 (MxNxK, MxN, TxDxV), a file of "
                      "tritonops.record, or a suite")  # fmt: skip
    what.add_argument("--layout", choices=["nn", "nt", "tn", "tt"], help="of products in --shapes LIST (default nt)")
    what.add_argument("--dtype", help="bf16, fp16, fp32 or tf32, or several with commas (default: the suite's)")
    what.add_argument("--input-id", type=_number(int, 0), default=0, metavar="N",
                      help="begin at the N-th shape of each op and pass, from 0")  # fmt: skip
    what.add_argument("--num-inputs", type=_number(int), metavar="K", help="K shapes of each op and pass")
    tutorial = parser.add_argument_group("as Triton's tutorial 09 takes them, with its suites")
    tutorial.add_argument("--prec", choices=["fp16", "fp8"], help="fp8 is not in this version: its rows say so")
    tutorial.add_argument(
        "--K_range", type=_number(int), nargs=2, metavar=("LO", "HI"), help="K from LO to HI, both in"
    )
    tutorial.add_argument("--K_step", type=_number(int), metavar="S", help="in steps of S (default 512)")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--providers",
        help=f"{', '.join(NAMES)}, ours:VARIANT, ours:FAMILY; NAME#2 is NAME once "
        "more, slowed:NAME is charged 5 %% more time than it takes",
    )
    how.add_argument("--mode", choices=MODES, help="graph: device time; eager: as called; host: until a call returns")
    how.add_argument("--budget", type=_number(float, 0), metavar="SECONDS", help="no shape is begun after it")
    how.add_argument("--device", type=_number(int, 0), metavar="INDEX", help="CUDA index (default: the current one)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--metrics", help=f"columns: {', '.join(table.METRICS)} (default {','.join(table.DEFAULT_METRICS)})"
    )
    output.add_argument("--out", type=Path, metavar="FILE.json", help="results, on file after each shape")
    output.add_argument("--csv", type=Path, metavar="FILE", help="the same rows as CSV")
    output.add_argument("--plot", type=Path, metavar="DIR", help="pictures and one HTML page that holds them")
    output.add_argument("--resume", action="store_true", help="go on with the --out that is there")
    return parser


def _names(parser: argparse.ArgumentParser, argument: str, text: str, known: Sequence[str] = ()) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if not name or (known and name not in known):
            parser.error(f"{argument}: {name!r} is not one of {', '.join(known)}")
    return names


def _entries(parser: argparse.ArgumentParser, o: argparse.Namespace) -> list[Entry]:
    """The entries that the arguments ask for, which are checked here."""
    ops = list(dict.fromkeys(o.op or ()))
    suite = o.suite
    if o.shapes in SUITES:
        suite, o.shapes = o.shapes, None
    if suite and o.shapes:
        parser.error("--suite and --shapes: give one of them")
    if "overhead" in ops:
        if len(ops) > 1 or o.shapes or suite not in (None, "overhead"):
            parser.error("--op overhead has a suite of its own")
        ops, suite = [], "overhead"
    if suite is None and o.shapes is None:
        found = {DEFAULT_SUITE[op] for op in ops}
        if len(found) != 1:
            parser.error("--suite NAME or --shapes LIST|FILE is needed" + (" for several ops" if ops else ""))
        suite = found.pop()
    if o.mode is None:
        o.mode = "host" if suite == "overhead" else "graph"
    directions = [name for name, wanted in (("fwd", o.fwd), ("bwd", o.bwd)) if wanted]
    dtypes = [DTYPES.get(d, d) for d in _names(parser, "--dtype", o.dtype)] if o.dtype else []
    for dtype in dtypes:
        if dtype not in (*DTYPES.values(), "float64"):
            parser.error(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    k: Sequence[int] = ()
    if o.prec or o.K_range or o.K_step:
        if suite not in TUTORIALS:
            parser.error(f"--prec, --K_range and --K_step go with --suite {' or '.join(TUTORIALS)}")
        if o.prec and dtypes:
            parser.error("--prec and --dtype: give one of them")
        if o.K_step and not o.K_range:
            parser.error("--K_step needs --K_range")
        dtypes = [DTYPES[o.prec]] if o.prec else dtypes
        if o.K_range:
            k = range(o.K_range[0], o.K_range[1] + 1, o.K_step or 512)
            if not k:
                parser.error(f"--K_range: {o.K_range[0]} to {o.K_range[1]} is empty")
    if o.layout and (suite or Path(o.shapes).exists()):
        parser.error("--layout goes with --shapes LIST; a suite and a file say their layouts")
    if suite:
        found_entries = entries.of_suite(suite, ops, directions, dtypes, k)
    elif Path(o.shapes).exists():
        if dtypes:
            parser.error("--dtype: the file of --shapes says the dtypes")
        found_entries = entries.from_file(Path(o.shapes), ops, directions)
    else:
        found_entries = entries.listed(o.shapes, ops, directions, dtypes, o.layout or "nt")
    chosen = _window(found_entries, o.input_id, o.num_inputs)
    if not chosen:
        parser.error(f"--input-id {o.input_id}: there are not so many shapes")
    return chosen


def _window(found: Sequence[Entry], first: int, count: int | None) -> list[Entry]:
    """Of each op, pass and dtype the shapes from `first` on, `count` of them."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for e in found:
        groups.setdefault((e.op, e.direction, e.case.problem.table_dtype), []).append(e)
    kept = {id(e) for g in groups.values() for e in g[first : None if count is None else first + count]}
    return [e for e in found if id(e) in kept]


def _providers(parser: argparse.ArgumentParser, o: argparse.Namespace, overhead: bool) -> list[Provider]:
    names = list(DEFAULT_OVERHEAD if overhead else DEFAULT)
    if o.providers is not None:
        names = _names(parser, "--providers", o.providers)
    try:
        return [make(name) for name in dict.fromkeys([BASE, *names])]
    except ValueError as error:
        parser.error(f"--providers: {error}")


def _gpu(index: int | None) -> DeviceInfo | str:
    """The GPU, or why there is none."""
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU here, and benchmarks need one"
    if index is not None and index >= torch.cuda.device_count():
        return f"--device {index}: there are {torch.cuda.device_count()} GPUs, from 0"
    found = device_info(torch.device("cuda", torch.cuda.current_device() if index is None else index))
    return found if found.capability else f"{found.name} is not an NVIDIA GPU"


def _say_plan(say: Callable[[str], None], planned: Plan, absent: dict[str, str]) -> None:
    for name, why in absent.items():
        say(f"absent: {name}: {why}")
    for name, reasons in planned.skipped.items():
        say(f"{name}: " + "; ".join(f"{count} shapes: {why}" for why, count in reasons.items()))


def _show(stdout: TextIO, results: Results, metrics: Sequence[str], keep: set[str]) -> None:
    shown = [row for row in results.rows if row["provider"] in keep]
    for line in (*table.lines(shown, metrics), "", *table.summary(shown)):
        stdout.write(f"{line}\n")
    if (b := yardstick(results)) is not None:
        stdout.write(f"B, the host time of Library.impl around torch.mm less torch.mm's: {b:.1f} us\n")


def main(arguments: Sequence[str] | None = None, stdout: TextIO | None = None) -> int:
    """The command; see --help for its exit codes."""
    parser = _parser()
    o = parser.parse_args(arguments)
    try:
        chosen = _entries(parser, o)
    except (SuiteError, OSError) as error:
        parser.error(str(error))
    metrics = _names(parser, "--metrics", o.metrics, tuple(table.METRICS)) if o.metrics else table.DEFAULT_METRICS
    providers = _providers(parser, o, chosen[0].suite == "overhead")
    if o.resume and o.out is None:
        parser.error("--resume needs --out")
    if o.plot is not None and (why := page.missing()):
        parser.error(f"--plot: {why}")
    if o.plot is not None and o.plot.exists() and not o.plot.is_dir():
        parser.error(f"--plot: {o.plot} is not a directory")
    if o.out is not None and o.out.exists() and not o.resume:
        parser.error(f"--out: {o.out} is there already; --resume goes on with it")
    progress = Progress()
    device = _gpu(o.device)
    if isinstance(device, str):
        progress.say(f"benchmarks.run: {device}")
        return 2
    absent = {p.name: why for p in providers if (why := p.available()) is not None}
    here = [p for p in providers if p.name not in absent]
    planned = plan(chosen, here)
    _say_plan(progress.say, planned, absent)
    code, message = 0, ""
    command = shlex.join(["python", "-m", "benchmarks.run", *(sys.argv[1:] if arguments is None else arguments)])
    results: Results | None = None
    try:
        machine = CudaMachine(device)
        facts = environment(device, machine.monitor.driver(), machine.memory_bytes, here)
        results = Results(o.out, command[:1000], {**facts, "absent": absent, "skipped": planned.skipped})
        if o.resume:
            results.resume()
        if "copy_tbps" not in results.environment:
            results.environment |= roofs_of(machine)
        started = time.monotonic()
        progress.stage("benchmark", chosen[0].suite, None if o.budget is None else started + o.budget)
        left = run(
            planned, machine, o.mode, results, copy_tbps=results.environment["copy_tbps"],
            deadline=math.inf if o.budget is None else started + o.budget, progress=progress,
        )  # fmt: skip
        if (b := yardstick(results)) is not None:
            results.environment["library_us"] = b
        results.write()
        message = f"the budget is spent, {left} shapes are left; go on with --resume" if left else ""
    except KeyboardInterrupt:
        code, message = 130, "interrupted" + ("; what was done is on file, go on with --resume" if o.out else "")
    except ContextLost as error:
        code, message = 3, f"{error}; its row is on file, --resume goes on without it there" if o.out else str(error)
    except ResultsError as error:
        code, message = 2, str(error)
    except OSError as error:
        code, message = 2, f"{error.filename or o.out}: {error.strerror or error}"
    progress.close()
    with contextlib.suppress(BrokenPipeError):
        if results is not None and results.rows:
            _show(stdout or sys.stdout, results, metrics, {p.name for p in here})
    try:
        if results is not None and o.csv is not None:
            o.csv.parent.mkdir(parents=True, exist_ok=True)
            o.csv.write_text(to_csv(results.rows), encoding="utf-8")
        if results is not None and o.plot is not None and results.rows:
            paths = page.write(o.plot, results.rows, results.environment, command, metrics if o.metrics else ())
            progress.say(f"{len(paths) - 1} pictures and {paths[-1]}")
    except OSError as error:
        code, message = 2, f"{error.filename or o.plot or o.csv}: {error.strerror or error}"
    if message:
        progress.say(f"benchmarks.run: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
