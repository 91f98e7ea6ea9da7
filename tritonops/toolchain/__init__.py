"""The static toolchain: compile for a named GPU without having one, and read what came out."""

from .assembler import AssemblerError, CompileError, target_device
from .compile import Compiled, compile_request, compile_variant
from .hashes import source_hash, text_hash
from .resources import Resources, measure, parse_resource_log, screen

__all__ = [
    "AssemblerError",
    "CompileError",
    "Compiled",
    "Resources",
    "compile_request",
    "compile_variant",
    "measure",
    "parse_resource_log",
    "screen",
    "source_hash",
    "target_device",
    "text_hash",
]
