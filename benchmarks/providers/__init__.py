"""Who is measured: one adapter a file, imported when it is asked for."""

from __future__ import annotations

import importlib

from .base import Call, Provider, Refused, Renamed, plain

__all__ = ["NAMES", "Call", "Provider", "Refused", "Renamed", "make", "plain"]

_MODULES = {
    "torch": "vendor:Torch",
    "compile": "compiled:Compile",
    "compile-max-autotune": "compiled:MaxAutotune",
    "liger": "liger:Liger",
    "quack": "quack:Quack",
    "flaggems": "flaggems:FlagGems",
    "tutorial": "tutorial:Tutorial",
    "library": "library:LibraryImpl",
    "ours": "ours:Ours",
}
NAMES = tuple(_MODULES)
_SLOWED = "slowed:"


def make(name: str) -> Provider:
    """A provider by its name: one of NAMES, or ``ours:VARIANT`` or ``ours:FAMILY``.

    ``NAME#2`` is the same once more under a name of its own, to see what two equal ones look like; ``slowed:NAME`` is
    charged 5 % more time than it takes, to see whether that is found.

    Raises:
        ValueError: there is no such provider; or none of our ops has that variant.
    """
    if name.startswith(_SLOWED) and not name.removeprefix(_SLOWED).startswith(_SLOWED):
        from .slowed import Slowed

        return Slowed(make(name.removeprefix(_SLOWED)))
    plain_name, again, _ = name.partition("#")
    base, forced, wish = plain_name.partition(":")
    if base not in _MODULES or (forced and (base != "ours" or not wish)):
        raise ValueError(f"no provider {name!r}; providers: {', '.join(NAMES)}, ours:VARIANT, ours:FAMILY, slowed:NAME")
    module, _, cls = _MODULES[base].partition(":")
    found: Provider = getattr(importlib.import_module(f".{module}", __name__), cls)(*([wish] if forced else []))
    return Renamed(found, name) if again else found
