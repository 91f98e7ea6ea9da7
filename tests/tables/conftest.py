"""Fixtures of the toy op."""

from dispatch_cases import clean, tables, toy, toys  # noqa: F401
