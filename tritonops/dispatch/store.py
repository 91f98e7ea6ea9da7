"""Where dispatch tables come from: override directory, user cache, wheel, checkout; and how far to trust one."""

from __future__ import annotations

import errno
import os
import stat
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from .. import _compat, _env
from ..device import DeviceInfo
from ..errors import TableError, TritonOpsWarning
from . import source
from .table import MAX_BYTES, Table, parse
from .variant import OpSpec

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Found:
    """What one place of the search order holds: status is used, shadowed, absent or damaged."""

    place: str
    path: Path
    status: str
    table: Table | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The table that serves an op on a device, if any, and what weakens it.

    Attributes:
        neighbour: the table was measured on a card of another name with the same architecture and SM count.
        stale: reasons why its measurements may no longer hold (kernel source, Triton, ptxas).
        searched: the paths looked at, in order.
    """

    table: Table | None
    neighbour: bool = False
    stale: tuple[str, ...] = ()
    searched: tuple[Path, ...] = ()


def places() -> list[tuple[str, Path]]:
    """The directories searched, first to last."""
    out = []
    override = _env.table_dir()
    if override is not None:
        out.append(("TRITONOPS_TABLE_DIR", override))
    out.append(("user cache", _env.cache_dir()))
    out.append(("package", _PACKAGE / "dispatch_tables"))
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        out.append(("checkout", _PACKAGE.parent / "dispatch_tables"))
    return out


def table_path(directory: Path, op: str, device: DeviceInfo) -> Path:
    return directory / op / f"{device.table_name}.json"


def read(path: Path, spec: OpSpec) -> Table:
    """The validated table in one file.

    Raises:
        TableError: the file is damaged, too large, not a regular file, or for another op or other variants.
        FileNotFoundError: there is no such file, or it vanished meanwhile.
    """
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise TableError(str(path), "(file)", "not a regular file")
            data = f.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(str(path)) from None
        raise TableError(str(path), "(file)", error.strerror or str(error)) from None
    features = {*spec.dims, *spec.feature_names}
    return parse(data, str(path), op=spec.name, features=features, known=set(spec.variants()))


def search(spec: OpSpec, device: DeviceInfo) -> list[Found]:
    """One entry for each place; the first good table is used, later good ones are shadowed."""
    out: list[Found] = []
    used = False
    for place, directory in places():
        path = table_path(directory, spec.name, device)
        try:
            table = read(path, spec)
            if (table.arch, table.sms) != (device.arch, device.sms):
                raise TableError(str(path), "device", f"is for {table.arch}-{table.sms}, not {device.table_name}")
        except FileNotFoundError:
            out.append(Found(place, path, "absent"))
        except TableError as error:
            out.append(Found(place, path, "damaged", problem=str(error)))
        else:
            out.append(Found(place, path, "shadowed" if used else "used", table))
            used = True
    return out


def stale_reasons(table: Table, device: DeviceInfo, spec: OpSpec) -> tuple[str, ...]:
    """Why a table's measurements may no longer hold here; compares versions and source hashes, compiles nothing."""
    reasons = []
    running = {"triton": _compat.triton_version(), "ptxas": None}
    if table.made_with.get("ptxas"):
        running["ptxas"] = _compat.ptxas_version(device.capability)
    for tool, version in running.items():
        made = table.made_with.get(tool)
        if made and version and _compat.minor(made) != _compat.minor(version):
            reasons.append(f"made with {tool} {made}, running {tool} {version}")
    kernels = {v.family: v.kernel for v in spec.variants().values() if v.kernel}
    for family, digest in table.kernels.items():
        name = kernels.get(family)
        if name is None:
            continue
        try:
            if source.source_hash(name) != digest:
                reasons.append(f"kernel {family!r} has changed since it was measured")
        except (OSError, ImportError, SyntaxError, ValueError):  # installed as bytecode only, or damaged
            reasons.append(f"whether kernel {family!r} has changed cannot be told: its source cannot be read")
    return tuple(reasons)


_loaded: dict[tuple[str, str, str, str], Loaded] = {}
_warned: set[str] = set()
_lock = threading.Lock()
_compat.renew_after_fork(_lock)


def warn_once(key: str, message: str) -> None:
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(message, TritonOpsWarning, stacklevel=2)


def load(spec: OpSpec, device: DeviceInfo) -> Loaded:
    """The table for an op on a device, looked up once; says once what is wrong with what it found."""
    key = (spec.name, device.kind, device.table_name, device.name)
    loaded = _loaded.get(key)
    if loaded is None:
        loaded = _loaded[key] = _load(spec, device)
    return loaded


def _load(spec: OpSpec, device: DeviceInfo) -> Loaded:
    if device.kind != "cuda":
        return Loaded(None)
    found = search(spec, device)
    searched = tuple(f.path for f in found)
    calibrate = f"'python -m tritonops.calibrate {spec.name}'"
    for f in found:
        if f.status == "damaged":
            warn_once(f"damaged {f.path}", f"tritonops: set aside: {f.problem}")
    table = next((f.table for f in found if f.status == "used"), None)
    if table is None:
        if device.name:
            warn_once(
                f"absent {device.name} {device.table_name}",
                f"tritonops: no dispatch table for {device.name} ({device.table_name}), looked for {spec.name} in "
                f"{', '.join(str(p) for p in searched)}; torch's kernels serve. {calibrate} measures this GPU.",
            )
        return Loaded(None, searched=searched)
    neighbour = bool(device.name) and device.name not in table.names
    if neighbour:
        warn_once(
            f"neighbour {device.name} {device.table_name}",
            f"tritonops: {table.path} was made on {', '.join(table.names)}, this is {device.name}; only choices at "
            f"least 10 % ahead of torch there are taken. {calibrate} measures this GPU.",
        )
    stale = stale_reasons(table, device, spec)
    if stale:
        warn_once(
            f"stale {table.path}",
            f"tritonops: {table.path} may be out of date ({'; '.join(stale)}); it still serves. "
            f"{calibrate} measures anew.",
        )
    return Loaded(table, neighbour, stale, searched)


def clear() -> None:
    """Forget loaded tables; files are read again at the next choice. What was warned of stays warned of."""
    _loaded.clear()
