"""Public reports about tables and dispatch, by their ids; those about calibration are with calibration's tests."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tritonops
from dispatch_cases import Heard, clean, cuda, leaf, make_table, pretend, put, section  # noqa: F401
from reports.support import err, ln64
from tritonops import _compat, device, launch
from tritonops.device import DeviceInfo
from tritonops.dispatch import store, table
from tritonops.dispatch.variant import REGISTRY
from tritonops.embedding import op as embedding
from tritonops.matmul import op as matmul
from tritonops.norm import op as norm

GPU = cuda("NVIDIA H100 80GB HBM3")
ROWS = ("rows/t4096-w4", "rows/t1024-w4")


def for_op(op: str, *sections: dict, gpu: DeviceInfo = GPU, **changes) -> dict:
    """A measured table of a real op that lists every variant it has."""
    variants = {v: {} for v in REGISTRY[op].variants() if v != "vendor"}
    return make_table(*sections, gpu=gpu, op=op, variants=variants, kernels={}, **changes)


@pytest.fixture
def tables(clean, tmp_path, monkeypatch) -> Path:  # noqa: F811
    """The directory that is searched first, on a machine whose CPU stands in for an H100."""
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path / "tables"))
    pretend(monkeypatch, GPU)
    return tmp_path / "tables"


def no_triton_runs(monkeypatch, error: Exception | None = None) -> list[str]:
    """Launches, by kernel; each raises `error`."""
    launches: list[str] = []

    def failing(kernel, grid, args, meta, options) -> None:
        launches.append(kernel)
        raise error or AssertionError("a kernel was launched")

    monkeypatch.setattr(launch, "kernel", lambda name: name)
    monkeypatch.setattr(launch, "launch", failing)
    return launches


# TUN-01: FlashML-org/FreeToken#490; pytorch/pytorch#184096; triton-lang/triton#8923

GOOD = table.dump(for_op("layer_norm", section(leaf("vendor")))) if "layer_norm" in REGISTRY else b""
JUNK = [
    b"", b"{", b'{"version": 1, "entries": [', b"\xff\xfe\x00", b"null", b"[]", b'{"version": 999}',
    GOOD[: len(GOOD) // 2], GOOD + b"}", GOOD.replace(b'"schema": 1', b'"schema": 999'),
]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_tun_01_a_damaged_table_counts_as_absent_and_is_named_once(tables, junk) -> None:
    path = put(tables, junk, GPU, "layer_norm")
    x = torch.randn(4, 8)
    with Heard() as heard:
        for _ in range(3):
            assert torch.equal(tritonops.layer_norm(x, None, None, 1e-5), F.layer_norm(x, (8,)))
            tritonops.clear_cache()
    assert [str(path) in h and h.startswith("tritonops: set aside: dispatch table ") for h in heard] == [True, False]
    assert heard[1].startswith("tritonops: no dispatch table for NVIDIA H100") and path.read_bytes() == junk
    table.write_atomically(path, GOOD)  # what the next calibration does
    with Heard() as heard:
        assert tritonops.explain("layer_norm", x).rule == "table"
    assert heard == []


def test_tun_01_a_fresh_process_starts_on_a_table_cut_off_by_a_crash(tmp_path) -> None:
    path = put(tmp_path, GOOD[: len(GOOD) // 2], GPU, "layer_norm")
    program = """
import torch, tritonops
from tritonops.device import DeviceInfo
from tritonops.norm import op
op.device_info = lambda where: DeviceInfo("cuda", "sm_90", 132, 232448, name="NVIDIA H100 80GB HBM3", index=0)
torch.cuda.current_device = lambda: 0
x = torch.randn(4, 8)
print(torch.equal(tritonops.layer_norm(x, None, None, 1e-5), torch.layer_norm(x, (8,))))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    inherited = os.environ.get("PYTHONPATH")
    path_list = os.pathsep.join([str(Path(__file__).parents[2]), *([inherited] if inherited else [])])
    environment |= {"TRITONOPS_TABLE_DIR": str(tmp_path), "PYTHONPATH": path_list}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert done.stderr.count(f"set aside: dispatch table {path}") == 1
    assert done.stderr.count("TritonOpsWarning") == 2  # damaged, and no other found


# TUN-02: pytorch/pytorch#119698, #153791; NVIDIA-NeMo/RL#784


def _in_child(work) -> int:
    """Run `work` in a forked process; its exit code is 1 where it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def test_tun_02_readers_see_one_complete_table_while_many_write_and_one_is_killed(clean, tmp_path) -> None:  # noqa: F811
    spec, seconds = REGISTRY["layer_norm"], 2.0
    path = store.table_path(tmp_path, "layer_norm", GPU)
    names = list(spec.variants())
    # Tables whose every part tells which it is.
    contents = [
        table.dump(for_op("layer_norm", *[section(leaf(names[i]), dtype=str(i))] * length, default=[names[i]]))
        for i, length in enumerate((1, 500, 20, 150))
    ]
    assert max(map(len, contents)) > 100 * min(map(len, contents)) / 8

    def write(seed: int, until: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            table.write_atomically(path, dice.choice(contents))

    def read(until: float) -> None:
        seen = set()
        while time.monotonic() < until:
            try:
                got = store.read(path, spec)
            except FileNotFoundError:
                continue
            which = names.index(got.default[0])
            assert all(s.tree.use == got.default and s.when["dtype"] == str(which) for s in got.sections)
            assert len(got.sections) == (1, 500, 20, 150)[which]
            seen.add(which)
        assert len(seen) > 1, "the writers wrote nothing"

    until = time.monotonic() + seconds
    victim = _in_child(lambda: write(0, until + 30))
    children = [_in_child(lambda i=i: write(i, until)) for i in range(1, 4)]
    children += [_in_child(lambda: read(until)) for _ in range(4)]
    time.sleep(seconds / 2)
    os.kill(victim, signal.SIGKILL)
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 7
    assert path.read_bytes() in contents
    left = [p.name for p in path.parent.iterdir() if p != path]
    assert len(left) <= 1 and all(name.startswith(".") and name.endswith(".tmp") for name in left)
    assert [f.status for f in store.search(spec, GPU)].count("damaged") == 0


# TUN-05: flagos-ai/FlagGems#5829, #5832; vllm-project/vllm#51519; triton-lang/triton#6803


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), ValueError("a tile"), KeyError("option")])
def test_tun_05_a_choice_that_fails_in_the_compiler_is_set_aside_and_torch_serves(tables, monkeypatch, error) -> None:
    put(tables, for_op("layer_norm", section(leaf(*ROWS, "vendor"))), GPU, "layer_norm")
    launches = no_triton_runs(monkeypatch, error)
    x = torch.randn(64, 1024)
    with Heard() as heard:
        for _ in range(5):
            assert err(tritonops.layer_norm(x, None, None, 1e-5), ln64(x)) < 1e-5
    assert len(launches) == 2  # each broken variant once: no endless retry
    assert len(heard) == 2 and all("is set aside in this process" in h for h in heard)
    assert heard[0].startswith("tritonops.layer_norm: variant rows/t4096-w4 failed on NVIDIA H100 80GB HBM3 (")
    assert heard[1].endswith("and vendor serves")
    assert [v for v, why in tritonops.explain("layer_norm", x).rejected] == list(ROWS)


def test_tun_05_the_gradient_survives_a_broken_backward_too(tables, monkeypatch) -> None:
    broken = [v for v in REGISTRY["layer_norm_backward"].variants() if v.startswith("rows/")][:1]
    put(tables, for_op("layer_norm", section(leaf("vendor"))), GPU, "layer_norm")
    put(tables, for_op("layer_norm_backward", section(leaf(*broken, "vendor"))), GPU, "layer_norm_backward")
    launches = no_triton_runs(monkeypatch, RuntimeError("PassManager::run failed"))
    x = torch.randn(64, 256, requires_grad=True)
    g = torch.randn(64, 256)
    want = torch.autograd.grad(F.layer_norm(x, (256,)), x, g)[0]
    with Heard() as heard:
        got = torch.autograd.grad(tritonops.layer_norm(x), x, g)[0]
    assert torch.allclose(got, want, atol=1e-6) and len(launches) == 1 and len(heard) == 1


# TUN-06: triton-lang/triton#11373; sgl-project/sglang#5955; vllm-project/vllm#43153; ROCm/vllm#315


def test_tun_06_a_table_of_another_compiler_serves_with_one_notice_that_names_both(tables, monkeypatch) -> None:
    made = for_op("layer_norm", section(leaf(ROWS[0], "vendor")), made_with={"triton": "3.6.0"})
    path = put(tables, made, GPU, "layer_norm")
    monkeypatch.setattr(_compat, "triton_version", lambda: "3.7.1")
    with Heard() as heard:
        for m in range(1, 30):
            got = tritonops.explain("layer_norm", (m, 4096), dtype=torch.float32, device="sm_90-132")
            tritonops.clear_cache()
    assert got.variant == ROWS[0] and "3.6.0" in str(got) and "3.7.1" in str(got)
    assert len(heard) == 1 and str(path) in heard[0]
    assert "made with triton 3.6.0, running triton 3.7.1" in heard[0]
    from tritonops import doctor

    report = "\n".join(doctor.report([device.named_device("sm_90-132")])[0])
    assert "made with triton 3.6.0, running triton 3.7.1" in report


# TUN-07: sgl-project/sglang#4028; vllm-project/vllm#17619, #32347, #8971

CARDS = {
    "NVIDIA H20": ("sm_90", 78, []),
    "NVIDIA H20-3e": ("sm_90", 78, ["was made on NVIDIA H20, this is NVIDIA H20-3e"]),
    "NVIDIA H100 80GB HBM3": ("sm_90", 132, []),
    "NVIDIA H100 PCIe": ("sm_90", 114, ["no dispatch table for NVIDIA H100 PCIe (sm_90-114), looked for "]),
    "Tesla T4": ("sm_75", 40, ["no dispatch table for Tesla T4 (sm_75-40), looked for "]),
    "AMD Instinct MI325X": ("gfx942", 304, ["no dispatch table for AMD Instinct MI325X (gfx942-304), looked for "]),
}


@pytest.mark.parametrize("name", CARDS)
def test_tun_07_a_close_variant_without_a_table_is_told_once_and_served_by_torch(tables, monkeypatch, name) -> None:
    for owner in ("NVIDIA H20", "NVIDIA H100 80GB HBM3"):
        gpu = cuda(owner, *CARDS[owner][:2])
        for op in REGISTRY:
            put(tables, for_op(op, section(leaf("vendor")), gpu=gpu), gpu, op)
    arch, sms, messages = CARDS[name]
    card = cuda(name, arch, sms)
    for module in (matmul, norm, embedding):
        monkeypatch.setattr(module, "device_info", lambda where: card)
    a, w, ids = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.tensor([0, 3])
    with Heard() as heard:
        for _ in range(100):
            tritonops.matmul(a, w).sum().backward()
            tritonops.layer_norm(a, w[0]).sum().backward()
            tritonops.rms_norm(a, w[0]).sum().backward()
            tritonops.embedding(ids, w).sum().backward()
    assert len(heard) == len(messages) and all(m in h for m, h in zip(messages, heard, strict=True))
    if messages and "looked for" in messages[0]:
        assert str(tables) in heard[0]  # where


def test_tun_07_a_pcie_card_does_not_inherit_the_sxm_cards_choice(tables) -> None:
    put(tables, for_op("layer_norm", section(leaf(ROWS[0], gain=2.0))), GPU, "layer_norm")
    chosen = {
        sms: tritonops.explain("layer_norm", (64, 1024), dtype=torch.float16, device=f"sm_90-{sms}")
        for sms in (132, 114)
    }
    assert (chosen[132].variant, chosen[114].variant, chosen[114].rule) == (ROWS[0], "vendor", "no table")


# TUN-09: vllm-project/vllm#52192


def test_tun_09_nothing_is_extrapolated_beyond_what_was_measured(tables) -> None:
    rows1, rows8 = "rows/t4096-w4", "rows/t4096-w8"
    tree = {"f": "M", "le": 4, "yes": leaf(rows1), "no": leaf(rows8)}
    put(tables, for_op("layer_norm", section(tree, {"M": [1, 8], "N": [2688, 2688]})), GPU, "layer_norm")

    def choose(m: int, n: int) -> str:
        return tritonops.explain("layer_norm", (m, n), dtype=torch.bfloat16, device="sm_90-132").variant

    assert (choose(1, 2688), choose(8, 2688)) == (rows1, rows8)
    assert (choose(4, 2688), choose(5, 2688)) == (rows1, rows8)  # between measured neighbours
    for m, n in ((9, 2688), (2048, 2688), (8, 2687), (8, 2696), (8, 65536), (1, 1)):
        assert choose(m, n) == "vendor"
    got = tritonops.explain("layer_norm", (2048, 65536), dtype=torch.bfloat16, device="sm_90-132")
    assert got.unknown == ("nothing was measured here: M=2048 is outside [1, 8], N=65536 is outside [2688, 2688]",)


# TUN-11: ROCm/FlyDSL#783


def test_tun_11_layout_and_alignment_are_in_the_key() -> None:
    a = torch.randn(512, 512).half()
    operands = {
        "packed": a,
        "transposed": a.t(),
        "broadcast": a[:1].expand(512, 512),
        "broadcast columns": a[:, :1].expand(512, 512),
        "odd start": torch.randn(512 * 512 + 1).half()[1:].view(512, 512),
        "odd rows": torch.randn(512, 513).half()[:, :512],
        "gaps": torch.randn(512, 1024).half()[:, ::2],
    }
    keys = {name: matmul._key(x, a, None, None, 0, False) for name, x in operands.items()}
    others = [k for name, k in keys.items() if name != "packed"]
    assert keys["packed"] not in others
    assert keys["packed"] == matmul._key(a.clone(), a, None, None, 0, False)
    facts = {name: (p.layout, p.aligned) for name, x in operands.items() for p in [matmul.describe(x, a)]}
    assert facts == {
        "packed": ("nn", True),
        "transposed": ("tn", True),
        "broadcast": ("xn", False),
        "broadcast columns": ("xn", False),
        "odd start": ("nn", False),
        "odd rows": ("nn", False),
        "gaps": ("xn", False),
    }
    right = {name: matmul._key(a, x, None, None, 0, False) for name, x in operands.items()}
    assert right["packed"] not in [k for name, k in right.items() if name != "packed"]


def test_tun_11_a_choice_measured_on_packed_operands_is_not_taken_for_others(tables) -> None:
    tma = next(v for v in REGISTRY["matmul"].variants() if v.startswith("tma_persistent/"))
    packed = section(leaf(tma, "vendor"), dtype="float16", layout="nn", aligned=True)
    put(tables, for_op("matmul", packed), GPU, "matmul")
    b = torch.empty(512, 512, dtype=torch.float16, device="meta")
    for name, (a, variant) in {
        "packed": (b, tma),
        "transposed": (b.t(), "vendor"),
        "broadcast": (b[:1].expand(512, 512), "vendor"),
        "odd rows": (torch.empty(512, 513, dtype=torch.float16, device="meta")[:, :512], "vendor"),
    }.items():
        assert tritonops.explain("matmul", a, b, device="sm_90-132").variant == variant, name


# TUN-13: triton-lang/triton#6547, #781, #2549; lucidrains/lion-pytorch#36; flagos-ai/FlagGems#3753


def test_tun_13_first_second_and_third_call_are_equal_and_inputs_stay_as_they_are(dev) -> None:
    torch.manual_seed(0)
    w = torch.zeros(50, 16, device=dev, requires_grad=True)
    ids = torch.randint(0, 50, (400,), device=dev)
    want = torch.bincount(ids, minlength=50)[:, None].expand(50, 16).float()
    kept = w.detach().clone(), ids.clone()
    for _ in range(3):
        w.grad = None
        tritonops.embedding(ids, w).sum().backward()
        assert torch.equal(w.grad, want)
    assert torch.equal(w.detach(), kept[0]) and torch.equal(ids, kept[1])
    operands = [torch.randn(8, 64, device=dev), torch.randn(64, 48, device=dev), torch.randn(64, device=dev)]
    kept = [t.clone() for t in operands]
    x, b, gain = operands
    calls = {
        "layer_norm": lambda: tritonops.layer_norm(x, gain, gain, 1e-5),
        "rms_norm": lambda: tritonops.rms_norm(x, gain),
        "matmul": lambda: tritonops.matmul(x, b, residual=x[:, :48]),
    }
    for name, call in calls.items():
        first, second, third = call(), call(), call()
        assert torch.equal(first, second) and torch.equal(second, third), name
        assert all(torch.equal(t, k) for t, k in zip(operands, kept, strict=True)), name


# TUN-20: triton-lang/triton#4002; sgl-project/sglang#472; pytorch/pytorch#173679


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system at hand")
def test_tun_20_a_cache_that_is_a_link_to_another_file_system(tables, tmp_path, monkeypatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as real:
        assert os.stat(real).st_dev != os.stat(tmp_path).st_dev
        (tmp_path / "link").symlink_to(real)
        monkeypatch.setenv("TRITONOPS_CACHE_DIR", str(tmp_path / "link"))
        monkeypatch.chdir(tmp_path)
        replaced = []
        original = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: replaced.append((a, b)) or original(a, b))
        path = store.table_path(tmp_path / "link", "layer_norm", GPU)
        table.write_atomically(path, table.dump(for_op("layer_norm", section(leaf(ROWS[0])))))
        ((temporary, target),) = replaced
        assert Path(temporary).parent == Path(target).parent == Path(real) / "layer_norm"
        got = tritonops.explain("layer_norm", (64, 1024), dtype=torch.float16, device="sm_90-132")
        assert (got.variant, got.table) == (ROWS[0], str(path))
        assert [p.name for p in (Path(real) / "layer_norm").iterdir()] == ["sm_90-132.json"]


def test_tun_20_a_replace_that_fails_leaves_the_old_table_and_no_other_file(tables, tmp_path, monkeypatch) -> None:
    path = put(tables, GOOD, GPU, "layer_norm")

    def crossing(a: str, b: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", crossing)
    with pytest.raises(OSError, match="cross-device"):
        table.write_atomically(path, b"new")
    assert path.read_bytes() == GOOD and [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), OSError(errno.ESTALE, "Stale file handle")])
@pytest.mark.parametrize("when", ["open", "read"])
def test_tun_20_a_table_that_vanishes_while_it_is_opened_is_a_miss(tables, monkeypatch, error, when) -> None:
    put(tables, GOOD, GPU, "layer_norm")
    name = {"open": "open", "read": "fstat"}[when]
    original = getattr(os, name)

    def once(*args, **kwargs):
        monkeypatch.setattr(os, name, original)
        raise error

    monkeypatch.setattr(os, name, once)
    x = torch.randn(4, 8)
    with Heard() as heard:
        assert torch.equal(tritonops.layer_norm(x), F.layer_norm(x, (8,)))
    assert len(heard) == 1 and heard[0].startswith("tritonops: no dispatch table for")
    tritonops.clear_cache()
    assert tritonops.explain("layer_norm", x).rule == "table"


# INT-24: triton-lang/triton#10331; vllm-project/vllm#45949


@pytest.fixture
def gb10(clean, monkeypatch) -> DeviceInfo:  # noqa: F811
    """NVIDIA GB10 as its driver describes it."""
    properties = SimpleNamespace(
        name="NVIDIA GB10", major=12, minor=1, multi_processor_count=48, shared_memory_per_block_optin=101376
    )
    device._cuda_info.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    yield device.device_info(torch.device("cuda", 0))
    device._cuda_info.cache_clear()


CALLS = {
    "layer_norm": ((1024, 4096), (4096,), (4096,)),
    "layer_norm_backward": ((1024, 4096), (4096,), (4096,)),
    "matmul": ((1024, 4096), (4096, 1024)),
    "embedding": ((1024,), (5000, 4096)),
}


@pytest.mark.parametrize("op", CALLS)
def test_int_24_a_new_architecture_gets_a_default_that_fits_it(gb10, tmp_path, monkeypatch, op) -> None:
    assert (gb10.arch, gb10.sms, gb10.shared_bytes) == ("sm_121", 48, 101376)
    monkeypatch.setenv("TRITONOPS_TABLE_DIR", str(tmp_path))
    for other in (GPU, cuda("NVIDIA B200", "sm_100", 148), cuda("NVIDIA RTX 5090", "sm_120", 170)):
        put(tmp_path, for_op(op, section(leaf(*list(REGISTRY[op].variants())[1:])), gpu=other), other, op)
    pretend(monkeypatch, gb10)
    with Heard() as heard:
        got = tritonops.explain(op, *CALLS[op], dtype=torch.bfloat16, device="cuda:0")
        with tritonops.use(exclude="vendor"):
            ours = tritonops.explain(op, *CALLS[op], dtype=torch.bfloat16, device="cuda:0")
    assert (got.variant, got.rule, got.device) == ("vendor", "no table", gb10)  # no other architecture's table is used
    assert len(heard) == 1 and "no dispatch table for NVIDIA GB10 (sm_121-48)" in heard[0]
    assert ours.variant != "vendor" and not REGISTRY[op].variants()[ours.variant].needs & {"cluster"}


@pytest.mark.static
@pytest.mark.parametrize("op", CALLS)
def test_int_24_ours_compile_for_it_within_its_shared_memory(clean, op) -> None:  # noqa: F811
    from tritonops.toolchain.compile import AssemblerError, compile_variant

    with tritonops.use(exclude="vendor"):
        got = tritonops.explain(op, *CALLS[op], dtype=torch.bfloat16, device="sm_121-48")
    try:
        made = compile_variant(REGISTRY[op], REGISTRY[op].variants()[got.variant], got.problem, "sm_121-48")
    except AssemblerError as error:
        pytest.skip(f"this Triton's ptxas does not know sm_121: {error}")
    assert made and max(c.shared for c in made) <= 101376 and {c.target for c in made} == {"sm_121"}


# SHP-12: flagos-ai/FlagGems#2489, #4471; SHP-13: triton-lang/triton#10927, #10931: the chooser's part


def _misaligned() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    base = torch.empty(20000, dtype=torch.float16)
    b = torch.empty(64, 64, dtype=torch.float16)
    made = {
        "gap": (torch.as_strided(base, (64, 64), (65, 1)), b),
        "odd": (torch.as_strided(base, (64, 64), (64, 1), 1), b),
        "tr": (torch.as_strided(base, (64, 66), (66, 1)).t(), b),
        "both": (torch.as_strided(base, (64, 64), (131, 2)), b),
    }
    made |= {f"{name}, on the right": (right[:64, :64].clone(), right[:64, :64]) for name, (right, _) in made.items()}
    for k in (505, 507, 511, 513, 519):
        made[f"K = {k}"] = (torch.empty(256, k, dtype=torch.bfloat16), torch.empty(k, 256, dtype=torch.bfloat16))
    for k in (125, 127, 129, 131):
        made[f"K = {k}, float32"] = (torch.empty(256, k), torch.empty(k, 256))
    return made


@pytest.mark.parametrize("name", _misaligned())
def test_shp_12_and_13_no_descriptor_for_operands_off_sixteen_bytes(tables, name) -> None:
    tma = [v for v in REGISTRY["matmul"].variants() if v.startswith("tma_persistent/")]
    put(tables, for_op("matmul", section(leaf(*tma, "vendor"))), GPU, "matmul")
    a, b = _misaligned()[name]
    got = tritonops.explain("matmul", a, b, device="sm_90-132")
    assert got.variant == "vendor"
    assert {why for v, why in got.rejected if v in tma} <= {
        "descriptors need one unit stride and rows that do not overlap",
        "descriptors need pointers and row strides that are multiples of 16 bytes",
    } | {why for _, why in got.rejected if "shared memory" in why}
    with tritonops.use(variant="tma_persistent"), pytest.raises(tritonops.VariantUnavailable, match="descriptors need"):
        tritonops.explain("matmul", a, b, device="sm_90-132")
