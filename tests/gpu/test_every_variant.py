"""A hand-made table forces each variant of each op; the profile shows its kernel, the oracle its result."""

from __future__ import annotations

import json
import re

import pytest
import torch

import tritonops
from gpu.problems import problems
from tritonops.device import device_info
from tritonops.dispatch import select
from tritonops.dispatch.variant import REGISTRY, Choice

CELLS = [(op, v.id) for op, spec in sorted(REGISTRY.items()) for v in spec.variants().values()]


def _table(op: str, variant: str) -> bytes:
    device = device_info(torch.device("cuda"))
    ids = {v.id for v in REGISTRY[op].variants().values()} - {"vendor"}
    return json.dumps(
        {
            "schema": 1,
            "op": op,
            "device": {"arch": device.arch, "sms": device.sms, "names": [device.name]},
            "made_with": {},
            "provenance": {"kind": "measured", "raw": "raw/by-hand.jsonl.gz", "sha256": "0" * 64},
            "kernels": {},
            "variants": {v: {} for v in sorted(ids)},
            "sections": [{"when": {}, "hull": {}, "tree": {"use": [variant]}, "evidence": {}}],
            "default": ["vendor"],
        }
    ).encode()


def _problem(op: str, variant: str):
    spec, device = REGISTRY[op], device_info(torch.device("cuda"))
    reasons = set()
    for args, kwargs in problems(op):
        problem = spec.describe(*args, **kwargs)
        reason = select.illegal(spec, spec.variants()[variant], problem, device)
        if reason is None:
            return problem
        reasons.add(reason)
    raise AssertionError(f"{op} {variant} is legal for no problem of this test: {reasons}")


def _kernels(call) -> set[str]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {e.key for e in profile.key_averages()}


@pytest.mark.parametrize(("op", "variant"), CELLS)
def test_a_table_makes_each_variant_run(op, variant, table_dir) -> None:
    problem = _problem(op, variant)
    (table_dir / op).mkdir()
    device = device_info(torch.device("cuda"))
    (table_dir / op / f"{device.table_name}.json").write_bytes(_table(op, variant))
    tritonops.clear_cache()
    spec = REGISTRY[op]
    args = spec.sample(problem, "cuda")
    decision = select.choose(spec, problem, device)
    assert decision.variant == variant and decision.rule == "table", str(decision)

    call = getattr(torch.ops.tritonops, op)
    got = call(*args, 0)
    with tritonops.use(variant={op: "vendor"}):
        from tritonops.dispatch import override

        want = call(*args, override.flags)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = b.double().norm().clamp_min(1e-30)
        assert float((a.double() - b.double()).norm() / scale) < (1e-2 if a.dtype != torch.float32 else 2e-3)

    # Past the dispatcher, as the eager path runs it: a view could not be modified in place under autograd.
    chosen = Choice(spec.variants()[variant], problem, device, decision)
    direct = chosen.variant.run(chosen, *args)
    assert not any(t._is_view() for t in (direct if isinstance(direct, tuple) else (direct,)))

    names = _kernels(lambda: call(*args, 0))
    own = {v.kernel.partition(":")[2] for v in spec.variants().values() if v.kernel and v.family != "liger"}
    kernel = spec.variants()[variant].kernel
    if kernel is None:
        assert not any(re.search("|".join(own), name) for name in names), names
    else:
        assert any(kernel.partition(":")[2] in name for name in names), names
