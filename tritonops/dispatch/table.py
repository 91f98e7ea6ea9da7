"""The dispatch table: its records, parsing with full validation, evaluation and writing. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TableError
from .problem import MODES, POLICIES

SCHEMA = 1
MAX_BYTES = 4 << 20
MAX_DEPTH = 32
_MAX_NESTING = 64
# 2 million lists in a file of 4 MiB kept Python's JSON reader busy for 4 s; a tree of 20000 nodes has 30000.
_MAX_CONTAINERS = 200_000
_MAX_NODES = 20_000
_MAX_INT = 2**53
_OP = re.compile(r"[a-z][a-z0-9_]{0,39}")
_ARCH = re.compile(r"(sm_[1-9][0-9]{1,2}|gfx[0-9a-f]{3,5})")
_VARIANT = re.compile(r"[a-z0-9_]{1,40}(/[A-Za-z0-9_.+-]{1,60})?")
_SHA = re.compile(r"[0-9a-f]{64}")
_RAW = re.compile(r"raw/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_TOOL = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_WHEN = {"dtype": str, "layout": str, "aligned": bool, "policy": str, "mode": str}


@dataclass(frozen=True, slots=True)
class Leaf:
    """Ranked variants. ``gain`` is the measured worst-case speed-up of the first over the vendor, where measured."""

    use: tuple[str, ...]
    n: int = 0
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Split:
    feature: str
    le: int
    yes: Leaf | Split
    no: Leaf | Split


@dataclass(frozen=True, slots=True)
class Section:
    when: Mapping[str, str | bool]
    hull: Mapping[str, tuple[int, int]]
    tree: Leaf | Split
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    op: str
    arch: str
    sms: int
    names: tuple[str, ...]
    device: Mapping[str, Any]
    made_with: Mapping[str, Any]
    provenance: Mapping[str, Any]
    kernels: Mapping[str, str]
    variants: Mapping[str, Mapping[str, Any]]
    sections: tuple[Section, ...]
    default: tuple[str, ...]
    path: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def published(self) -> bool:
        return self.provenance["kind"] == "published"


def walk(tree: Leaf | Split, features: Mapping[str, int]) -> tuple[Leaf, list[str]]:
    """The leaf that `features` reach and the comparisons on the way, as text."""
    path = []
    while isinstance(tree, Split):
        value = features[tree.feature]
        low = value <= tree.le
        path.append(f"{tree.feature} = {value} {'<=' if low else '>'} {tree.le}")
        tree = tree.yes if low else tree.no
    return tree, path


def leaves(tree: Leaf | Split) -> Iterator[Leaf]:
    stack: list[Leaf | Split] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Leaf):
            yield node
        else:
            stack += [node.yes, node.no]


class _Reader:
    """Typed access to untrusted JSON with the field's path in every error."""

    def __init__(self, file: str):
        self.file = file
        self.nodes = 0

    def fail(self, where: str, problem: str) -> TableError:
        return TableError(self.file, _plain(where), _plain(problem))

    def check(self, value: Any, kind: type, where: str) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(where, f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    def text(self, value: Any, where: str, pattern: re.Pattern[str] | None = None) -> str:
        self.check(value, str, where)
        if not 1 <= len(value) <= 1000:
            raise self.fail(where, f"expected 1 to 1000 characters, got {len(value)}")
        if not value.isprintable():
            raise self.fail(where, "has characters that cannot be printed")
        if pattern is not None and not pattern.fullmatch(value):
            raise self.fail(where, f"{value[:60]!r} is not a valid name here")
        return str(value)

    def integer(self, value: Any, where: str, low: int = 0, high: int = _MAX_INT) -> int:
        self.check(value, int, where)
        if not low <= value <= high:
            raise self.fail(where, f"{_short(value)} is outside [{low}, {high}]")
        return int(value)

    def number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_INT:
            raise self.fail(where, f"expected a number within +-{_MAX_INT}, got {_short(value)}")
        return float(value)

    def mapping(self, value: Any, where: str, required: set[str], optional: set[str]) -> dict[str, Any]:
        self.check(value, dict, where)
        missing, unknown = required - value.keys(), value.keys() - required - optional
        if missing:
            raise self.fail(where, f"missing {sorted(missing)}")
        if unknown:
            raise self.fail(where, f"unknown {sorted(k[:40] for k in unknown)[:5]}")
        return dict(value)

    def ids(self, value: Any, where: str, known: set[str]) -> tuple[str, ...]:
        self.check(value, list, where)
        if not 1 <= len(value) <= 64:
            raise self.fail(where, "expected 1 to 64 variant ids")
        for i, v in enumerate(value):
            self.text(v, f"{where}[{i}]", _VARIANT)
            if v not in known:
                raise self.fail(f"{where}[{i}]", f"unknown variant {v!r}")
        return tuple(value)

    def variant(self, value: Any, where: str) -> None:
        d = self.mapping(value, where, set(), {"meta", "options", "regs", "spill", "text"})
        for k in d.keys() & {"meta", "options"}:
            self.check(d[k], dict, f"{where}.{k}")
        for k in d.keys() & {"regs", "spill"}:
            self.integer(d[k], f"{where}.{k}")
        if "text" in d:
            self.text(d["text"], f"{where}.text", _SHA)

    def tree(self, value: Any, where: str, known: set[str], features: set[str], depth: int = 0) -> Leaf | Split:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > _MAX_NODES:
            raise self.fail(where, f"deeper than {MAX_DEPTH} levels or more than {_MAX_NODES} nodes")
        self.check(value, dict, where)
        if "use" in value:
            d = self.mapping(value, where, {"use"}, {"n", "gain"})
            n = self.integer(d.get("n", 0), f"{where}.n")
            gain = self.number(d["gain"], f"{where}.gain") if "gain" in d else None
            return Leaf(self.ids(d["use"], f"{where}.use", known), n, gain)
        d = self.mapping(value, where, {"f", "le", "yes", "no"}, set())
        feature = self.text(d["f"], f"{where}.f")
        if feature not in features:
            raise self.fail(f"{where}.f", f"unknown feature {feature[:40]!r}; this op has {sorted(features)}")
        return Split(
            feature,
            self.integer(d["le"], f"{where}.le"),
            self.tree(d["yes"], f"{where}.yes", known, features, depth + 1),
            self.tree(d["no"], f"{where}.no", known, features, depth + 1),
        )

    def section(self, value: Any, where: str, known: set[str], features: set[str]) -> Section:
        d = self.mapping(value, where, {"when", "hull", "tree"}, {"evidence"})
        when = self.mapping(d["when"], f"{where}.when", set(), set(_WHEN))
        for k, v in when.items():
            if _WHEN[k] is bool:
                self.check(v, bool, f"{where}.when.{k}")
            elif k != "layout" or v != "":
                self.text(v, f"{where}.when.{k}")
        if when.get("policy", "fast") not in POLICIES:
            raise self.fail(f"{where}.when.policy", f"expected one of {POLICIES}")
        if when.get("mode", "eager") not in MODES:
            raise self.fail(f"{where}.when.mode", f"expected one of {MODES}")
        hull = {}
        for k, v in self.mapping(d["hull"], f"{where}.hull", set(), features).items():
            self.check(v, list, f"{where}.hull.{k}")
            if len(v) != 2:
                raise self.fail(f"{where}.hull.{k}", "expected [low, high]")
            low, high = (self.integer(e, f"{where}.hull.{k}") for e in v)
            if low > high:
                raise self.fail(f"{where}.hull.{k}", f"low {low} is above high {high}")
            hull[k] = (low, high)
        evidence = self.check(d.get("evidence", {}), dict, f"{where}.evidence")
        return Section(when, hull, self.tree(d["tree"], f"{where}.tree", known, features), evidence)


def parse(data: bytes, file: str, *, op: str, features: set[str], known: set[str] | None = None) -> Table:
    """A validated Table from the bytes of a table file.

    Args:
        file: name for error messages.
        op: the op the table must be for.
        features: names a tree or hull may use.
        known: variant ids the op has; None accepts the ids that the table itself lists.

    Raises:
        TableError: naming the file and the first offending field.
    """
    r = _Reader(file)
    if len(data) > MAX_BYTES:
        raise r.fail("(file)", f"larger than {MAX_BYTES} bytes")
    if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
        raise r.fail("(file)", f"more than {_MAX_CONTAINERS} lists and objects")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError) as error:
        raise r.fail("(file)", f"not valid JSON: {str(error)[:120] or type(error).__name__}") from None
    if _nesting(value) > _MAX_NESTING:
        raise r.fail("(file)", f"nested deeper than {_MAX_NESTING} levels")
    top = r.mapping(
        value,
        "(top)",
        {"schema", "op", "device", "made_with", "provenance", "kernels", "variants", "sections", "default"},
        set(),
    )
    if r.integer(top["schema"], "schema") != SCHEMA:
        raise r.fail("schema", f"this version reads schema {SCHEMA}, the file has {top['schema']}")
    if r.text(top["op"], "op", _OP) != op:
        raise r.fail("op", f"expected {op!r}, got {top['op']!r}")

    device = r.mapping(
        top["device"], "device", {"arch", "sms", "names"}, {"memory_gib", "l2_mib", "copy_tbps", "matmul_tflops"}
    )
    arch = r.text(device["arch"], "device.arch", _ARCH)
    sms = r.integer(device["sms"], "device.sms", 1, 4095)
    if not 1 <= len(r.check(device["names"], list, "device.names")) <= 64:
        raise r.fail("device.names", "expected 1 to 64 names")
    names = tuple(r.text(n, f"device.names[{i}]") for i, n in enumerate(device["names"]))
    for k in device.keys() - {"arch", "sms", "names"}:
        r.number(device[k], f"device.{k}")

    made_with = r.check(top["made_with"], dict, "made_with")
    for k, v in made_with.items():
        r.text(k, "made_with", _TOOL)
        if v is not None:
            r.text(v, f"made_with.{k}")
    provenance = r.mapping(top["provenance"], "provenance", {"kind"}, {"raw", "sha256", "source", "note"})
    for k, v in provenance.items():
        r.text(v, f"provenance.{k}", {"raw": _RAW, "sha256": _SHA}.get(k))
    if provenance["kind"] not in ("measured", "published"):
        raise r.fail("provenance.kind", "expected 'measured' or 'published'")
    needed = {"measured": "raw", "published": "source"}[provenance["kind"]]
    if needed not in provenance:
        raise r.fail("provenance", f"a {provenance['kind']} table needs {needed!r}")

    kernels = {}
    for family, entry in r.check(top["kernels"], dict, "kernels").items():
        r.text(family, "kernels", _VARIANT)
        kernels[family] = r.text(
            r.mapping(entry, f"kernels.{family}", {"source"}, set())["source"], f"kernels.{family}.source", _SHA
        )
    listed = {"vendor"}
    for vid, entry in r.check(top["variants"], dict, "variants").items():
        r.text(vid, "variants", _VARIANT)
        if known is not None and vid not in known:
            raise r.fail("variants", f"unknown variant {vid!r}")
        r.variant(entry, f"variants.{vid}")
        listed.add(vid)
    usable = listed if known is None else listed & (known | {"vendor"})

    r.check(top["sections"], list, "sections")
    if len(top["sections"]) > 500:
        raise r.fail("sections", "more than 500")
    sections = tuple(r.section(s, f"sections[{i}]", usable, features) for i, s in enumerate(top["sections"]))
    default = r.ids(top["default"], "default", usable)
    return Table(
        op, arch, sms, names, device, made_with, provenance, kernels, top["variants"], sections, default, file, value
    )


def _short(value: object) -> str:
    """A value for a message. An int of more than 4300 digits cannot be written out at all."""
    if isinstance(value, int) and abs(value) > _MAX_INT:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:40]


def _plain(text: str) -> str:
    """Text of a hostile file, fit for one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:300])


def _finite(literal: str) -> float:
    """JSON has no NaN and no Infinity; Python's reader makes them of these words and of 1e999."""
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal[:20]} is not a finite number")
    return number


def _nesting(value: object) -> int:
    level, depth = [value], 0
    while level and depth <= _MAX_NESTING:
        depth += 1
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [v for values in inner for v in values]
    return depth


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return out


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` in one step: a temporary file in the same directory, then os.replace.

    Readers see the old file or the new one, never a part; the last of several writers wins; a failure leaves the
    old file and removes the temporary one. Symbolic links are followed, so that the temporary file lies on the target's
    file system.

    Raises:
        OSError: the directory cannot be made or written, or `path` is a device, a pipe or a directory.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def dump(value: Mapping[str, Any]) -> bytes:
    """The one textual form of a table: two-space indentation, keys in the order given, final newline."""
    return (json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")
