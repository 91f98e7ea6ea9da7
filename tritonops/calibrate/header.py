"""The first row of a raw file: what was measured, on what and by what; and which rows belong under one header."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .. import __version__, _compat
from ..device import DeviceInfo
from ..dispatch import store
from ..dispatch.source import source_hash
from ..dispatch.variant import OpSpec
from . import measure
from .race import HALVING
from .raw import SCHEMA, Raw, RawError, digits, read

if TYPE_CHECKING:
    from .static import Static

# Where torch takes longer than this on the device, the queue hides the host of every variant (an eager call through
# Triton's launcher took at most 0.14 ms of host time on the GPU box), so eager times equal graph times.
EAGER_BELOW_MS = 0.14


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def made_with(device: DeviceInfo, driver: str | None) -> dict[str, Any]:
    """Versions, the date and the command line, as a table's ``made_with``."""
    from ..toolchain.assembler import assembler

    return {
        "tritonops": __version__,
        "torch": _compat.torch_version(),
        "triton": _compat.triton_version(),
        "ptxas": assembler(device.capability).version,
        "driver": driver,
        "liger-kernel": _version("liger-kernel"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "tritonops.calibrate", *sys.argv[1:]])[:1000],
    }


def header(
    spec: OpSpec,
    static: Static,
    gated: Mapping[str, Mapping[str, Any]],
    device: DeviceInfo,
    *,
    shapes: bool = False,
    driver: str | None = None,
    memory_gib: int = 0,
    roofs: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The first row of a raw file."""
    variants = spec.variants()
    families = {v.family: v.kernel for v in variants.values() if v.kernel and v.id in static.variants}
    facts: dict[str, Any] = {"arch": device.arch, "sms": device.sms, "names": [device.name or device.table_name]}
    if memory_gib:
        facts["memory_gib"] = memory_gib
    if device.l2_bytes:
        facts["l2_mib"] = device.l2_bytes >> 20
    if roofs is not None:
        facts |= {"copy_tbps": digits(roofs[0], 3), "matmul_tflops": digits(roofs[1], 3)}
    return {
        "kind": "header",
        "schema": SCHEMA,
        "op": spec.name,
        "device": facts,
        "made_with": made_with(device, driver),
        "kernels": {family: {"source": source_hash(kernel)} for family, kernel in sorted(families.items())},
        "variants": static.variants,
        "dropped": static.dropped,
        "gate": {vid: dict(verdict) for vid, verdict in gated.items()},
        "method": {
            "eager_below_ms": EAGER_BELOW_MS,
            "min_calls": measure.MIN_CALLS,
            "max_calls": measure.MAX_CALLS,
            "eager_calls": measure.EAGER_CALLS,
            "rounds": [s.rounds for s in HALVING],
            "shapes": shapes,
        },
    }


# What must be the same when a run is continued; the date, the command and the roofs may differ.
def _identity(head: Mapping[str, Any]) -> dict[str, Any]:
    made = {k: v for k, v in head["made_with"].items() if k not in ("date", "command")}
    device = {k: head["device"].get(k) for k in ("arch", "sms", "names")}
    variants = {vid: {k: v.get(k) for k in ("meta", "options")} for vid, v in head["variants"].items()}
    return {"op": head["op"], "device": device, **made, "kernels": head["kernels"], "variants": variants}


def base_of(spec: OpSpec, device: DeviceInfo, head: Mapping[str, Any]) -> tuple[Raw | None, str]:
    """The raw file of the table that serves this device now, for a user's own shapes to join, or why there is none.

    It must have been measured by the same versions and kernels, on a card of the same name.
    """
    used = next((f for f in store.search(spec, device) if f.status == "used" and f.table is not None), None)
    if used is None or used.table is None:
        return None, "no table serves this GPU yet"
    provenance = used.table.provenance
    if provenance["kind"] != "measured":
        return None, f"{used.path} was not measured"
    path = used.path.parent / provenance["raw"]
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != provenance.get("sha256"):
            return None, f"{path} is not the file that {used.path} was made from"
        base = read(path)
    except (OSError, RawError) as error:
        return None, f"the measurements of {used.path} cannot be read ({error})"
    then, now = _identity(base.header), _identity(head)
    moved = [k for k in now if k not in ("kernels", "variants") and then.get(k) != now[k]]
    moved += [f for f, entry in now["kernels"].items() if then["kernels"].get(f, entry) != entry]
    if moved:
        return None, f"{used.path} was measured otherwise ({', '.join(moved)})"
    return base, ""


def join(head: dict[str, Any], base: Raw) -> None:
    """Make the header of a user's own shapes that of the measurements they join, too."""
    for part in ("kernels", "variants", "gate"):
        head[part] = {**base.header[part], **head[part]}
    head["method"]["base"] = {"cases": len(base.measured), "date": base.header["made_with"].get("date")}


def check_continues(old: Mapping[str, Any], new: Mapping[str, Any], path: Any) -> None:
    before, now = _identity(old), _identity(new)
    if "base" in old["method"]:  # which brought more
        for part in ("kernels", "variants"):
            before[part] = {k: v for k, v in before[part].items() if k in now[part]}
    moved = [k for k in now if before.get(k) != now[k]]
    if moved:
        what = "; ".join(f"{k}: {str(before.get(k))[:80]} then, {str(now[k])[:80]} now" for k in moved)
        raise RawError(f"{path} cannot be continued, its measurements were made otherwise ({what})")
