"""What the embedding kernels compile to: asserts on ids, relaxed vector atomics, few binaries."""

from __future__ import annotations

import re

import pytest
import torch

import tritonops  # noqa: F401
from tritonops import launch
from tritonops.device import named_device
from tritonops.dispatch.variant import REGISTRY, Choice
from tritonops.toolchain import compile_request, compile_variant, measure

BACKWARD = REGISTRY["embedding_backward"]
TILES = [("embedding", "gather/16x256-w4"), ("embedding_backward", "atomic/16x256-w4")]


def _problem(op: str, columns: int, dtype: torch.dtype = torch.bfloat16, tokens: int = 4096):
    return REGISTRY[op].describe((tokens,), (1000, columns), dtype=dtype)


def _ids(tokens: int, offset: int = 0) -> torch.Tensor:
    return torch.empty(tokens + offset, dtype=torch.int32, device="meta")[offset:]


def _compile(op: str, variant: str, problem, device: str):
    (compiled,) = compile_variant(REGISTRY[op], REGISTRY[op].variants()[variant], problem, device)
    return compiled


@pytest.mark.parametrize("device", ["sm_80-108", "sm_90-132"])
@pytest.mark.parametrize(("op", "variant"), TILES)
def test_ids_are_checked_by_one_assert_that_names_the_op(op: str, variant: str, device: str) -> None:
    ptx = _compile(op, variant, _problem(op, 768), device).ptx
    assert len(re.findall(r"^\s*call\.uni", ptx, re.M)) == 1 and "__assertfail" in ptx
    strings = [
        bytes(int(b) for b in found.split(",")).split(b"\0")[0].decode()
        for found in re.findall(r"\.global .*?\.b8 assertMessage\w*\[\d+\] = \{([\d, ]+)\}", ptx)
    ]
    assert strings == [f"tritonops.{op}: index out of range in self"]


@pytest.mark.parametrize(("columns", "width"), [(768, "v4"), (300, "v4"), (302, "v2"), (301, "")])
def test_atomics_are_relaxed_vectors_whatever_the_width(columns: int, width: str) -> None:
    device, variant = named_device("sm_90-132"), BACKWARD.variants()["atomic/16x256-w4"]
    dy = torch.empty(4096, columns, dtype=torch.bfloat16, device="meta")
    with launch.capture() as requests:
        problem = _problem("embedding_backward", columns)
        variant.run(Choice(variant, problem, device, None), dy, _ids(4096), 1000, -1, False)
    compiled = compile_request(requests[0], device)
    found = set(re.findall(r"(?:atom|red)\.global\.[\w.]+", compiled.ptx))
    assert len(found) == 1 and re.fullmatch(
        rf"(atom|red)\.global\.gpu\.relaxed\.add\.{width + '.' if width else ''}f32", found.pop()
    )
    sass = measure(compiled, sass=True).sass
    assert sass is None or (sass["RED"] > 0 and sass["MEMBAR"] == sass["CCTL"] == sass["ATOM"] == 0)


@pytest.mark.parametrize("variant", ["gather/16x256-w4", "gather/1x1024-w4"])
def test_rows_move_in_16_bytes(variant: str) -> None:
    ptx = _compile("embedding", variant, _problem("embedding", 1024), "sm_90-132").ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


@pytest.mark.parametrize(("op", "variant"), TILES)
def test_no_binary_for_each_number_of_tokens_or_table(op: str, variant: str) -> None:
    """Specialisation keys over tokens, table sizes and offsets of ids."""
    spec, keys = REGISTRY[op], set()
    for tokens, rows, columns, padding in ((1, 1, 768, -1), (16, 16, 768, 0), (17, 1000, 96, 1), (4096, 32, 1024, 16)):
        for offset in (0, 1):
            ids = _ids(tokens, offset)
            problem = _problem(op, columns, tokens=tokens)
            v = spec.variants()[variant]
            table = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
            args = (table, ids) if op == "embedding" else (table[:1].expand(tokens, columns), ids, rows)
            with launch.capture() as requests:
                v.run(Choice(v, problem, named_device("sm_90-132"), None), *args, padding, False)
            keys.add(_specialisation(requests[0]))
    assert len(keys) == 1


def _specialisation(request: launch.LaunchRequest) -> tuple:
    """What Triton's JIT compiles for: types, and values and divisibility of the arguments that it specialises."""
    from triton.runtime.jit import JITFunction

    assert isinstance(request.kernel, JITFunction)
    key = []
    for parameter, value in zip(request.kernel.params, request.args, strict=False):
        tensor = isinstance(value, torch.Tensor)
        what = [str(value.dtype) if tensor else "i32" if value < 2**31 else "i64"]
        if not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment:
            what.append(value.data_ptr() % 16 == 0 if tensor else (value == 1, value % 16 == 0))
        key.append(tuple(what))
    return (*key, tuple(sorted(request.meta.items())))
