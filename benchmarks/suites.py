"""Suites: named lists of shapes.

Sizes are those of dispatch_tables/shapes, which calibration plans from too; only CLIFFS is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tritonops.calibrate.candidates import KINDS, Section
from tritonops.calibrate.shapes import DIMS, Lists, Sweep

OPS = ("matmul", "layer_norm", "rms_norm", "embedding")
PASSES = ("fwd", "bwd")

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """Sizes in the order of DIMS, for a product with the layout that it is computed in."""

    sizes: Sizes
    layout: str = ""
    source: str = ""
    heldout: bool = False
    ids: tuple[str, ...] = ("uniform",)


Items = Callable[[str, str, Lists], Iterator[Item]]


@dataclass(frozen=True)
class Suite:
    """A named list.

    Attributes:
        ops: those it has by itself; `extra` are further ones that it can be asked for.
        directions: the passes measured where none is asked for.
        items: ``items(op, direction, lists)``; a product's items say in which layout it is computed.
    """

    name: str
    ops: tuple[str, ...]
    items: Items
    dtype: str = "bfloat16"
    directions: tuple[str, ...] = PASSES
    extra: tuple[str, ...] = ()


def kind_of(op: str) -> str:
    return KINDS[op].name


def _sweeps(lists: Lists, *names: str) -> Iterator[Sweep]:
    for name in names:
        yield next(s for s in (*lists.sweeps, *lists.listed) if s.name == name)


def gradients(m: int, n: int, k: int) -> Iterator[tuple[Sizes, str]]:
    """Of y [M, N] = x [M, K] w [N, K]^T: dx = dy w and dw = dy^T x."""
    yield (m, k, n), "nn"
    yield (n, k, m), "tn"


def _listed(*names: str, layout: str = "nt") -> Items:
    """Published sweeps; a product that is listed for every layout is computed in `layout`."""

    def items(op: str, direction: str, lists: Lists) -> Iterator[Item]:
        for sweep in _sweeps(lists, *names):
            if sweep.op != kind_of(op):
                continue
            own = sweep.layouts[0] if len(sweep.layouts) == 1 else layout
            for sizes in sweep.rows:
                if op == "matmul" and direction == "bwd":
                    for products, how in gradients(*sizes):
                        yield Item(products, how, f"{sweep.name} gradient", sweep.heldout)
                else:
                    yield Item(sizes, own if op == "matmul" else "", sweep.name, sweep.heldout)

    return items


def _tutorial(name: str) -> Items:
    """The sweep over K of triton's tutorial 09, on b stored as [N, K]."""
    return _listed(name)


# Held-out rows or tokens of a step (tritonops.calibrate.candidates): of a prefill or a training step, and of decoding.
STEP_ROWS = (320, 3072)
TRAINING_ROWS = (3072,)
DECODE_ROWS = (1, 3, 24, 96)
BOTH_IDS = ("uniform", "zipf1.0")


def _models(rows: Sequence[int], training: Sequence[int]) -> Items:
    """Layers of the models that no table was learned from, each size once."""

    def items(op: str, direction: str, lists: Lists) -> Iterator[Item]:
        wanted = rows if direction == "fwd" else training
        layouts = (("nt",) if direction == "fwd" else ("nn", "tn")) if op == "matmul" else ("",)
        spec = op if op == "matmul" or direction == "fwd" else f"{op}_backward"
        seen: set[tuple[Sizes, str]] = set()
        for model in lists.models:
            for layout in layouts if model.heldout else ():
                for c in KINDS[op].layers(model, layout, True):
                    count = c.sizes[2] if layout == "tn" else c.sizes[0]
                    if count not in wanted or (c.sizes, layout) in seen or not _fits(spec, layout, c.sizes):
                        continue
                    seen.add((c.sizes, layout))
                    yield Item(c.sizes, layout, c.source, True, BOTH_IDS if direction == "bwd" else ("uniform",))

    return items


def _fits(spec: str, layout: str, sizes: Sizes) -> bool:
    """As a case of calibration's, whose limits bound time and memory; alignment does not matter."""
    return any(KINDS[spec].fits(spec, Section("bfloat16", layout, aligned), sizes) for aligned in (True, False))


def _misaligned(op: str, direction: str, lists: Lists) -> Iterator[Item]:
    """Products with rows that are no multiple of 16 bytes; those of a model's gradients are the backward."""
    for sweep in lists.listed:
        gradient = sweep.name.endswith(("dgrad", "wgrad"))
        if sweep.op == kind_of(op) and gradient == (direction == "bwd"):
            for sizes in sweep.rows:
                yield Item(sizes, "nt" if "nt" in sweep.layouts else sweep.layouts[0], sweep.name, sweep.heldout)


# Either side of an edge where kernels fall over: the row that no longer fits one program's registers or one power of
# two, rows wider than 65536 bytes, the last partial wave of output tiles, ids that repeat.
CLIFFS: dict[str, tuple[Item, ...]] = {
    "matmul": (
        *(Item((m, 4096, 4096), "nt", "waves of 128 x 128 tiles") for m in (4096, 4224, 4352)),
        *(Item((4096, 4096, k), "nt", "rows of a multiple of 16 bytes, and not") for k in (4096, 4100, 4104)),
        *(Item((256, 256, k), "nt", "few tiles, deep K") for k in (1024, 16384)),
    ),
    "norm": tuple(
        Item(sizes, "", "wide rows")
        for sizes in (
            (4096, 4096), (4096, 4608), (4096, 8192), (4096, 8704), (16384, 16384), (16384, 17408),
            (8192, 32768), (2048, 65536), (2048, 66560), (32768, 256), (32768, 1024), (16, 8192), (1, 8192),
        )
    ),
    "embedding": (
        Item((16384, 768, 1024), "", "every id repeats", ids=BOTH_IDS),
        Item((16384, 4096, 128256), "", "llama-3 vocabulary", ids=BOTH_IDS),
        Item((262144, 1024, 50304), "", "long runs", ids=BOTH_IDS),
    ),
}  # fmt: skip


def _cliffs(op: str, direction: str, lists: Lists) -> Iterator[Item]:
    for item in CLIFFS[kind_of(op)]:
        if direction == "fwd":
            yield Item(item.sizes, item.layout, item.source)
        elif op != "matmul":
            yield item


def _overhead(op: str, direction: str, lists: Lists) -> Iterator[Item]:
    """64 x 64 (x 64): no kernel of it takes longer than the host."""
    if op != "matmul" or direction == "fwd":
        yield Item((64,) * len(DIMS[kind_of(op)]), "nt" if op == "matmul" else "", "64")


_NORMS = ("layer_norm", "rms_norm")
_GEMM = ("tritonbench gemm squares", "tritonbench gemm splitk", "tritonbench gemm tall", "tritonbench gemm llama")
_EMBEDDING = ("tritonbench embedding 768", "tritonbench embedding 4096")

SUITES = {
    s.name: s
    for s in (
        Suite("tutorial09-4k", ("matmul",), _tutorial("persistent-tutorial 4096"), "float16", ("fwd",)),
        Suite("tutorial09-8k", ("matmul",), _tutorial("persistent-tutorial 8192"), "float16", ("fwd",)),
        Suite("tritonbench-layer-norm", ("layer_norm",), _listed("tritonbench layer_norm"), extra=("rms_norm",)),
        Suite("tritonbench-embedding", ("embedding",), _listed(*_EMBEDDING)),
        # As tritonbench does: row-major operands.
        Suite("tritonbench-gemm", ("matmul",), _listed(*_GEMM, layout="nn"), directions=("fwd",)),
        Suite("llm", OPS, _models(STEP_ROWS, TRAINING_ROWS)),
        Suite("misaligned", ("matmul",), _misaligned),
        Suite("decode", ("matmul", *_NORMS), _models(DECODE_ROWS, ()), directions=("fwd",)),
        Suite("cliffs", ("matmul", "layer_norm", "embedding"), _cliffs, extra=("rms_norm",)),
        Suite("overhead", OPS, _overhead),
    )
}
TUTORIALS = ("tutorial09-4k", "tutorial09-8k")
