"""The operators tritonops::embedding and tritonops::embedding_backward: schemas, fakes, implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import _checks, _compat
from ..device import device_info
from ..dispatch import memo, override
from ..dispatch.problem import Problem, dtype_name
from ..dispatch.variant import OpSpec, register
from . import variants
from .operands import check_range

NAME = "embedding"
BACKWARD = "embedding_backward"

torch.library.define(
    "tritonops::embedding",
    "(Tensor weight, Tensor indices, SymInt padding_idx, bool scale_grad_by_freq, int flags) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "tritonops::embedding_backward",
    "(Tensor dy, Tensor indices, SymInt num_embeddings, SymInt padding_idx, bool scale_grad_by_freq, int flags) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_INDEX_DTYPES = (torch.int64, torch.int32)


def _check_indices(op: str, indices: Tensor) -> None:
    if indices.dtype not in _INDEX_DTYPES:
        raise RuntimeError(
            f"tritonops.{op}(): Expected tensor for argument 'indices' to have one of the following scalar types: "
            f"Long, Int; but got {indices.dtype} instead"
        )


def check_forward(weight: Tensor, indices: Tensor) -> None:
    """A 2-D table and integer ids on one device; RuntimeError as torch's."""
    _checks.same_device(NAME, indices=indices, weight=weight)
    if weight.dim() != 2:
        raise RuntimeError(f"tritonops.embedding(): 'weight' must be 2-D, got {weight.dim()}-D")
    _check_indices(NAME, indices)


def _check_backward(dy: Tensor, indices: Tensor, num_embeddings: int) -> None:
    _checks.same_device(BACKWARD, dy=dy, indices=indices)
    _check_indices(BACKWARD, indices)
    if dy.dim() != indices.dim() + 1 or dy.shape[:-1] != indices.shape:
        raise RuntimeError(
            f"tritonops.embedding_backward(): expected 'dy' of the shape of 'indices' {tuple(indices.shape)} and one "
            f"dimension more, got {tuple(dy.shape)}"
        )
    if num_embeddings < 0:
        raise RuntimeError(f"tritonops.embedding_backward(): 'num_embeddings' is negative: {num_embeddings}")


@torch.library.register_fake("tritonops::embedding")
def _fake_forward(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, flags: int) -> Tensor:
    check_forward(weight, indices)
    return weight.new_empty((*indices.shape, weight.shape[1]))


@torch.library.register_fake("tritonops::embedding_backward")
def _fake_backward(
    dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool, flags: int
) -> Tensor:
    _check_backward(dy, indices, num_embeddings)
    return dy.new_empty((num_embeddings, dy.shape[-1]))


def _aligned(x: Tensor) -> bool:
    """Pointer and row strides are multiples of 16 bytes and columns are adjacent."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return False
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in strides)


# Everything a choice may depend on, as a flat tuple: see _problem for the names.
Key = tuple[Any, ...]


def _key(
    op: str, rows: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale: bool, flags: int, graph: bool
) -> Key:
    """`rows` is the table (forward) or dy (backward)."""
    return (
        op,
        rows.device,
        rows.dtype,
        indices.dtype,
        indices.numel(),
        rows.shape[-1],
        num_embeddings,
        _aligned(rows),
        scale,
        padding_idx >= 0,
        override.effective(flags),
        graph,
    )


def _problem(key: Key) -> Problem:
    op, _, dtype, index, tokens, columns, num_embeddings, aligned, scale, padding, flags, graph = key
    return Problem(
        op,
        {"T": tokens, "D": columns, "V": num_embeddings},
        dtype_name(dtype),
        "",
        aligned,
        override.policy(flags),
        "graph" if graph else "eager",
        {"index": dtype_name(index), "scale_grad_by_freq": scale, "padding": padding},
        flags,
    )


def execute(
    weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, flags: int, *, compiled: bool = False
) -> Tensor:
    """The lookup on real tensors: problem -> choice -> launch."""
    check_forward(weight, indices)
    if indices.numel() == 0 or weight.shape[1] == 0:
        check_range(indices, weight.shape[0])
        return weight.new_empty((*indices.shape, weight.shape[1]))
    graph = compiled or _compat.capturing(weight.device)
    key = _key(NAME, weight, indices, weight.shape[0], padding_idx, scale_grad_by_freq, flags, graph)
    args = (weight, indices, padding_idx, scale_grad_by_freq)
    return memo.serve(SPEC, key, device_info(weight.device), lambda: _problem(key), args)


def execute_backward(
    dy: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    flags: int,
    *,
    compiled: bool = False,
) -> Tensor:
    """The gradient of the table on real tensors: problem -> choice -> launch."""
    _check_backward(dy, indices, num_embeddings)
    if dy.numel() == 0 or num_embeddings == 0:
        check_range(indices, num_embeddings)
        return dy.new_zeros((num_embeddings, dy.shape[-1]))
    graph = compiled or _compat.capturing(dy.device)
    key = _key(BACKWARD, dy, indices, num_embeddings, padding_idx, scale_grad_by_freq, flags, graph)
    args = (dy, indices, num_embeddings, padding_idx, scale_grad_by_freq)
    return memo.serve(BACKWARD_SPEC, key, device_info(dy.device), lambda: _problem(key), args)


def _impl(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, flags: int) -> Tensor:
    return execute(weight, indices, padding_idx, scale_grad_by_freq, flags, compiled=True)


def _impl_backward(
    dy: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int, scale_grad_by_freq: bool, flags: int
) -> Tensor:
    return execute_backward(dy, indices, num_embeddings, padding_idx, scale_grad_by_freq, flags, compiled=True)


torch.library.impl("tritonops::embedding", ("cpu", "cuda"), _impl)
torch.library.impl("tritonops::embedding_backward", ("cpu", "cuda"), _impl_backward)


def padding_row(padding_idx: int | None, num_embeddings: int) -> int:
    """torch.nn.functional.embedding's padding_idx as a row of the table, -1 for none; refused outside [-V, V)."""
    if padding_idx is None:
        return -1
    if not isinstance(padding_idx, int | torch.SymInt):
        raise TypeError(f"tritonops.embedding(): 'padding_idx' must be int or None, not {type(padding_idx).__name__}")
    # torch takes 0 for an empty table too.
    if padding_idx != 0 and not -num_embeddings <= padding_idx < num_embeddings:
        raise AssertionError(
            f"tritonops.embedding(): Padding_idx must be within num_embeddings: {padding_idx} is not in "
            f"[-{num_embeddings}, {num_embeddings})"
        )
    return padding_idx if padding_idx >= 0 else padding_idx + num_embeddings


def _as_tensor(value: Any, name: str, dtype: torch.dtype | None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if dtype is None:
        raise TypeError(f"tritonops.explain(): 'dtype' must be given where '{name}' is a shape")
    return torch.empty([int(s) for s in value], dtype=dtype, device="meta")


def _describe(
    op: str,
    indices: Any,
    weight: Any,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    sparse: bool,
    dtype: torch.dtype | None,
) -> Problem:
    if sparse:
        raise ValueError("tritonops.explain(): with sparse=True torch's own embedding serves, no variant is chosen")
    weight = _as_tensor(weight, "weight", dtype)
    indices = _as_tensor(indices, "indices", torch.int64)
    if weight.is_meta or indices.is_meta:
        check_forward(weight.to("meta"), indices.to("meta"))
    else:
        check_forward(weight, indices)
    v, graph = weight.shape[0], _compat.capturing(weight.device)
    row = padding_row(padding_idx, v)
    if op == BACKWARD:
        weight = torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device="meta")
    return _problem(_key(op, weight, indices, v, row, scale_grad_by_freq, override.flags, graph))


def describe(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    *,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    dtype: torch.dtype | None = None,
) -> Problem:
    """The Problem of a call of tritonops.embedding.

    `indices` and `weight` may be shapes: ids are then int64, and `dtype` is the table's.
    """
    return _describe(NAME, indices, weight, padding_idx, scale_grad_by_freq, sparse, dtype)


def describe_backward(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    *,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    dtype: torch.dtype | None = None,
) -> Problem:
    """The Problem of the backward of a call of tritonops.embedding, for a contiguous gradient of its output."""
    return _describe(BACKWARD, indices, weight, padding_idx, scale_grad_by_freq, sparse, dtype)


def _rows(problem: Problem, count: int, device: str) -> Tensor:
    """[count, D]; where the problem is not aligned, rows one element past a multiple of 16 bytes."""
    dtype, columns = getattr(torch, problem.dtype), problem.dims["D"]
    unit = 16 // dtype.itemsize
    shape = (count, columns if problem.aligned else -(-columns // unit) * unit + 1)
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)[:, :columns]
    return torch.randn(shape, device=device).to(dtype)[:, :columns]


# zipf1.0: the k-th most frequent id is 1/k as frequent as the first, which is how often words occur (Zipf 1949).
IDS = ("uniform", "zipf1.0")


def _ids(problem: Problem, device: str, ids: str) -> Tensor:
    dtype, count, rows = getattr(torch, problem.traits["index"]), problem.dims["T"], max(problem.dims["V"], 1)
    if device == "meta":
        return torch.empty(count, dtype=dtype, device=device)
    if ids == "uniform":
        return torch.randint(rows, (count,), dtype=dtype, device=device)
    if ids != "zipf1.0":
        raise ValueError(f"ids: expected one of {IDS}, got {ids!r}")
    frequency = torch.arange(1, rows + 1, dtype=torch.float64, device=device).reciprocal().cumsum(0)
    drawn = torch.searchsorted(frequency, torch.rand(count, dtype=torch.float64, device=device) * frequency[-1])
    return torch.randperm(rows, device=device)[drawn.clamp(max=rows - 1)].to(dtype)


def sample(problem: Problem, device: str, ids: str = "uniform") -> tuple[Tensor, Tensor, int, bool]:
    """Operands that make up a problem: random on a real device, unallocated on "meta"; `ids` is one of IDS."""
    weight = _rows(problem, problem.dims["V"], device)
    padding = 0 if problem.traits["padding"] else -1
    return weight, _ids(problem, device, ids), padding, problem.traits["scale_grad_by_freq"]


def sample_backward(problem: Problem, device: str, ids: str = "uniform") -> tuple[Tensor, Tensor, int, int, bool]:
    """As `sample`, for the backward."""
    dy = _rows(problem, problem.dims["T"], device)
    padding = 0 if problem.traits["padding"] else -1
    return dy, _ids(problem, device, ids), problem.dims["V"], padding, problem.traits["scale_grad_by_freq"]


def oracle(
    problem: Problem, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> tuple[Tensor]:
    from . import reference

    return (reference.embedding_reference(weight, indices),)


def oracle_backward(problem: Problem, *args: Any) -> tuple[Tensor]:
    from . import reference

    return (reference.embedding_backward_reference(*args),)


def terms_backward(problem: Problem) -> int:
    """Every token may have one id."""
    return problem.dims["T"]


def _invariant(problem: Problem) -> Problem:
    """The same table at one number of tokens, so that every batch gets one variant."""
    return dataclasses.replace(problem, dims={**problem.dims, "T": 4096}, aligned=False)


_DIMS = ("T", "D", "V")

SPEC = register(
    OpSpec(
        NAME,
        variants.load_forward,
        _DIMS,
        variants.prefer_forward,
        describe,
        sample,
        invariant=_invariant,
        oracle=oracle,
        ids=IDS,
    )  # fmt: skip
)
BACKWARD_SPEC = register(
    OpSpec(
        BACKWARD,
        variants.load_backward,
        _DIMS,
        variants.prefer_backward,
        describe_backward,
        sample_backward,
        oracle=oracle_backward,
        terms=terms_backward,
        ids=IDS,
    )  # fmt: skip
)
