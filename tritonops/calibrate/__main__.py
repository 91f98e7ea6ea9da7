"""Measure this GPU and write its dispatch tables: ``python -m tritonops.calibrate [OP ... | all] [STAGE ...]``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .. import _compat, _env
from ..device import DeviceInfo, device_info, named_device
from ..toolchain import AssemblerError
from . import install, plan, raw
from .progress import Progress
from .stages import ON_GPU, STAGES, WEIGHTS, WRITING, Run, Settings, Stop

OPS = tuple(WEIGHTS)
_SMOKE_BUDGET, _BUDGET = 30.0, 600.0


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
        return value

    return read


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    return Path(text).expanduser()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tritonops.calibrate",
        description="Measure this GPU and write its dispatch tables. With neither OP nor STAGE: all ops, all stages, "
        "and tables that pass are installed into the user's cache.",
        epilog=f"ops: {', '.join(OPS)}; stages: {', '.join(STAGES)}. Exit code: 0 done; 1 a table misses a bar on "
        "held-out shapes (it is written, and gives what is refused to torch); 2 wrong usage or environment; "
        "130 interrupted.",
    )
    parser.add_argument("what", nargs="*", metavar="OP|STAGE", help="ops (or all) and stages, in any order")
    parser.add_argument("--budget", type=_positive(float), metavar="SECONDS",
                        help=f"time to measure, all ops together (default {_BUDGET:g})")  # fmt: skip
    parser.add_argument(
        "--out", type=_folder, metavar="DIR", help="where files go (default: calibration/ in the cache)"
    )
    parser.add_argument("--target", metavar="NAME", help="a GPU that is not here, for example sm_90-132")
    parser.add_argument("--device", type=int, metavar="INDEX", help="CUDA index of the GPU (default: the current one)")
    parser.add_argument("--resume", action="store_true", help="go on where a run ended")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="your shapes: of tritonops.record, or a list")
    parser.add_argument("--jobs", type=_positive(int), metavar="N", help="compiling processes (default: one a core)")
    parser.add_argument("--smoke", action="store_true", help="a few cases of each op, to see it all work")
    parser.add_argument("--report", type=Path, metavar="DIR", help="pictures and index.html there (needs matplotlib)")
    parser.add_argument("--install", action="store_true", help="install the tables, whatever the stages and bars")
    parser.add_argument("--uninstall", action="store_true", help="remove the installed tables and measure nothing")
    return parser


def _choose(parser: argparse.ArgumentParser, what: Sequence[str]) -> tuple[list[str], list[str]]:
    """The ops and the stages named, in their own order; [] where none is, and for all ops."""
    for word in what:
        if word == "scaled_matmul":
            parser.error("scaled_matmul is not in this version")
        if word not in (*OPS, *STAGES, "all"):
            parser.error(f"{word!r} is no op and no stage; ops: {', '.join(OPS)}, all; stages: {', '.join(STAGES)}")
    ops = [op for op in OPS if op in what]
    return [] if "all" in what else ops, [stage for stage in STAGES if stage in what]


def _gpu(index: int | None) -> DeviceInfo | None:
    """The GPU here, or None.

    Raises:
        Stop: no GPU has that index, or it is not NVIDIA's.
    """
    if not torch.cuda.is_available():
        return None
    if index is not None and not 0 <= index < torch.cuda.device_count():
        raise Stop(f"--device {index}: there are {torch.cuda.device_count()} GPUs, from 0")
    found = device_info(torch.device("cuda", torch.cuda.current_device() if index is None else index))
    return found if found.capability else None


def _device(options: argparse.Namespace, stages: Sequence[str], out: Path) -> DeviceInfo:
    """What is calibrated.

    Raises:
        Stop: there is no such GPU, or none is named.
    """
    here = _gpu(options.device)
    wanted = named_device(options.target) if options.target else None
    on_gpu = [stage for stage in stages if stage in ON_GPU]
    if here is None and on_gpu:
        others = ", ".join(stage for stage in STAGES if stage not in ON_GPU)
        raise Stop(
            f"{' and '.join(on_gpu)}: there is no NVIDIA GPU here; the stages {others} run without one, "
            "with --target sm_90-132 (architecture, SM count)"
        )
    if here is not None and on_gpu and wanted is not None and wanted.table_name != here.table_name:
        raise Stop(f"--target {options.target}: the GPU here is {here.table_name} ({here.name})")
    if here is not None and wanted is not None and wanted.table_name == here.table_name:
        return here
    device = wanted or here
    if device is None:
        found = sorted({p.stem for op in OPS for p in (out / op).glob("sm_*-*.json")})
        raise Stop(
            "there is no NVIDIA GPU here; --target sm_90-132 (architecture, SM count) names one"
            + (f"; in {out} are {', '.join(found)}" if found else "")
        )
    return device


def _out(options: argparse.Namespace, stages: Sequence[str], progress: Progress) -> Path:
    """--out, or the cache's own folder, or a temporary one where that cannot be written."""
    if options.out is not None:
        return Path(options.out)
    out = _env.cache_dir() / "calibration"
    if any(stage in WRITING for stage in stages):
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            fallback = Path(tempfile.mkdtemp(prefix="tritonops-calibration-"))
            progress.say(f"warning: {out} cannot be written ({error.strerror or error}); files go to {fallback}")
            return fallback
    return out


def _uninstall(ops: Sequence[str], device: DeviceInfo) -> int:
    any_removed = False
    for op in ops:
        removed, left = install.uninstall(raw.Paths(_env.cache_dir(), op, device))
        any_removed |= bool(removed)
        for path in removed:
            print(f"{op}: removed {path}")
        if left:
            print(f"{op}: {left}")
    if not any_removed:
        print(f"nothing of {device.table_name} is installed in {_env.cache_dir()}")
    return 0


def _calibrate(parser: argparse.ArgumentParser, options: argparse.Namespace, progress: Progress) -> int:
    ops, named = _choose(parser, options.what)
    if options.uninstall:
        return _uninstall(ops or OPS, _device(options, (), _env.cache_dir()))
    stages = named or list(STAGES)
    if any(stage in ("static", *ON_GPU) for stage in stages) and not _compat.has_triton():
        raise Stop("static, gate and measure need triton: pip install triton")
    if "static" in stages and _env.interpret():
        raise Stop("static: TRITON_INTERPRET is set, so that no kernel can be compiled; unset it")
    if any(s in stages for s in ("learn", "verify", "emit")) and importlib.util.find_spec("numpy") is None:
        raise Stop("learn, verify and emit need numpy: pip install 'tritonops[calibrate]'")
    if options.report is not None:
        from . import report

        why = report.check()
        if why is not None:
            raise Stop(f"--report: {why}")
        options.report.mkdir(parents=True, exist_ok=True)
    shapes = plan.read_shapes(options.shapes) if options.shapes is not None else None
    device = _device(options, stages, options.out or _env.cache_dir() / "calibration")
    out = _out(options, stages, progress)
    implied = None if not named and not options.smoke else False
    settings = Settings(
        device,
        out,
        ops or ([op for op in OPS if op in shapes] if shapes is not None else OPS),
        budget=options.budget or (_SMOKE_BUDGET if options.smoke else _BUDGET),
        jobs=options.jobs,
        resume=options.resume,
        smoke=options.smoke,
        shapes=shapes,
        install=True if options.install else implied,
    )
    run = Run(settings, progress)
    with install.alone(out) if any(stage in WRITING for stage in stages) else contextlib.nullcontext(True) as free:
        if not free:
            raise Stop(f"another run is at work in {out}; wait for it, or give this one a folder of its own with --out")
        run.run(stages)
        if options.report is not None:
            run.pictures(options.report)
    if settings.install is not False:
        run.each(run.install)
        if run.installed:
            named_gpu = [] if device.name else ["--target", device.table_name]
            print("undo:", *("python -m tritonops.calibrate", *ops, *named_gpu, "--uninstall"))
    return run.code


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see --help for its exit codes."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.target is not None:
        try:
            named_device(options.target)
        except ValueError as error:
            parser.error(f"--target: {error}")
    progress = Progress()
    try:
        return _calibrate(parser, options, progress)
    except KeyboardInterrupt:
        message, code = "interrupted; what was done is kept, resume with --resume", 130
    except (Stop, AssemblerError, plan.PlanError) as error:
        message, code = str(error), 2
    except OSError as error:
        where = error.filename or options.out or _env.cache_dir()
        message = f"{where}: {error.strerror or error}; files written before it are kept, --resume goes on from them"
        code = 2
    with contextlib.suppress(OSError):
        progress.say(f"tritonops.calibrate: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
