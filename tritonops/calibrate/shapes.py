"""The lists in dispatch_tables/shapes: public models by the numbers of their configurations, and published sweeps."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dispatch import store

SCHEMA = 1
FILES = ("models.json", "sweeps.json", "misaligned.json")
MAX_SIZE = 2**31
_MAX_BYTES = 64 << 20

# What a sweep may be of, with the sizes that make up a row of it.
DIMS = {"matmul": ("M", "N", "K"), "norm": ("M", "N"), "embedding": ("T", "D", "V")}
LAYOUTS = ("nn", "nt", "tn", "tt")


class PlanError(ValueError):
    """A list of shapes or a plan that cannot be used: the file, the place in it, and why."""


@dataclass(frozen=True)
class Model:
    """A public model, by the numbers of its configuration.

    Attributes:
        linears: weights [N, K] by name.
        norms: widths of its norms by name.
        norm: ``rms`` or ``layer``.
        embedding: [vocabulary, hidden].
    """

    name: str
    linears: tuple[tuple[str, int, int], ...]
    norms: tuple[tuple[str, int], ...]
    norm: str
    embedding: tuple[int, int]
    heldout: bool


@dataclass(frozen=True)
class Sweep:
    """A published series of sizes. `layouts` are those a product is listed for; rows are in the order of DIMS[op]."""

    name: str
    op: str
    layouts: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    heldout: bool


@dataclass(frozen=True)
class Lists:
    models: tuple[Model, ...]
    sweeps: tuple[Sweep, ...]
    listed: tuple[Sweep, ...]


class Fields:
    """Typed access to one JSON object of a file that people write; every error says where."""

    def __init__(self, file: Path | str, where: str, value: object):
        self.file, self.where = file, where
        if not isinstance(value, dict):
            raise PlanError(f"{file}: {where or '(top)'}: expected an object, got {type(value).__name__}")
        self.value: dict[str, Any] = value

    def fail(self, field: str, problem: str) -> PlanError:
        where = ": ".join(p for p in (self.where, field) if p)
        return PlanError(f"{self.file}: {where}: {problem}")

    def only(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        for name in required:
            if name not in self.value:
                raise self.fail(name, "missing")
        for name in self.value:
            if name not in required and name not in optional:
                known = ", ".join([*required, *optional])
                raise self.fail(_short(name), f"unknown; expected {known}")

    def size(self, field: str, value: object = None, high: int = MAX_SIZE) -> int:
        value = self.value[field] if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(field, f"expected an integer, got {_short(value)}")
        if not 1 <= value <= high:
            raise self.fail(field, f"expected 1 to {high}, got {_short(value)}")
        return value

    def flag(self, field: str, default: bool | None = None) -> bool:
        value = self.value.get(field, default)
        if not isinstance(value, bool):
            raise self.fail(field, f"expected true or false, got {_short(value)}")
        return value

    def text(self, field: str, known: Collection[str] = (), default: str | None = None) -> str:
        value = self.value.get(field, default)
        if not isinstance(value, str) or not value.isprintable() or len(value) > 300:
            raise self.fail(field, f"expected a text, got {_short(value)}")
        if known and value not in known:
            raise self.fail(field, f"expected one of {', '.join(map(repr, known))}, got {_short(value)}")
        return value

    def items(self, field: str) -> list[Any]:
        value = self.value[field]
        if not isinstance(value, list) or not value:
            raise self.fail(field, f"expected a list that is not empty, got {_short(value)}")
        return value


def _short(value: object) -> str:
    """A value for a message; an integer of more than 4300 digits cannot be written out."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_text(path: Path) -> str:
    """The text of a file; PlanError where it cannot be read."""
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as f:
            data = f.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data or b"") > _MAX_BYTES:
        raise PlanError(f"{path}: larger than {_MAX_BYTES} bytes")
    try:
        return (data or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not JSON: not UTF-8 text at byte {error.start}") from None


def parse(text: str, file: Path | str, where: str = "") -> Any:
    """A JSON value; PlanError with the place where it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = f"{file}: {where}: not JSON" if where else f"{file}: not JSON"
        raise PlanError(f"{reason}: {str(error)[:120] or type(error).__name__}") from None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def find(name: str) -> Path:
    """A shape list, where dispatch tables are looked for too: the first place that has it."""
    places = [directory / "shapes" / name for _, directory in store.places()]
    for path in places:
        if path.is_file():
            return path
    raise PlanError(f"{name}: not found; looked for {', '.join(map(str, places))}")


def load() -> Lists:
    """The three lists.

    Raises:
        PlanError: one of them is missing or damaged; names the file and the field.
    """
    models, sweeps, listed = (find(name) for name in FILES)
    return Lists(
        tuple(_model(f) for f in _objects(models, "models")),
        tuple(_sweep(f) for f in _objects(sweeps, "sweeps")),
        tuple(_sweep(f) for f in _objects(listed, "sweeps")),
    )


def _objects(path: Path, field: str) -> Iterator[Fields]:
    top = Fields(path, "", parse(read_text(path), path))
    top.only(("schema", field))
    if top.value["schema"] != SCHEMA:
        raise top.fail("schema", f"this version reads {SCHEMA}, the file has {_short(top.value['schema'])}")
    for i, value in enumerate(top.items(field)):
        yield Fields(path, f"{field}[{i}]", value)


def _source(f: Fields) -> None:
    if not f.text("source").startswith("https://") and f.value["source"] != "own":
        raise f.fail("source", "expected an https address, or own")


_NUMBERS = ("hidden", "heads", "kv_heads", "head_dim", "vocab")
_OPTIONAL = ("intermediate", "moe_intermediate", "gated", "lm_head", "qk_norm", "linears", "norm_widths")


def _model(f: Fields) -> Model:
    """A model's layers: query, key and value in one product, gate and up in one, as they are served."""
    f.only(("name", "source", *_NUMBERS, "norm", "heldout"), _OPTIONAL)
    _source(f)
    hidden, heads, kv_heads, head_dim, vocab = (f.size(field, high=2**24) for field in _NUMBERS)
    linears = [("qkv", (heads + 2 * kv_heads) * head_dim, hidden), ("o", hidden, heads * head_dim)]
    if "linears" in f.value:
        linears = list(_linears(f))
    up = 2 if f.flag("gated", True) else 1
    inner = [field for field in ("intermediate", "moe_intermediate") if field in f.value]
    if not inner:
        raise f.fail("intermediate", "missing, and so is moe_intermediate")
    for field in inner:
        size, part = f.size(field, high=2**24), "expert" if field == "moe_intermediate" else "mlp"
        linears += [(f"{part}.{'gate_up' if up == 2 else 'up'}", up * size, hidden), (f"{part}.down", hidden, size)]
    if f.flag("lm_head", True):
        linears.append(("lm_head", vocab, hidden))
    norms = [("norm", hidden)]
    if f.flag("qk_norm", False):
        norms.append(("qk_norm", head_dim))
    if "norm_widths" in f.value:
        norms += [("norm", f.size("norm_widths", width, 2**24)) for width in f.items("norm_widths")]
    return Model(
        f.text("name"),
        tuple(linears),
        tuple(norms),
        f.text("norm", ("rms", "layer")),
        (vocab, hidden),
        f.flag("heldout"),
    )


def _linears(f: Fields) -> Iterator[tuple[str, int, int]]:
    inner = Fields(f.file, f"{f.where}.linears", f.value["linears"])
    for name in inner.value:
        sizes = inner.items(name)
        if len(sizes) != 2:
            raise inner.fail(_short(name), f"expected [N, K], got {_short(sizes)}")
        yield name, inner.size(name, sizes[0], 2**24), inner.size(name, sizes[1], 2**24)


def _sweep(f: Fields) -> Sweep:
    f.only(("name", "source", "op", "rows"), ("layout", "heldout"))
    _source(f)
    op = f.text("op", DIMS)
    layouts: tuple[str, ...] = ("",)
    if op == "matmul":
        layouts = (f.text("layout", LAYOUTS),) if "layout" in f.value else LAYOUTS
    elif "layout" in f.value:
        raise f.fail("layout", f"{op} has none")
    rows: list[tuple[int, ...]] = []
    for i, row in enumerate(f.items("rows")):
        where = f"rows[{i}]"
        if not isinstance(row, list) or len(row) != len(DIMS[op]):
            raise f.fail(where, f"expected [{', '.join(DIMS[op])}], got {_short(row)}")
        # A list in a row stands for each of its values.
        axes: Sequence[list[Any]] = [v if isinstance(v, list) and v else [v] for v in row]
        rows += itertools.product(*([f.size(where, v) for v in axis] for axis in axes))
    return Sweep(f.text("name"), op, layouts, tuple(rows), f.flag("heldout", False))
