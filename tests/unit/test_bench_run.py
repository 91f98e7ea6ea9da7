"""The benchmark runner with timers that say what they are told: resuming, files, arguments."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
import torch

from bench_cases import ENVIRONMENT, Fake, FakeMachine, FakeTorch, one
from benchmarks import bench, results, run, runner
from benchmarks.contender import ContextLost
from benchmarks.entries import of_suite
from benchmarks.providers import make
from benchmarks.results import Results, ResultsError, entry_key, to_csv
from tritonops.device import DeviceInfo


def measured(providers, entry=None, machine=None, mode="graph", **more):
    found = bench.measure(entry or one(), [FakeTorch(), *providers], machine or FakeMachine(), mode, **more)
    return {row["provider"]: row for row in found}


def results_at(path, **environment):
    return Results(path, "python -m benchmarks.run", ENVIRONMENT | environment)


def three():
    return [one(f"{n}x{n}x{n}") for n in (16, 32, 48)]


def test_a_run_goes_on_after_it_was_killed(tmp_path) -> None:
    path = tmp_path / "deep" / "r.json"
    planned = runner.plan(three(), [FakeTorch(), Fake()])

    class Killed(FakeMachine):
        def case(self):
            super().case()
            if self.log.count("case") == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(planned, Killed(), "graph", results_at(path))
    before = results.read(path)["rows"]
    assert [r["shape"]["M"] for r in before] == [16, 16, 32, 32]
    again, machine = results_at(path, date="later"), FakeMachine()
    again.resume()
    assert runner.run(planned, machine, "graph", again) == 0
    assert machine.log.count("case") == 1
    top = results.read(path)
    assert top["schema"] == 1 and top["environment"]["gpu"] == "Fake GPU" and top["command"]
    assert [r["shape"]["M"] for r in top["rows"]] == [16, 16, 32, 32, 48, 48] and top["rows"][:4] == before
    assert not list(path.parent.glob(".*.tmp"))


def test_another_mode_or_a_further_provider_is_measured_beside_what_is_there(tmp_path) -> None:
    path = tmp_path / "r.json"
    first = results_at(path)
    runner.run(runner.plan(three()[:1], [FakeTorch(), Fake("a")]), FakeMachine(), "graph", first)
    again = results_at(path)
    again.resume()
    runner.run(runner.plan(three()[:1], [FakeTorch(), Fake("b")]), FakeMachine(), "graph", again)
    runner.run(runner.plan(three()[:1], [FakeTorch()]), FakeMachine(), "eager", again)
    assert [(r["provider"], r["mode"]) for r in results.read(path)["rows"]] == [
        ("torch", "graph"), ("a", "graph"), ("b", "graph"), ("torch", "eager")
    ]  # fmt: skip


def test_other_versions_are_not_continued(tmp_path) -> None:
    path = tmp_path / "r.json"
    results_at(path, providers={"liger-kernel": "0.8.5"}).write()
    with pytest.raises(ResultsError, match=r"made otherwise \(torch: 2 then, 3 now\)"):
        results_at(path, torch="3").resume()
    with pytest.raises(ResultsError, match="providers"):
        results_at(path, providers={"liger-kernel": "0.8.6"}).resume()
    more = results_at(path, providers={"quack-kernels": "0.6.5"})
    more.resume()
    assert more.environment["providers"] == {"liger-kernel": "0.8.5", "quack-kernels": "0.6.5"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "environment": {}}',
                                  '{"schema": 1, "environment": {}, "rows": [{}]}', "[" * 100000])  # fmt: skip
def test_a_damaged_file_is_refused_by_name(tmp_path, text) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="r.json"):
        results.read(path)


def test_the_budget_ends_between_entries() -> None:
    now = iter((0.0, 5.0, 11.0, 20.0))
    found = results_at(None)
    left = runner.run(runner.plan(three(), [FakeTorch()]), FakeMachine(), "graph", found, deadline=10.0,
                      clock=lambda: next(now))  # fmt: skip
    assert left == 1 and [r["shape"]["M"] for r in found.rows] == [16, 32]


def test_a_provider_that_breaks_the_context_is_on_file_and_left_out_next_time(tmp_path) -> None:
    path, machine = tmp_path / "r.json", FakeMachine()

    def illegal(out, args):
        machine.dead = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    entry = one()
    providers = [FakeTorch(), Fake("bad", wrong=illegal), Fake("good")]
    with pytest.raises(ContextLost, match="bad broke the CUDA context on matmul fwd"):
        runner.run(runner.plan([entry], providers), machine, "graph", results_at(path))
    assert [(r["provider"], r["failed"][:22]) for r in results.read(path)["rows"]] == [
        ("bad", "broke the CUDA context")
    ]
    again = results_at(path)
    again.resume()
    assert runner.run(runner.plan([entry], providers), FakeMachine(), "graph", again) == 0
    found = again.of(entry_key(entry, "graph"))
    assert found["good"]["ms"] == 1.0 and set(found) == {"torch", "bad", "good"}
    assert found["bad"]["failed"].startswith("broke the CUDA context: ")


def test_a_plan_leaves_out_what_a_provider_does_not_have_and_says_how_often() -> None:
    found = [*three(), one("8x64", "layer_norm", "bwd")]
    planned = runner.plan(found, [FakeTorch(), make("liger"), make("compile-max-autotune"), make("library")])
    assert [[p.name for p in ps] for _, ps in planned.work] == [["torch", "compile-max-autotune", "library"]] * 3 + [
        ["torch", "liger"]
    ]
    assert planned.skipped["liger"] == {"has no matmul": 3}
    assert planned.skipped["library"] == {"has no layer_norm_backward": 1}
    many = [one(f"{n}x16x16") for n in range(1, 21)]
    planned = runner.plan(many, [FakeTorch(), make("compile-max-autotune")])
    assert sum(len(ps) == 2 for _, ps in planned.work) == 12
    assert planned.skipped == {"compile-max-autotune": {"runs on the first 12 shapes only": 8}}
    planned = runner.plan(of_suite("tutorial09-4k"), [FakeTorch(), make("compile-max-autotune")])
    assert [e.sizes["K"] for e, ps in planned.work if len(ps) == 2] == [128, 512, 4096]


def test_csv_has_a_line_a_row() -> None:
    found = [*measured([Fake(ms=0.5), Fake("bad", error=RuntimeError('a, "b"'))]).values()]
    lines = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [(r["provider"], r["shape"], r["ms"], r["ms_low"], r["verdict"], r["failed"]) for r in lines] == [
        ("torch", "64x64x64", "1.0", "1.0", "", ""),
        ("fake", "64x64x64", "0.5", "0.5", "win", ""),
        ("bad", "64x64x64", "", "", "", 'raised: RuntimeError: a, "b"'),
    ]


@pytest.fixture
def gpu(monkeypatch):
    """The command on a fake GPU: torch, fast, slow, bad and an absent provider."""
    machines: list[FakeMachine] = []

    def machine(device):
        machines.append(FakeMachine())
        machines[-1].monitor.driver = lambda: "1"
        return machines[-1]

    fakes = {"torch": FakeTorch(), "ours": Fake("ours", 0.5), "compile": Fake("compile", 2.0),
             "liger": Fake("liger", error=RuntimeError("no")), "quack": Fake("quack", absent="quack is not installed"),
             "flaggems": Fake("flaggems", 1.0), "tutorial": Fake("tutorial", wrong=lambda out, args: out + 1),
             "library": Fake("library", {"host": 1.026, "graph": 1, "eager": 1})}  # fmt: skip
    monkeypatch.setattr(run, "_gpu", lambda index: DeviceInfo("cuda", "sm_90", 132, 1, name="Fake GPU", index=0))
    monkeypatch.setattr(run, "CudaMachine", machine)
    monkeypatch.setattr(run, "environment", lambda *_: dict(ENVIRONMENT))
    monkeypatch.setattr(run, "make", lambda name: fakes[name] if name in fakes else make(name))
    return machines


def command(*words):
    out = io.StringIO()
    return run.main(list(words), out), out.getvalue()


def test_the_command(gpu, tmp_path, capsys) -> None:
    path, table = tmp_path / "r.json", tmp_path / "t" / "r.csv"
    words = ("--op", "matmul", "--shapes", "16x16x16,32x32x32", "--dtype", "fp32", "--out", str(path))
    code, text = command(*words, "--csv", str(table))
    assert code == 0
    top = results.read(path)
    assert top["environment"]["absent"] == {"quack": "quack is not installed"}
    assert len(top["rows"]) == 12 and len(table.read_text().splitlines()) == 13
    lines = text.splitlines()
    assert lines[1].split() == ["matmul", "fwd", "float32", "nt", "16x16x16", "graph", "torch", "1000", "1.000",
                                "(1.000-1.000)", *lines[1].split()[10:]]  # fmt: skip
    ours = next(line for line in lines if line.startswith(" ") and " ours " in line)
    assert "500" in ours and "2.000 (2.000-2.000)" in ours and "win" in ours
    assert any("liger" in line and "FAILED: raised: RuntimeError: no" in line for line in lines)
    assert any("tutorial" in line and "FAILED: output 0: relative error" in line for line in lines)
    assert "ours: 2 wins, 0 losses, 0 ties against torch, 2.000 x torch's speed in the geomean, worst 2.000" in lines
    assert "compile: 0 wins, 2 losses, 0 ties against torch, 0.500 x torch's speed in the geomean, worst 0.500" in lines
    assert "liger: 0 wins, 0 losses, 0 ties against torch; 2 could not be timed" in lines
    assert any(line.startswith("tutorial:") and line.endswith("2 wrong by the accuracy gate") for line in lines)
    assert "absent: quack: quack is not installed" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        command(*words)
    assert stop.value.code == 2 and "is there already; --resume goes on with it" in capsys.readouterr().err
    code, again = command(*words, "--resume")
    assert code == 0 and again == text and gpu[-1].log == []


def test_a_budget_of_nothing_measures_nothing(gpu, tmp_path, capsys) -> None:
    path = tmp_path / "r.json"
    code, text = command("--suite", "tutorial09-4k", "--num-inputs", "3", "--budget", "0", "--out", str(path))
    assert code == 0 and text == "" and results.read(path)["rows"] == []
    assert "the budget is spent, 3 shapes are left; go on with --resume" in capsys.readouterr().err


def test_input_id_and_num_inputs_choose_of_each_op_and_pass(gpu, tmp_path) -> None:
    path = tmp_path / "r.json"
    code, _ = command("--op", "layer_norm", "--shapes", "4x8,4x16,4x24,4x32", "--fwd", "--bwd", "--dtype", "fp32",
                      "--input-id", "1", "--num-inputs", "2", "--providers", "ours", "--out", str(path))  # fmt: skip
    assert code == 0
    found = [(r["pass"], r["shape"]["N"]) for r in results.read(path)["rows"] if r["provider"] == "ours"]
    assert sorted(found) == [("bwd", 16), ("bwd", 24), ("fwd", 16), ("fwd", 24)]


def test_overhead_is_timed_on_the_host_and_gives_the_yardstick(gpu, tmp_path) -> None:
    path = tmp_path / "r.json"
    code, text = command("--op", "overhead", "--out", str(path), "--dtype", "fp32")
    top = results.read(path)
    assert code == 0 and {r["mode"] for r in top["rows"]} == {"host"}
    assert {r["provider"] for r in top["rows"]} == {"torch", "library", "ours"}
    assert top["environment"]["library_us"] == 26.0
    assert "B, the host time of Library.impl around torch.mm less torch.mm's: 26.0 us" in text


def test_tutorial_arguments(gpu, tmp_path) -> None:
    path = tmp_path / "r.json"
    code, text = command("--suite", "tutorial09-8k", "--prec", "fp8", "--K_range", "512", "1024", "--K_step", "256",
                         "--providers", "ours", "--out", str(path))  # fmt: skip
    found = results.read(path)["rows"]
    assert code == 0 and [r["shape"]["K"] for r in found[::2]] == [512, 768, 1024]
    assert {r["failed"] for r in found} == {"fp8 is not in this version"} and text.count("FAILED: fp8 is not in") == 6


def test_metrics_choose_columns(gpu) -> None:
    words = ("--op", "matmul", "--shapes", "16x16x16", "--dtype", "fp32", "--providers", "ours", "--metrics")
    _, text = command(*words, "gbps")
    assert text.splitlines()[0].split() == ["provider", "GB/s"]
    assert text.splitlines()[2].split()[:2] == ["ours", f"{3 * 16 * 16 * 4 / 0.5 / 1e6:.0f}"]
    _, text = command(*words, "latency,accuracy")
    assert text.splitlines()[0].split() == ["provider", "us", "error", "torch's"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "--suite NAME or --shapes LIST|FILE is needed"),
        (["--op", "conv"], "invalid choice: 'conv'"),
        (["--op", "matmul", "--op", "embedding"], "for several ops"),
        (["--suite", "nothing"], "invalid choice: 'nothing'"),
        (["--op", "matmul", "--suite", "tritonbench-embedding"], "has no matmul, only embedding"),
        (["--op", "matmul", "--shapes", "64x64"], "'64x64' is no shape of matmul, which has MxNxK"),
        (["--shapes", "64x64"], "need --op"),
        (["--suite", "llm", "--shapes", "64x64"], "give one of them"),
        (["--op", "matmul", "--providers", "torch,nvidia"], "no provider 'nvidia'; providers: torch"),
        (["--op", "matmul", "--providers", "ours:nothing"], "'nothing' is no variant or family of any op"),
        (["--op", "matmul", "--providers", "liger:tiled"], "no provider 'liger:tiled'"),
        (["--op", "matmul", "--metrics", "speed"], "--metrics: 'speed' is not one of latency"),
        (["--op", "matmul", "--dtype", "int8"], "--dtype: 'int8' is not one of bf16"),
        (["--op", "matmul", "--num-inputs", "0"], "expected a number from 1, got '0'"),
        (["--op", "matmul", "--input-id", "99"], "--input-id 99: there are not so many shapes"),
        (["--op", "matmul", "--budget", "soon"], "expected a number from 0, got 'soon'"),
        (["--op", "matmul", "--budget", "nan"], "expected a number from 0"),
        (["--op", "embedding", "--K_range", "1", "2"], "go with --suite tutorial09-4k or tutorial09-8k"),
        (["--suite", "tutorial09-4k", "--K_range", "512", "128"], "512 to 128 is empty"),
        (["--suite", "tutorial09-4k", "--K_step", "128"], "--K_step needs --K_range"),
        (["--suite", "tutorial09-4k", "--prec", "fp16", "--dtype", "bf16"], "--prec and --dtype"),
        (["--op", "matmul", "--layout", "nn"], "--layout goes with --shapes LIST"),
        (["--op", "matmul", "--resume"], "--resume needs --out"),
        (["--op", "overhead", "--shapes", "64x64x64"], "--op overhead has a suite of its own"),
        (["--suite", "decode", "--bwd"], "suite decode has no bwd rows"),
    ],
)  # fmt: skip
def test_arguments_are_checked_at_once(words, why, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "_gpu", lambda index: pytest.fail("the GPU was asked before the arguments were checked"))
    with pytest.raises(SystemExit) as stop:
        run.main(words, io.StringIO())
    assert stop.value.code == 2 and why in " ".join(capsys.readouterr().err.split())


def test_a_suite_may_be_named_by_shapes(gpu, tmp_path) -> None:
    path = tmp_path / "r.json"
    code, _ = command("--op", "layer_norm", "--shapes", "overhead", "--providers", "ours", "--out", str(path),
                      "--dtype", "fp32")  # fmt: skip
    assert code == 0 and {r["suite"] for r in results.read(path)["rows"]} == {"overhead"}


def test_failures_of_the_run_are_one_sentence(gpu, tmp_path, capsys, monkeypatch) -> None:
    words = ("--op", "matmul", "--shapes", "16x16x16", "--dtype", "fp32", "--providers", "ours")
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _ = command(*words, "--out", str(blocked / "r.json"))
    assert code == 2 and capsys.readouterr().err.count("\n") == 1
    path = tmp_path / "r.json"
    path.write_text("{}")
    code, _ = command(*words, "--out", str(path), "--resume")
    assert code == 2 and "r.json: not a result file of schema 1" in capsys.readouterr().err
    code, text = command(*words, "--csv", str(blocked / "r.csv"))
    assert code == 2 and "win" in text

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.bench, "measure", interrupted)
    code, _ = command(*words, "--out", str(tmp_path / "other.json"))
    assert code == 130 and "interrupted; what was done is on file, go on with --resume" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence_and_exits_2() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.run", "--op", "matmul"], capture_output=True, text=True,
                          cwd=run.__file__.rpartition("/benchmarks/")[0])  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "benchmarks.run: there is no NVIDIA GPU here, and benchmarks need one\n"


def test_problems_of_a_file_that_differ_in_a_trait_are_two_entries(gpu, tmp_path) -> None:
    path, shapes = tmp_path / "r.json", tmp_path / "mine.json"
    row = {"op": "matmul", "M": 16, "N": 16, "K": 16, "dtype": "float32"}
    shapes.write_text(json.dumps([row, {**row, "traits": {"bias": True}}, {**row, "aligned": False}]))
    code, text = command("--shapes", str(shapes), "--providers", "ours", "--out", str(path))
    found = results.read(path)["rows"]
    assert code == 0 and len(found) == 6 and all(r["failed"] is None for r in found)
    assert [r.get("traits") for r in found[::2]] == [
        None, {"bias": True}, {"operands_aligned": False, "aligned": False}
    ]  # fmt: skip
    assert "bias=True 16x16x16" in text and '{""bias"": true}' in to_csv(found)
