"""What tests of the dispatcher share: a toy op in plain torch, devices that are not here, tables, a clean start."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonops
from tritonops import _compat, device
from tritonops.device import DeviceInfo
from tritonops.dispatch import memo, override, source, store, variant
from tritonops.dispatch.problem import Problem
from tritonops.dispatch.variant import VENDOR, Choice, OpSpec, Variant, register

OURS = ("one/a", "one/b", "two/a", "loose/a", "steady/a", "picky/a", "dense/a", "plain/a")
SOURCE_OF_ONE, SOURCE_OF_TWO = "1" * 64, "2" * 64


def cuda(name: str = "NVIDIA Test", arch: str = "sm_90", sms: int = 132, shared: int = 232448, index: int = 0):
    """A GPU that is not here."""
    return DeviceInfo("cuda", arch, sms, shared, name=name, index=index)


@dataclass
class Toy:
    """An op that doubles its argument. ``calls`` are the variants that ran, ``failing`` what a variant raises."""

    calls: list[str] = field(default_factory=list)
    failing: dict[str, BaseException] = field(default_factory=dict)
    prefer: list[str] = field(default_factory=lambda: ["two/a", "one/a"])
    op: str = "toy"

    def run(self, choice: Choice, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(choice.variant.id)
        if choice.variant.id in self.failing:
            raise self.failing[choice.variant.id]
        return x * 2

    def variants(self) -> list[Variant]:
        one, two = "toy_kernels:one_kernel", "toy_kernels:two_kernel"
        backward = [Variant("one/back", self.run, kernel=one)] if self.op.endswith("_backward") else []
        return [
            Variant(VENDOR, self.run),
            Variant("one/a", self.run, kernel=one),
            Variant("one/b", self.run, kernel=one),
            Variant("two/a", self.run, kernel=two),
            Variant("loose/a", self.run, kernel=one, deterministic=False),
            Variant("steady/a", self.run, kernel=one, batch_invariant=True),
            Variant("picky/a", self.run, _whole_tiles, kernel=one),
            Variant("dense/a", self.run, kernel=one, needs=frozenset({"tma"})),
            Variant("plain/a", self.run),
            *backward,
        ]

    @property
    def spec(self) -> OpSpec:
        return variant.REGISTRY[self.op]

    def problem(self, m: int = 64, n: int = 64, **facts: Any) -> Problem:
        flags = override.effective(facts.pop("flags", override.flags))
        dims, dtype = {"M": m, "N": n}, facts.pop("dtype", "float32")
        return Problem(self.op, dims, dtype, policy=override.policy(flags), flags=flags, **facts)

    def __call__(self, gpu: DeviceInfo, m: int = 64, n: int = 64, **facts: Any) -> str:
        """Serve one call, check its result, and return the variant that gave it."""
        problem = self.problem(m, n, **facts)
        key = (problem.op, gpu, m, n, problem.dtype, problem.layout, problem.aligned, problem.mode, problem.flags)
        x = torch.arange(6.0)
        out = memo.serve(self.spec, key, gpu, lambda: problem, (x,))
        assert torch.equal(out, torch.arange(6.0) * 2) and torch.equal(x, torch.arange(6.0))
        return self.calls[-1]


def _whole_tiles(problem: Problem, gpu: DeviceInfo) -> str | None:
    return None if problem.dims["M"] % 128 == 0 else "takes whole tiles of 128 rows"


def _features(problem: Problem, gpu: DeviceInfo) -> dict[str, int]:
    tiles = -(-problem.dims["M"] // 128) * -(-problem.dims["N"] // 128)
    return {"tiles128": tiles, "waves100": 100 * tiles // max(gpu.sms, 1)}


def _describe(m: int, n: int, dtype: Any = torch.float32) -> Problem:
    bits = override.effective(override.flags)
    return Problem("toy", {"M": m, "N": n}, str(dtype)[6:], policy=override.policy(bits), flags=bits)


def _toy(name: str) -> Toy:
    made = Toy(op=name)
    register(
        OpSpec(
            name,
            made.variants,
            ("M", "N"),
            lambda problem, gpu: made.prefer,
            _describe,
            lambda problem, where: (torch.arange(6.0, device=where),),
            _features,
            ("tiles128", "waves100"),
            lambda problem: dataclasses.replace(problem, dims={**problem.dims, "M": 4096}, layout="", aligned=False),
        )
    )
    return made


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing remembered or warned of, an empty user cache and no other table, Triton 3.6.0 with ptxas 12.8."""
    tritonops.clear_cache()
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(store, "_PACKAGE", tmp_path / "installed" / "tritonops")
    monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITONOPS_TABLE_DIR", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(_compat, "has_triton", lambda: True)
    monkeypatch.setattr(_compat, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(_compat, "ptxas_version", lambda capability: "12.8")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of tiny calls wait for each other's threads on a busy machine
    yield
    torch.set_num_threads(threads)
    assert override.flags == 0
    tritonops.clear_cache()


@pytest.fixture
def toys(clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Toy, Toy]]:
    """The toy op and its backward, whose kernels' source hashes are SOURCE_OF_ONE and SOURCE_OF_TWO."""
    hashes = {"toy_kernels:one_kernel": SOURCE_OF_ONE, "toy_kernels:two_kernel": SOURCE_OF_TWO}
    monkeypatch.setattr(source, "source_hash", lambda name: hashes[name])
    yield _toy("toy"), _toy("toy_backward")
    for name in ("toy", "toy_backward"):
        del variant.REGISTRY[name]
        variant._LOADED.pop(name, None)


@pytest.fixture
def toy(toys: tuple[Toy, Toy]) -> Toy:
    return toys[0]


@pytest.fixture
def tables(toys: tuple[Toy, Toy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that TRITONOPS_TABLE_DIR names, empty."""
    directory = tmp_path / "tables"
    directory.mkdir()
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(directory))
    return directory


def leaf(*use: str, **more: Any) -> dict[str, Any]:
    return {"use": list(use), "n": 3, **more}


def section(tree: dict[str, Any], hull: dict[str, Any] | None = None, **when: Any) -> dict[str, Any]:
    return {"when": when, "hull": hull or {}, "tree": tree, "evidence": {"shapes": 3}}


def make_table(*sections: dict[str, Any], gpu: DeviceInfo | None = None, **changes: Any) -> dict[str, Any]:
    """A measured table of the toy op."""
    gpu = gpu or cuda()
    return {
        "schema": 1,
        "op": "toy",
        "device": {"arch": gpu.arch, "sms": gpu.sms, "names": [gpu.name or "NVIDIA Test"]},
        "made_with": {"triton": "3.6.1", "ptxas": "12.8.93"},
        "provenance": {"kind": "measured", "raw": "raw/toy.jsonl.gz"},
        "kernels": {"one": {"source": SOURCE_OF_ONE}, "two": {"source": SOURCE_OF_TWO}},
        "variants": {v: {} for v in OURS},
        "sections": list(sections),
        "default": [VENDOR],
        **changes,
    }


def put(directory: Path, content: dict[str, Any] | bytes, gpu: DeviceInfo | None = None, op: str = "toy") -> Path:
    """Write a table where the search looks for it below `directory`."""
    path = store.table_path(directory, op, gpu or cuda())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


class Heard(list[str]):
    """Messages of the TritonOpsWarnings raised while the block ran; any other warning fails the test."""

    def __enter__(self) -> Heard:
        self._catching = warnings.catch_warnings(record=True)
        self._caught = self._catching.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error: object) -> None:
        self._catching.__exit__(*error)
        self.extend(str(w.message) for w in self._caught)
        assert [w.category for w in self._caught if w.category is not tritonops.TritonOpsWarning] == []


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: DeviceInfo) -> None:
    """Every op takes the CPU for `gpu`."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.index)
    original = device.device_info
    for name, module in list(sys.modules.items()):
        if name.startswith("tritonops") and getattr(module, "device_info", None) is original:
            monkeypatch.setattr(module, "device_info", lambda where: gpu)
