"""The variant record and the op record; dispatch knows ops only through these."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..device import DeviceInfo
from .problem import Problem

# tma: tensor descriptors; coresident: programs that wait for each other; gluon; cluster: num_ctas > 1;
# bf16_dot, fp8: dtypes the interpreter computes wrongly.
NEEDS = frozenset({"tma", "coresident", "gluon", "cluster", "bf16_dot", "fp8"})

VENDOR = "vendor"

ID = re.compile(r"[a-z0-9_]+(/[A-Za-z0-9_.+-]+)?")


def _anything(problem: Problem, device: DeviceInfo) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its tile configuration and compiler flags, or the vendor's own kernel.

    Attributes:
        id: ``family/config``, or ``vendor``.
        run: ``run(choice, *op_args)`` executes the variant; `op_args` are those of the op's schema without flags.
            It reads its configuration from ``choice.variant`` and sizes from ``choice.problem``; every Triton
            launch in it goes through ``tritonops.launch.launch``, so that with meta tensors it can be captured
            and compiled without a GPU.
        requires: ``requires(problem, device)`` gives the reason why this variant cannot serve, or None.
        meta: tile configuration.
        options: compiler options, made by ``tritonops.launch.options``.
        needs: subset of NEEDS, what the kernel asks of the toolchain or the device.
        kernel: ``module:function`` of the Triton kernel (its source hash and its name in a profile); None for torch.
        deterministic: same bits from the same inputs.
        batch_invariant: a row's bits do not depend on the other rows or on their number.
    """

    id: str
    run: Callable[..., Any]
    requires: Callable[[Problem, DeviceInfo], str | None] = _anything
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    needs: frozenset[str] = frozenset()
    kernel: str | None = None
    deterministic: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.id):
            raise ValueError(f"variant id {self.id!r} is not of the form family/config")
        if self.needs - NEEDS:
            raise ValueError(f"variant {self.id}: unknown needs {sorted(self.needs - NEEDS)}")

    @property
    def family(self) -> str:
        return self.id.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Choice:
    """A decided call: what the memo holds and a variant's ``run`` receives."""

    variant: Variant
    problem: Problem
    device: DeviceInfo
    decision: Any


@dataclass(frozen=True)
class OpSpec:
    """What dispatch knows of an op.

    Attributes:
        name: the op's name; also its table directory.
        load: returns the op's variants; called at the first choice, so that kernels and Triton load late.
        dims: names of ``Problem.dims``, all of which are table features.
        features: further integer table features, computed from the dims and the device (``tiles128``, ...).
        prefer: ranking of our own variants where no table decides (measured defaults or plain caution).
        describe: ``describe(*public_args, **kw)`` -> Problem, for tensors, meta tensors or shapes and a dtype.
        sample: ``sample(problem, torch_device, ids)`` -> op arguments for a variant's ``run`` that make up that
            problem; random on a real device, meta tensors on ``"meta"``. `ids`, one of the record's own, may be left
            out.
        invariant: the problem whose choice serves every batch size under the batch_invariant policy.
        aliases: further public functions that the op serves, each with its own `describe`.
        oracle: ``oracle(problem, *op_args)`` -> the op's outputs in float64, all of them, whatever is asked for.
        terms: length of the longest sum in the computation of a problem.
        ids: distributions of the data on which a time depends beside the sizes; ``("",)`` where there is none.
    """

    name: str
    load: Callable[[], Sequence[Variant]]
    dims: tuple[str, ...]
    prefer: Callable[[Problem, DeviceInfo], Sequence[str]]
    describe: Callable[..., Problem]
    sample: Callable[..., tuple[Any, ...]]
    features: Callable[[Problem, DeviceInfo], Mapping[str, int]] = lambda problem, device: {}
    feature_names: tuple[str, ...] = ()
    invariant: Callable[[Problem], Problem] = lambda problem: problem
    aliases: Mapping[str, Callable[..., Problem]] = field(default_factory=lambda: MappingProxyType({}))
    oracle: Callable[..., tuple[Any, ...]] | None = None
    terms: Callable[[Problem], int] = lambda problem: 1
    ids: tuple[str, ...] = ("",)

    def variants(self) -> dict[str, Variant]:
        return _variants(self)

    def all_features(self, problem: Problem, device: DeviceInfo) -> dict[str, int]:
        return {**problem.dims, **self.features(problem, device)}


_LOADED: dict[str, dict[str, Variant]] = {}
REGISTRY: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> OpSpec:
    if spec.name in REGISTRY:
        raise ValueError(f"op {spec.name!r} is registered already")
    REGISTRY[spec.name] = spec
    return spec


def _variants(spec: OpSpec) -> dict[str, Variant]:
    loaded = _LOADED.get(spec.name)
    if loaded is None:
        listed = list(spec.load())
        loaded = {v.id: v for v in listed}
        twice = [vid for vid, count in Counter(v.id for v in listed).items() if count > 1]
        if twice:
            raise ValueError(f"op {spec.name!r} lists {', '.join(twice)} more than once")
        if VENDOR not in loaded:
            raise ValueError(f"op {spec.name!r} has no {VENDOR!r} variant")
        _LOADED[spec.name] = loaded
    return loaded
