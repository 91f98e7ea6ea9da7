"""Train a small GPT twice from the same weights on the same text, with torch's ops and with tritonops, and compare.

    make demo            or: python examples/gpt_demo.py [--steps 20] [--out demo_out]

Shows both loss curves, which variant served each distinct call and why, the time per step, and one picture of the
losses. On a GPU the Triton variants train the model. Without one torch's own kernels serve, and every Triton variant
is run by Triton's interpreter on slices of the tensors that the training used.
Exit code 1 if the losses differ by more than the tolerance or a variant's error exceeds its bound.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import tritonops
from gpt.decisions import Decisions, collected
from gpt.model import CPU, GPU, GPU_FLOAT32, OURS, TORCH, Config
from gpt.slices import cut
from gpt.text import batches, load_tokens
from gpt.training import Run, step, train
from tritonops._compat import has_triton, interpreter_reason

Data = list[tuple[Tensor, Tensor]]


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def config_for(device: str) -> Config:
    if device == "cpu":
        return CPU
    # Before sm_80 bfloat16 is emulated.
    return GPU if torch.cuda.get_device_capability()[0] >= 8 else GPU_FLOAT32


def show_losses(theirs: Run, ours: Run, tolerance: float) -> bool:
    """Print both curves; whether they agree within the tolerance."""
    worst = 0.0
    print(f"  step    {theirs.name:>10}{ours.name:>12}{'difference':>14}")
    for i, (a, b) in enumerate(zip(theirs.losses, ours.losses, strict=True)):
        difference = abs(a - b) / abs(a)
        worst = difference if difference != difference else max(worst, difference)
        print(f"  {i + 1:4}    {a:10.5f}{b:12.5f}{difference:14.1e}")
    good = worst <= tolerance
    verdict = "agree" if good else "DIFFER"
    print(f"\n  The curves {verdict}: largest relative difference {worst:.1e}, tolerance {tolerance:.0e}.")
    return good


def show_decisions(decisions: Decisions) -> None:
    print("  Calls a step, the problem, the variant that served it [the rule that chose it], and why:\n")
    for reasons, same in itertools.groupby(decisions.made, lambda d: str(d).splitlines()[1:]):
        for decision in same:
            print(f"  {decisions.count(decision):3}x  {str(decision).splitlines()[0]}")
        for line in reasons:
            print(f"      {line}")
    if all(d.variant == "vendor" for d in decisions.made):
        print("\n  Torch's kernels served every call of both runs, which is why the curves coincide.")


def show_times(runs: list[Run], config: Config) -> None:
    for run in runs:
        print(f"  {run.name:34}{run.step_ms:9.2f} ms a step{config.tokens / run.step_ms:10.1f} k tokens/s")
    print("  (median of the steps after the third, wall time; one short run, not a benchmark)")


def show_kernels(run: Run, data: Data, decisions: Decisions) -> bool:
    """Profile one more step of a run; whether kernels of ours ran."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    ops = {d.op for d in decisions.made}
    names = {v.kernel.partition(":")[2] for op in ops for v in tritonops.variants(op) if v.kernel}
    with tritonops.use(exclude="vendor"), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(run.model, *data[0])
        torch.cuda.synchronize()
    kernels = [e for e in profiler.key_averages() if e.device_type == DeviceType.CUDA]
    total = sum(e.self_device_time_total for e in kernels)
    ours = [e for e in kernels if e.key in names]
    for e in sorted(ours, key=lambda e: -e.self_device_time_total):
        print(f"  {e.count:5}x {e.key:50}{e.self_device_time_total / 1e3:9.2f} ms")
    share = sum(e.self_device_time_total for e in ours) / max(total, 1e-9)
    print(
        f"  These are {share:.0%} of the step's {total / 1e3:.2f} ms on the GPU; the rest is attention, loss and sums."
    )
    return bool(ours)


def draw(runs: list[Run], target: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("  matplotlib is not installed: no picture (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for run, style in zip(runs, ("o-", "x--", "+:"), strict=False):
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=run.name)
    axes.set(xlabel="training step", ylabel="cross-entropy loss (nats per token)", title="Same weights, same text")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
    print(f"  Picture: {target}")


def run_interpreter(run: Run, data: Data) -> bool:
    """Every Triton variant on slices of the run's tensors, in a process whose Triton interprets."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch, "slices.pt")
        torch.save(cut(run.model, *data[0]), saved)
        path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        child = subprocess.run(
            [sys.executable, "-m", "gpt.interpreted", str(saved)],
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        )
    return child.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the picture")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = config_for(device)
    ids, names = load_tokens(config.vocab)
    data = batches(ids, config, arguments.steps, device)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    precision = str(config.dtype).removeprefix("torch.")
    print(f"tritonops {tritonops.__version__}, torch {torch.__version__}, on {where}")
    print(f"A GPT of {config.layers} layers, width {config.width}, {precision}; {config.tokens} tokens a step.")
    print(f"Text: Python's language reference, {len(ids)} tokens, {len(names)} distinct.")

    theirs = train("torch", TORCH, config, data)
    runs = [theirs]
    triton_trains = device == "cuda" and torch.version.hip is None and has_triton()
    exclude = "vendor" if triton_trains else None
    with tritonops.use(exclude=exclude):
        ours = train("tritonops, Triton variants only" if triton_trains else "tritonops", OURS, config, data)
        # One step more, apart from the timed ones: collecting costs host time at each call.
        with collected() as decisions:
            step(ours.model, *data[0])
        ours.model.zero_grad(set_to_none=True)
    runs += [ours]
    if triton_trains:
        runs += [train("tritonops, dispatcher's choice", OURS, config, data)]

    title("Losses")
    good = show_losses(theirs, ours, config.tolerance)
    draw(runs, arguments.out / "losses.png")
    title("Who served the calls")
    show_decisions(decisions)
    title("Time")
    show_times(runs, config)
    if triton_trains:
        title("Kernels of ours in one step, from torch.profiler")
        good = show_kernels(ours, data, decisions) and good
    else:
        title("Triton variants, interpreted on slices of this training's tensors")
        reason = interpreter_reason()
        if reason:
            print(f"  Not run: {reason}.")
        else:
            print(
                "  Relative error against float64, beside torch's. Bound: 1.05 x torch's, plus the square root of the\n"
                "  number of terms in float32 roundings, since the interpreter adds the rows of a tile one by one.\n"
            )
            good = run_interpreter(ours, data) and good
    print(f"\n{'All is well.' if good else 'FAILED: see above.'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
