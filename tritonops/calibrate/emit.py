"""Writing what was learned as a dispatch table; a pure function of the raw file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..dispatch import table
from ..dispatch.variant import VENDOR, OpSpec
from .learn import Learned, LearnedSection
from .raw import Raw

if TYPE_CHECKING:
    from .verify import Report, Score


def provisional(raw: Raw, learned: Learned, spec: OpSpec) -> bytes:
    """The table of the learned trees as they are, to be scored."""
    return _dump(raw, learned, [_section(s, None) for s in learned.sections], f"raw/{raw.op}.jsonl.gz", "0" * 64)


def emit(raw: Raw, learned: Learned, report: Report, raw_name: str, raw_sha256: str) -> bytes:
    """The table's bytes.

    Args:
        raw_name: name of the packed raw file, which lies in ``raw/`` beside the table.
        raw_sha256: of that file.
    """
    sections = [_section(s, score) for s, score in zip(learned.sections, report.scores, strict=True)]
    return _dump(raw, learned, sections, f"raw/{raw_name}", raw_sha256)


def _section(section: LearnedSection, score: Score | None) -> dict[str, Any]:
    tree: Mapping[str, Any] = section.tree
    evidence = dict(section.evidence)
    if score is not None:
        evidence["heldout"] = score.evidence()
        tree = score.tree
    return {"when": dict(section.when), "hull": dict(section.hull), "tree": tree, "evidence": evidence}


def _used(tree: Mapping[str, Any]) -> Iterable[str]:
    if "use" in tree:
        yield from tree["use"]
    else:
        yield from _used(tree["yes"])
        yield from _used(tree["no"])


def _dump(raw: Raw, learned: Learned, sections: list[dict[str, Any]], raw_path: str, sha256: str) -> bytes:
    head = raw.header
    used = sorted({vid for s in sections for vid in _used(s["tree"])} - {VENDOR})
    families = {vid.partition("/")[0] for vid in used}
    return table.dump(
        {
            "schema": table.SCHEMA,
            "op": raw.op,
            "device": head["device"],
            "made_with": head["made_with"],
            "provenance": {"kind": "measured", "raw": raw_path, "sha256": sha256},
            "kernels": {family: head["kernels"][family] for family in sorted(families & head["kernels"].keys())},
            "variants": {vid: head["variants"].get(vid, {}) for vid in used},
            "sections": sections,
            "default": list(learned.default),
        }
    )
