"""Error and warning types of tritonops."""

from __future__ import annotations


class TritonOpsError(Exception):
    """Base of the errors that only tritonops raises."""


class TableError(TritonOpsError, ValueError):
    """A dispatch table is damaged, hostile or not for this op.

    Attributes:
        file: path of the table, or a description of where it came from.
        field: dotted path of the offending field, for example ``sections[0].tree.le``.
    """

    def __init__(self, file: str, field: str, problem: str):
        super().__init__(f"dispatch table {file}: {field}: {problem}")
        self.file = file
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[TableError], tuple[str, str, str]]:
        return TableError, (self.file, self.field, self.problem)


class VariantUnavailable(TritonOpsError, RuntimeError):
    """A variant that was asked for by name cannot serve this call; the message says why."""


class TritonOpsWarning(UserWarning):
    """A table or variant was set aside, or serves with less evidence than usual."""
