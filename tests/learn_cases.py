"""Made-up raw files for tests of the learner: known speed-ups over the vendor, seeded noise, 20 paired rounds."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tritonops.calibrate.case import Case
from tritonops.calibrate.raw import Measured, Raw
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import VENDOR, OpSpec, Variant

OURS = ("small/a", "wide/a", "slow/a", "twin/a", "whole/a")
FACTS = {"arch": "sm_90", "sms": 132, "names": ["NVIDIA Test"], "memory_gib": 140, "copy_tbps": 4.0}

# Speed-up of each variant over the vendor.
Speeds = Callable[[int, int], Mapping[str, float]]


def _run(choice: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def _features(problem: Problem, device: Any) -> dict[str, int]:
    tiles = -(-problem.dims["M"] // 128) * -(-problem.dims["N"] // 128)
    return {"tiles128": tiles, "waves100": 100 * tiles // device.sms}


# It is not registered: nothing but its names, its features and the properties of its variants is asked for.
SPEC = OpSpec(
    "learned_toy",
    lambda: [
        Variant(VENDOR, _run),
        *(Variant(v, _run, kernel=f"toy_kernels:{v[:-2]}_kernel", deterministic=v != "small/a",
                  batch_invariant=v == "slow/a") for v in OURS),
    ],
    ("M", "N"),
    lambda problem, device: OURS,
    lambda *shapes: None,
    lambda *args: (),
    _features,
    ("tiles128", "waves100"),
)  # fmt: skip


def speeds(m: int, n: int) -> dict[str, float]:
    """small/a wins up to M = 256, wide/a beyond it from N = 4096, elsewhere the vendor; whole/a takes whole tiles."""
    small = 1.3 if m <= 256 else 0.7
    out = {"small/a": small, "twin/a": small, "wide/a": 1.25 if m > 256 and n >= 4096 else 0.85, "slow/a": 0.6}
    return out | ({"whole/a": 0.9} if n % 128 == 0 else {})


def grid(ms: Iterable[int] = (16, 64, 256, 512, 2048, 8192), ns: Iterable[int] = (512, 1024, 2048, 4096, 8192, 16384)):
    return [(m, n) for m in ms for n in ns]


def between(count: int = 40, seed: int = 1) -> list[tuple[int, int]]:
    """Log-random shapes within the grid's hull, none of them at a crossover's unmeasured gap."""
    rng, out = random.Random(seed), []
    while len(out) < count:
        m, n = round(2 ** rng.uniform(4, 13)), round(2 ** rng.uniform(9, 14))
        if not (256 < m < 512 or 2048 < n < 4096):
            out.append((m, n))
    return out


def measured(
    m: int,
    n: int,
    gains: Mapping[str, float],
    *,
    noise: float = 0.01,
    seed: int = 0,
    rounds: int = 20,
    eager: Mapping[str, float] | None = None,
    dtype: str = "bfloat16",
    traits: Mapping[str, Any] | None = None,
    **case: Any,
) -> Measured:
    """One case. Each round drifts as a whole by twice the noise, which pairing takes out again."""
    rng = random.Random(f"{seed} {m} {n} {dtype} {sorted(case.items())}")
    failed = case.pop("failed", {})
    base = 0.002 + 2 * m * n * 2 / 4e9
    drift = [rng.lognormvariate(0, 2 * noise) for _ in range(rounds)]

    def times(by: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
        return {v: tuple(base / g * d * rng.lognormvariate(0, noise) for d in drift)
                for v, g in sorted({VENDOR: 1.0, **by}.items())}  # fmt: skip

    problem = Problem(SPEC.name, {"M": m, "N": n}, dtype, traits=traits or {})
    return Measured(Case(problem, **case), times(gains), times(eager) if eager is not None else {}, failed)


def raw_of(rows: Sequence[Measured], *, gate: Iterable[str] = (), shapes: bool = False) -> Raw:
    """A raw file of `rows`, with `shapes` a user's own; the variants named in `gate` have failed it."""
    if shapes:
        rows = [dataclasses.replace(m, case=dataclasses.replace(m.case, own=True)) for m in rows]
    entry = {"meta": {"BLOCK": 64}, "options": {"num_warps": 4}, "regs": 64, "spill": 0, "text": "0" * 64}
    header = {
        "kind": "header",
        "schema": 1,
        "op": SPEC.name,
        "device": FACTS,
        "made_with": {"tritonops": "0", "torch": "2", "triton": "3.6.0", "date": "2026-01-01", "command": "test"},
        "kernels": {v[:-2]: {"source": f"{i}" * 64} for i, v in enumerate(OURS)},
        "variants": {v: entry for v in OURS},
        "dropped": {},
        "gate": {v: {"passed": v not in gate, "why": "", "cases": 1, "error": 0.5} for v in (VENDOR, *OURS)},
        "method": {"eager_below_ms": 0.2, "shapes": shapes},
    }
    return Raw(header, tuple(rows))


def synthetic(noise: float = 0.01, seed: int = 0, by: Speeds = speeds, heldout: int = 40, **more: Any) -> Raw:
    """The grid to learn from and `heldout` shapes between its points to verify on."""
    rows = [measured(m, n, by(m, n), noise=noise, seed=seed) for m, n in grid()]
    rows += [measured(m, n, by(m, n), noise=noise, seed=seed, heldout=True) for m, n in between(heldout)]
    return raw_of(rows, **more)


def shuffled(raw: Raw, seed: int) -> Raw:
    """The same measurements with rows, candidates, dimensions and traits in another order."""
    rng = random.Random(seed)

    def mixed(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            rng.shuffle(keys)
            return {k: mixed(value[k]) for k in keys}
        return value

    rows = [Measured.from_json(raw.op, mixed(json.loads(json.dumps(m.to_json())))) for m in raw.measured]
    rng.shuffle(rows)
    return Raw(raw.header, tuple(rows))


def walk(tree: Mapping[str, Any], features: Mapping[str, int]) -> Mapping[str, Any]:
    while "use" not in tree:
        tree = tree["yes"] if features[tree["f"]] <= tree["le"] else tree["no"]
    return tree


def leaves(tree: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tree] if "use" in tree else leaves(tree["yes"]) + leaves(tree["no"])
