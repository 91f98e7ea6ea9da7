"""The table format: what parse accepts, that it names the field of everything else, and that schema.json agrees."""

from __future__ import annotations

import copy
import errno
import importlib.util
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatch_cases import OURS, SOURCE_OF_ONE, cuda, leaf, make_table, section
from tritonops.dispatch import table
from tritonops.dispatch.table import Leaf, Split, Table, parse, walk
from tritonops.errors import TableError, TritonOpsError

FEATURES = {"M", "N", "tiles128", "waves100"}
KNOWN = {"vendor", *OURS}


def full() -> dict[str, Any]:
    """A table with every field that the format has."""
    tree = {
        "f": "M",
        "le": 64,
        "yes": leaf("one/a", "vendor", gain=1.25),
        "no": {"f": "waves100", "le": 100, "yes": leaf("two/a"), "no": leaf("vendor")},
    }
    whole = section(
        tree, {"M": [1, 4096], "N": [64, 65536]}, dtype="float16", layout="", aligned=True, policy="fast", mode="graph"
    )
    made = make_table(whole, section(leaf("vendor")))
    made["device"] |= {"memory_gib": 139.8, "l2_mib": 60, "copy_tbps": 4.3, "matmul_tflops": 780}
    made["made_with"] |= {"torch": "2.11.0", "driver": None}
    made["provenance"] |= {"sha256": "a" * 64, "source": "a place", "note": "a note"}
    made["variants"]["one/a"] = {"meta": {"BLOCK": 8}, "options": {}, "regs": 168, "spill": 0, "text": "b" * 64}
    return made


def read(value: dict[str, Any] | bytes) -> Table:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse(data, "t.json", op="toy", features=FEATURES, known=KNOWN)


def refuse(value: dict[str, Any] | bytes) -> TableError:
    with pytest.raises(TableError) as caught:
        read(value)
    error = caught.value
    assert error.file == "t.json" and str(error) == f"dispatch table t.json: {error.field}: {error.problem}"
    assert len(str(error)) < 700 and str(error).isprintable()
    return error


def test_every_field_is_read() -> None:
    got = read(full())
    assert (got.op, got.arch, got.sms, got.names) == ("toy", "sm_90", 132, ("NVIDIA Test",))
    assert got.device["copy_tbps"] == 4.3 and got.made_with["driver"] is None
    assert not got.published and got.provenance["raw"] == "raw/toy.jsonl.gz"
    assert got.kernels == {"one": SOURCE_OF_ONE, "two": "2" * 64}
    assert got.variants["one/a"]["regs"] == 168 and list(got.variants) == list(OURS)
    first, second = got.sections
    assert first.when == {"dtype": "float16", "layout": "", "aligned": True, "policy": "fast", "mode": "graph"}
    assert first.hull == {"M": (1, 4096), "N": (64, 65536)} and second.hull == {}
    assert first.tree == Split(
        "M", 64, Leaf(("one/a", "vendor"), 3, 1.25), Split("waves100", 100, Leaf(("two/a",), 3), Leaf(("vendor",), 3))
    )
    assert first.evidence == {"shapes": 3} and got.default == ("vendor",) and got.path == "t.json"
    assert got.raw == full()


@pytest.mark.parametrize(
    ("features", "use", "path"),
    [
        ({"M": 64, "waves100": 9}, "one/a", ["M = 64 <= 64"]),
        ({"M": 65, "waves100": 100}, "two/a", ["M = 65 > 64", "waves100 = 100 <= 100"]),
        ({"M": 65, "waves100": 101}, "vendor", ["M = 65 > 64", "waves100 = 101 > 100"]),
    ],
)
def test_walk_goes_down_the_tree_and_says_how(features, use, path) -> None:
    got, how = walk(read(full()).sections[0].tree, features)
    assert (got.use[0], how) == (use, path)


def test_leaves_are_all_found() -> None:
    found = {found.use for found in table.leaves(read(full()).sections[0].tree)}
    assert found == {("one/a", "vendor"), ("two/a",), ("vendor",)}


def test_a_table_error_is_a_value_error_of_ours() -> None:
    assert issubclass(TableError, ValueError) and issubclass(TableError, TritonOpsError)


def test_dump_is_read_back_and_is_stable() -> None:
    data = table.dump(full())
    assert read(data).raw == full() and table.dump(json.loads(data)) == data
    assert data.endswith(b"\n") and data.isascii()
    with pytest.raises(ValueError, match="JSON compliant"):
        table.dump({"x": float("nan")})


# Truncation and bytes that are no JSON


def test_truncated_at_every_length() -> None:
    data = table.dump(full()).rstrip(b"\n")
    for length in range(len(data)):
        assert refuse(data[:length]).field == "(file)"
    assert read(data).op == "toy"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"\xff\xfe\x00", "utf-8"),
        (b'{"schema": "\xff"}', "utf-8"),
        (b"\x00" * 50, "not valid JSON"),
        (b"{} {}", "Extra data"),
        (b'{"schema": 1, "schema": 1}', "a key occurs twice"),
        (b'{"schema": NaN}', "NaN is not a finite number"),
        (b'{"schema": -Infinity}', "-Infinity is not a finite number"),
        (b'{"schema": 1e999}', "1e999 is not a finite number"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not valid JSON"),
        (b"[" * 500 + b"]" * 500, "nested deeper than 64 levels"),
        (b" " * (table.MAX_BYTES + 1), "larger than 4194304 bytes"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bytes_that_are_no_table(data, problem) -> None:
    error = refuse(data)
    assert error.field == "(file)" and problem in error.problem


@pytest.mark.parametrize("where", ["evidence", "meta", "options"])
@pytest.mark.parametrize("token", ["NaN", "Infinity", "1e400", "[" * 80 + "]" * 80, '{"k": 1, "k": 2}'])
def test_free_form_fields_are_json_and_shallow_too(where, token) -> None:
    made = full()
    owner = made["sections"][0] if where == "evidence" else made["variants"]["one/a"]
    owner[where] = {"x": "@"}
    assert refuse(json.dumps(made).replace('"@"', token).encode()).field == "(file)"


# Values


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _paths(child, (*path, key))


def _dotted(path: tuple[Any, ...]) -> str:
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path).removeprefix(".")


def _changed(path: tuple[Any, ...], value: Any = None, *, delete: bool = False) -> dict[str, Any]:
    made = full()
    owner = made
    for k in path[:-1]:
        owner = owner[k]
    if delete:
        del owner[path[-1]]
    else:
        owner[path[-1]] = copy.deepcopy(value)
    return made


PATHS = list(_paths(full()))
# The free-form contents of these are nobody's but the calibrator's.
FREE = re.compile(r"(evidence|meta|options)\.")
WRONG: list[Any] = [
    None, True, False, -1, 0, 2**53 + 1, 10**400, -(10**400), 1.5, "", "x", "../../x", "vendor/", "VENDOR",
    "a\x1b[31mb", "a\nb", "\ud800", "x" * 1001, [], [1], ["vendor", 1], [[]], [2, 1], {}, {"x": 1}, {"use": []},
    {"use": ["vendor"], "x": 1},
]  # fmt: skip
# What a JSON schema cannot say: it does not know the op, and sees one field at a time.
BEYOND_SCHEMA = re.compile(
    r"unknown variant|unknown feature|is above high|expected 'toy'|cannot be printed|unknown \['K'\]$"
)


# Without these no table is one. Deleting `use` leaves a split without its fields.
REQUIRED = re.compile(
    r"\w+|device\.(arch|sms|names|names\[0\])|provenance\.(kind|raw)|kernels\.\w+\.source|default\[0\]"
    r"|sections\[\d\]\.(when|hull|tree)|.*\.hull\.\w\[\d\]|.*tree.*\.(f|le|yes|no|use)|.*(no|no\.yes|\[1\]\.tree)\.use\[0\]"
)


def test_every_deletion_of_what_is_required_is_refused_naming_the_field() -> None:
    refused = []
    for path in PATHS:
        made, dotted = _changed(path, delete=True), _dotted(path)
        if REQUIRED.fullmatch(dotted):
            error = refuse(made)
            assert error.field == (_dotted(path[:-1]) or "(top)"), (path, error)
            assert isinstance(path[-1], int) or repr(path[-1]) in error.problem or path[-1] == "use", (path, error)
            refused.append(dotted)
        elif dotted in ("variants.one/a", "variants.two/a"):
            assert "unknown variant" in refuse(made).problem
        else:
            assert read(made).op == "toy"
    assert len(refused) == 43


def test_every_alteration_is_a_table_error_naming_the_field_or_nothing() -> None:
    accepted: dict[str, list[Any]] = {}
    for path in PATHS:
        dotted = _dotted(path)
        for wrong in WRONG:
            made = _changed(path, wrong)
            try:
                read(made)
            except TableError as error:
                here = error.field in (dotted, _dotted(path[:-1]) or "(top)")
                assert (
                    here or error.field.startswith((dotted + ".", dotted + "[")) or "unknown variant" in error.problem
                ), (path, wrong, error)
                assert len(str(error)) < 700 and str(error).isprintable()
            else:
                accepted.setdefault(FREE.sub("*", dotted), []).append(wrong)
    takes = {k: v for k, v in accepted.items() if "*" not in k}
    assert takes["sections[0].tree.le"] == [0]
    assert takes["sections[0].when.aligned"] == [True, False]
    assert takes["sections[0].tree.no.no.n"] == [0]
    assert takes["device.copy_tbps"] == [-1, 0, 1.5]
    assert "op" not in takes and "schema" not in takes and "provenance.kind" not in takes and "default" not in takes
    assert takes["device.names[0]"] == ["x", "../../x", "vendor/", "VENDOR"]  # only ever printed
    assert takes["made_with.driver"][0] is None
    assert not {k for k in takes if k.startswith(("kernels.", "device.arch", "device.sms", "provenance.raw"))}


@pytest.mark.parametrize(
    ("path", "value", "field", "problem"),
    [
        (("schema",), 2, "schema", "this version reads schema 1, the file has 2"),
        (("schema",), True, "schema", "expected int, got bool"),
        (("op",), "matmul", "op", "expected 'toy', got 'matmul'"),
        (("op",), "../../x", "op", "'../../x' is not a valid name here"),
        (("device", "arch"), "../x", "device.arch", "'../x' is not a valid name here"),
        (("device", "arch"), "sm_\u0669\u0660", "device.arch", "'sm_\u0669\u0660' is not a valid name here"),
        (("device", "sms"), 0, "device.sms", "0 is outside [1, 4095]"),
        (("device", "names"), [], "device.names", "expected 1 to 64 names"),
        (("device", "l2_mib"), 10**400, "device.l2_mib",
         "expected a number within +-9007199254740992, got an integer of 1329 bits"),
        (("made_with", "../x"), "1", "made_with", "'../x' is not a valid name here"),
        (("provenance", "raw"), "raw/../x", "provenance.raw", "'raw/../x' is not a valid name here"),
        (("provenance", "raw"), "raw/..", "provenance.raw", "'raw/..' is not a valid name here"),
        (("provenance", "kind"), "guessed", "provenance.kind", "expected 'measured' or 'published'"),
        (("kernels", "../../x"), {"source": "a" * 64}, "kernels", "'../../x' is not a valid name here"),
        (("kernels", "one"), {"source": "A" * 64}, "kernels.one.source", f"{'A' * 60!r} is not a valid name here"),
        (("variants", "../../x"), {}, "variants", "'../../x' is not a valid name here"),
        (("variants", "seven/a"), {}, "variants", "unknown variant 'seven/a'"),
        (("variants", "one/a", "regs"), "many", "variants.one/a.regs", "expected int, got str"),
        (("variants", "one/a", "meta"), 5, "variants.one/a.meta", "expected dict, got int"),
        (("sections", 0, "when", "policy"), "slow", "sections[0].when.policy",
         "expected one of ('fast', 'deterministic', 'batch_invariant')"),
        (("sections", 0, "when", "arch"), "sm_90", "sections[0].when", "unknown ['arch']"),
        (("sections", 0, "hull", "M"), [5, 4], "sections[0].hull.M", "low 5 is above high 4"),
        (("sections", 0, "hull", "K"), [4, 5], "sections[0].hull", "unknown ['K']"),
        (("sections", 0, "tree", "f"), "K", "sections[0].tree.f",
         "unknown feature 'K'; this op has ['M', 'N', 'tiles128', 'waves100']"),
        (("sections", 0, "tree", "le"), 64.0, "sections[0].tree.le", "expected int, got float"),
        (("sections", 0, "tree", "yes", "use"), ["one/a", "two/b"], "sections[0].tree.yes.use[1]",
         "unknown variant 'two/b'"),
        (("sections", 0, "tree", "yes", "gain"), True, "sections[0].tree.yes.gain",
         "expected a number within +-9007199254740992, got True"),
        (("default",), [], "default", "expected 1 to 64 variant ids"),
        (("default",), ["vendor"] * 65, "default", "expected 1 to 64 variant ids"),
        (("x" * 100_000,), 1, "(top)", f"unknown ['{'x' * 40}']"),
        (("x\x1b[2J",), 1, "(top)", "unknown ['x\\x1b[2J']"),
    ],
)  # fmt: skip
def test_one_field_is_wrong(path, value, field, problem) -> None:
    error = refuse(_changed(path, value))
    assert (error.field, error.problem) == (field, problem)


def test_a_measured_table_needs_its_measurements_and_a_published_one_its_source() -> None:
    assert refuse(full() | {"provenance": {"kind": "measured"}}).problem == "a measured table needs 'raw'"
    assert refuse(full() | {"provenance": {"kind": "published"}}).problem == "a published table needs 'source'"
    assert read(full() | {"provenance": {"kind": "published", "source": "a thesis"}}).published


def test_a_variant_that_the_table_does_not_list_may_not_be_used() -> None:
    made = full()
    del made["variants"]["two/a"]
    assert refuse(made).field == "sections[0].tree.no.yes.use[0]"
    del made["variants"]["one/b"]
    made["sections"][0]["tree"] = leaf("vendor")
    assert list(read(made).variants) == ["one/a", *OURS[3:]]


def test_known_none_accepts_what_the_table_lists_itself() -> None:
    made = full()
    made["variants"]["seven/a"] = {}
    made["default"] = ["seven/a"]
    got = parse(json.dumps(made).encode(), "t.json", op="toy", features=FEATURES)
    assert got.default == ("seven/a",)


def _chain(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = leaf("vendor")
    for _ in range(depth):
        tree = {"f": "M", "le": 1, "yes": leaf("vendor"), "no": tree}
    return tree


def _bushy(depth: int) -> dict[str, Any]:
    return leaf("vendor") if not depth else {"f": "M", "le": 1, "yes": _bushy(depth - 1), "no": _bushy(depth - 1)}


def test_trees_are_bounded_in_depth_and_size() -> None:
    assert read(full() | {"sections": [section(_chain(32))]}).sections
    assert "deeper than 32 levels" in refuse(full() | {"sections": [section(_chain(33))]}).problem
    assert "more than 20000 nodes" in refuse(full() | {"sections": [section(_bushy(14))]}).problem
    assert refuse(full() | {"sections": [section(leaf("vendor"))] * 501}).problem == "more than 500"


def test_a_hostile_file_of_full_size_is_refused_quickly() -> None:
    """4 MiB of what costs most to read: nothing in it may be more than linear."""
    begin = time.perf_counter()
    pieces = [b'{"a":' + b"[" * 30 + b"1" + b"]" * 30 + b"}", b"1" * 4000, b'"' + b"\\u00e9" * 600 + b'"', b"1e308"]
    pieces += [b"[" + b"[]," * 9 + b"1" * 500 + b"]", b'{"a":' * 9 + b'"' + b"x" * 500 + b'"' + b"}" * 9]
    for piece in pieces:
        refuse(b"[" + b",".join([piece] * (table.MAX_BYTES // (len(piece) + 1) - 1)) + b"]")
    assert time.perf_counter() - begin < 15


# schema.json


@pytest.fixture(scope="module")
def validator() -> Any:
    if importlib.util.find_spec("jsonschema") is None:
        pytest.skip("jsonschema is not installed")
    from jsonschema import Draft202012Validator

    schema = json.loads((Path(__file__).parents[2] / "dispatch_tables" / "schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def _agree(validator: Any, made: dict[str, Any], note: object) -> bool:
    """Whether both accept; fails where they differ in more than the schema can say."""
    fits = validator.is_valid(made)
    try:
        read(made)
    except TableError as error:
        assert not fits or BEYOND_SCHEMA.search(error.problem), (note, error)
        return False
    assert fits, (note, list(validator.iter_errors(made))[0].message)
    return True


def test_schema_and_parser_accept_the_same_good_tables(validator) -> None:
    published = full() | {"provenance": {"kind": "published", "source": "a thesis"}, "kernels": {}, "variants": {}}
    published["sections"] = []
    for made in (full(), published, make_table(section(leaf("vendor")), gpu=cuda(arch="sm_121", sms=48))):
        assert _agree(validator, made, "good")


def test_schema_and_parser_refuse_the_same_changes(validator) -> None:
    verdicts = [
        _agree(validator, _changed(path, delete=True), path) for path in PATHS if not FREE.search(_dotted(path))
    ]
    for path in PATHS:
        for wrong in WRONG:
            if wrong == "\ud800" or abs(wrong if type(wrong) is int else 0) > 10**100:
                continue
            verdicts.append(_agree(validator, _changed(path, wrong), (path, wrong)))
    assert verdicts.count(False) > 900 and verdicts.count(True) > 100


def test_schema_and_parser_refuse_the_same_additions(validator) -> None:
    owners = [(), *(p for p in PATHS if isinstance(_at(full(), p), dict))]
    for owner in owners:
        for name in ("x", "../../x", "K", "vendor", "one/a", "M"):
            if name not in _at(full(), owner):
                _agree(validator, _changed((*owner, name), {"x": 1}), (owner, name))
                _agree(validator, _changed((*owner, name), [1, 2]), (owner, name))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for k in path:
        value = value[k]
    return value


def test_schema_knows_the_features_of_every_op(validator) -> None:
    import tritonops  # noqa: F401
    from tritonops.dispatch.variant import REGISTRY

    names = {f for spec in REGISTRY.values() for f in (*spec.dims, *spec.feature_names)}
    assert set(validator.schema["$defs"]["feature"]["enum"]) == names


# Writing


def _listing(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


def test_written_in_one_step_with_readable_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "t.json"
    table.write_atomically(path, b"first")
    table.write_atomically(path, b"second")
    assert path.read_bytes() == b"second" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert _listing(tmp_path) == ["a", "a/b", "a/b/t.json"]


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch, step: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(table.os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        table.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and _listing(tmp_path) == ["t.json"]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(table.os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        table.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and _listing(tmp_path) == ["t.json"]


def test_links_are_followed_and_stay_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "t.json").symlink_to("target.json")
    table.write_atomically(tmp_path / "link" / "t.json", b"new")
    assert (tmp_path / "real" / "target.json").read_bytes() == b"new"
    assert (tmp_path / "real" / "t.json").is_symlink()
    assert _listing(tmp_path / "real") == ["t.json", "target.json"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "directory", "link"):
        with pytest.raises(OSError, match="not a regular file"):
            table.write_atomically(tmp_path / name, b"new")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode) and (tmp_path / "link").is_symlink()
    assert _listing(tmp_path) == ["directory", "link", "pipe"]


def test_a_name_of_full_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    table.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
