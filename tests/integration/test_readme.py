"""What the documents show must run, and must name what exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(tmp_path: Path):
    blocks = _blocks("python")
    assert len(blocks) >= 4
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "because" in done.stdout


def test_opens_with_one_sentence_and_then_the_two_commands():
    head = README.split("```sh")[0].split("\n\n")
    assert len([p for p in head[1:] if p.strip()]) == 1
    assert [line.partition("#")[0].strip() for line in _blocks("sh")[0].splitlines()] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in ("demo", "test"))


def test_environment_table_lists_every_variable():
    from tritonops._env import VARIABLES

    listed = re.findall(r"^\| `([A-Z_]+)` \|", README, flags=re.MULTILINE)
    assert sorted(listed) == sorted(VARIABLES)


def test_support_table_names_every_family():
    import tritonops

    rows = re.findall(r"^\| (`\w+`.*?) \|(.*)\|(?:.*)\|(.*)\|$", README, flags=re.MULTILINE)
    rows = {names.split("`")[1]: (forward, backward) for names, forward, backward in rows}
    for op, backward_op in (
        ("matmul", None),
        ("layer_norm", "layer_norm_backward"),
        ("rms_norm", "rms_norm_backward"),
        ("embedding", "embedding_backward"),
    ):
        for column, name in zip(rows[op], (op, backward_op), strict=True):
            if name:
                families = {v.family for v in tritonops.variants(name)} - {"vendor"}
                assert set(re.findall(r"`(\w+)`", column)) == families, name


def test_table_example_is_json_with_the_keys_of_the_schema():
    (block,) = _blocks("json")
    schema = json.loads((ROOT / "dispatch_tables" / "schema.json").read_text(encoding="utf-8"))
    assert set(json.loads(block)) == set(schema["properties"])


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_and_paths_lead_somewhere(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    targets += re.findall(r"`((?:tritonops|tests|examples|dispatch_tables)/[\w./-]*)`", text)
    assert [t for t in targets if not (ROOT / t).exists()] == []
