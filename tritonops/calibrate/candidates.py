"""Sizes that a plan may choose from: layers of public models, sweeps, listed shapes, and log-random fill."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..dispatch.problem import Problem
from ..dispatch.variant import OpSpec
from .shapes import DIMS, Lists, Model

Sizes = tuple[int, ...]
Dims = Mapping[str, int]

# Rows of a product or tokens of a step: those of training cases and those of held-out ones have only M = 1 in common.
_TRAIN_M = (
    1, 2, 4, 5, 8, 12, 16, 32, 48, 64, 80, 128, 160, 256, 448, 512, 640,
    1024, 1280, 2048, 2560, 4096, 5120, 8192, 10240, 16384,
)  # fmt: skip
_HELDOUT_M = (1, 3, 24, 40, 96, 320, 720, 1536, 3072, 6144, 12288)
# Steps that have a backward pass have at least as many tokens.
_MIN_WGRAD_TOKENS = 128
_MORE_TRAIN_ROWS = (20480, 32768, 65536, 131072)
_MORE_HELDOUT_ROWS = (24576, 49152, 98304)

_MAX_BYTES = 3 << 30  # of all operands and outputs of one case
_MAX_NORM_BYTES = 1 << 30  # of x
# Of a product: 2 ms on an H200, as ten calls are in a graph, and larger ones have many waves too. An ieee float32 one
# runs on FMA units, at a fifteenth of the bfloat16 rate, a tf32 one at half of it.
_MAX_FLOPS = {"float32": 10**11, "tf32": 7 * 10**11}
_MAX_FLOPS_16_BIT = 15 * 10**11

NORMS = ("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward")


@dataclass(frozen=True)
class Section:
    """What one part of a table is learned from: `dtype` as Problem.table_dtype says it."""

    dtype: str
    layout: str
    aligned: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, "float32" if self.dtype == "tf32" else self.dtype)
        return dtype


@dataclass(frozen=True)
class Candidate:
    """Sizes in the order of the op's kind: (M, N, K), (M, N) or (T, D, V)."""

    sizes: Sizes
    group: str
    source: str


@dataclass(frozen=True)
class Kind:
    """Ops with the same sizes.

    Attributes:
        layers: ``layers(model, layout, heldout)`` -> the candidates that a model gives.
        fits: ``fits(op, section, sizes)``: such a problem belongs to the section, and its sizes are not too large.
        fill: ``fill(rng, aligned)`` -> random sizes, one of many of which fits.
        describe: ``describe(spec, dims, dtype, layout)`` -> the problem of contiguous tensors of these sizes, with
            weight and bias where the op has them.
    """

    name: str
    layers: Callable[[Model, str, bool], Iterator[Candidate]]
    fits: Callable[[str, Section, Sizes], bool]
    fill: Callable[[random.Random, bool], Sizes]
    describe: Callable[[OpSpec, Dims, torch.dtype, str], Problem]


def problem_of(spec: OpSpec, section: Section, sizes: Sizes) -> Problem:
    """The problem of a candidate. What torch's switch for TF32 happens to say does not count."""
    kind = KINDS[spec.name]
    dims = dict.fromkeys(spec.dims, 1) | dict(zip(DIMS[kind.name], sizes, strict=True))
    problem = kind.describe(spec, dims, section.torch_dtype, section.layout)
    if "precision" in problem.traits:
        traits = {**problem.traits, "precision": "tf32" if section.dtype == "tf32" else "ieee"}
        problem = dataclasses.replace(problem, traits=traits)
    return problem


def gather(op: str, section: Section, lists: Lists, heldout: bool) -> list[Candidate]:
    """All that fits, each size once; fill is not among it."""
    kind, out = KINDS[op], dict[Sizes, Candidate]()
    found = [c for m in lists.models if m.heldout == heldout for c in kind.layers(m, section.layout, heldout)]
    for group, sweeps in (("listed", lists.listed), ("sweep", lists.sweeps)):
        for s in sweeps:
            if s.op == kind.name and s.heldout == heldout and section.layout in s.layouts:
                found += [Candidate(sizes, group, s.name) for sizes in s.rows]
    for c in found:
        if c.sizes not in out and kind.fits(op, section, c.sizes):
            out[c.sizes] = c
    return list(out.values())


def fill(op: str, section: Section, count: int, heldout: bool) -> list[Candidate]:
    """The same log-random sizes on every machine."""
    kind = KINDS[op]
    # A text seeds by its SHA-512, and random() is the one method whose values no Python version has changed.
    rng = random.Random(f"{op} {section.dtype} {section.layout} {section.aligned} {heldout}")
    out: dict[Sizes, Candidate] = {}
    while len(out) < count:
        sizes = kind.fill(rng, section.aligned)
        if kind.fits(op, section, sizes):
            out[sizes] = Candidate(sizes, "fill", "fill")
    return list(out.values())


def _unit(section: Section) -> int:
    """Elements in 16 bytes."""
    return 16 // section.torch_dtype.itemsize


def _log_random(rng: random.Random, low: int, high: int) -> int:
    """From [2**low, 2**high): an octave, then a place in it; in exact arithmetic, which a power of a float is not."""
    octave = low + int(rng.random() * (high - low))
    return (1 << octave) + int(rng.random() * (1 << octave))


def _ragged(rng: random.Random, size: int) -> int:
    """`size` made a multiple of 8 in one of three cases, else odd, or twice or four times an odd number."""
    base = -(-size // 8) * 8
    return base - (0, 0, 1, 1, 2, 4)[int(rng.random() * 6)]


def _matmul_layers(model: Model, layout: str, heldout: bool) -> Iterator[Candidate]:
    """Of y = x w^T with x [M, K] and w [N, K]: y (nt), dx = dy w (nn) and dw = dy^T x (tn)."""
    for name, n, k in model.linears:
        for m in _HELDOUT_M if heldout else _TRAIN_M:
            if layout == "nt":
                yield Candidate((m, n, k), "model", f"{model.name} {name} forward")
            elif layout == "nn":
                yield Candidate((m, k, n), "model", f"{model.name} {name} dgrad")
            elif layout == "tn" and m >= _MIN_WGRAD_TOKENS:
                yield Candidate((n, k, m), "model", f"{model.name} {name} wgrad")


def _matmul_fits(op: str, section: Section, sizes: Sizes) -> bool:
    m, n, k = sizes
    # A matrix of one column or row lies in either way; M = 1 of an operand that lies by rows is plain.
    if min(n, k) < 2 or (m < 2 and section.layout[0] == "t"):
        return False
    # Lengths of the rows of a, b and the output in memory; one row alone has no stride to be misaligned.
    rows = [k if section.layout[1] == "t" else n]
    if m > 1:
        rows += [m if section.layout[0] == "t" else k, n]
    if all(size % _unit(section) == 0 for size in rows) != section.aligned:
        return False
    if 2 * m * n * k > _MAX_FLOPS.get(section.dtype, _MAX_FLOPS_16_BIT):
        return False
    return (m * k + k * n + m * n) * section.torch_dtype.itemsize < _MAX_BYTES


def _matmul_fill(rng: random.Random, aligned: bool) -> Sizes:
    m, n, k = _log_random(rng, 0, 14), _log_random(rng, 5, 16), _log_random(rng, 5, 15)
    if not aligned:
        return m if m < 16 else _ragged(rng, m), _ragged(rng, n), _ragged(rng, k)
    # Every other M is a multiple of 8, as a transposed a must have it.
    return m if rng.random() < 0.5 else -(-m // 8) * 8, -(-n // 8) * 8, -(-k // 8) * 8


def _matmul_describe(spec: OpSpec, dims: Dims, dtype: torch.dtype, layout: str) -> Problem:
    lead = (dims["batch"],) if dims["batch"] > 1 else ()
    a, b = (*lead, dims["M"], dims["K"]), (*lead, dims["K"], dims["N"])
    return spec.describe(a, b, dtype=dtype, layout=layout)


def _rows(heldout: bool) -> Sequence[int]:
    return (*_HELDOUT_M, *_MORE_HELDOUT_ROWS) if heldout else (*_TRAIN_M, *_MORE_TRAIN_ROWS)


def _norm_layers(model: Model, layout: str, heldout: bool) -> Iterator[Candidate]:
    """Layer norms and RMS norms take every model's widths: the kernels see only the sizes."""
    for name, n in model.norms:
        for m in _rows(heldout):
            yield Candidate((m, n), "model", f"{model.name} {model.norm} {name}")


def _norm_fits(op: str, section: Section, sizes: Sizes) -> bool:
    m, n = sizes
    itemsize = section.torch_dtype.itemsize
    tensors = 3 if op.endswith("_backward") else 2
    return (
        (n * itemsize % 16 == 0) == section.aligned
        and m * n * itemsize <= _MAX_NORM_BYTES
        and (tensors * m + 4) * n * itemsize < _MAX_BYTES
    )


def _norm_fill(rng: random.Random, aligned: bool) -> Sizes:
    m, n = _log_random(rng, 0, 17), _log_random(rng, 5, 16)
    return m, -(-n // 8) * 8 if aligned else _ragged(rng, n)


def _norm_describe(spec: OpSpec, dims: Dims, dtype: torch.dtype, layout: str) -> Problem:
    parameters = [(dims["N"],)] * (2 if spec.name.startswith("layer_norm") else 1)
    return spec.describe((dims["M"], dims["N"]), *parameters, dtype=dtype)


def _embedding_layers(model: Model, layout: str, heldout: bool) -> Iterator[Candidate]:
    vocabulary, hidden = model.embedding
    for t in _rows(heldout):
        yield Candidate((t, hidden, vocabulary), "model", f"{model.name} embedding")


def _embedding_fits(op: str, section: Section, sizes: Sizes) -> bool:
    t, d, v = sizes
    # A single row of dy has no row stride to be misaligned; a table has more rows than one.
    if d < 2 or v < 2 or (t < 2 and not section.aligned and op.endswith("_backward")):
        return False
    size = (t * d + v * d) * section.torch_dtype.itemsize + 8 * t
    return (d % _unit(section) == 0) == section.aligned and size < _MAX_BYTES


def _embedding_fill(rng: random.Random, aligned: bool) -> Sizes:
    t, d, v = _log_random(rng, 0, 17), _log_random(rng, 5, 14), _log_random(rng, 7, 18)
    return t, -(-d // 8) * 8 if aligned else _ragged(rng, d), v


def _embedding_describe(spec: OpSpec, dims: Dims, dtype: torch.dtype, layout: str) -> Problem:
    return spec.describe((dims["T"],), (dims["V"], dims["D"]), dtype=dtype)


_NORM = Kind("norm", _norm_layers, _norm_fits, _norm_fill, _norm_describe)
_EMBEDDING = Kind("embedding", _embedding_layers, _embedding_fits, _embedding_fill, _embedding_describe)
KINDS = {
    "matmul": Kind("matmul", _matmul_layers, _matmul_fits, _matmul_fill, _matmul_describe),
    **dict.fromkeys(NORMS, _NORM),
    "embedding": _EMBEDDING,
    "embedding_backward": _EMBEDDING,
}
