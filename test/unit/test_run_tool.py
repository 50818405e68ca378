"""topo-run: what it prints, and that every mistake is one line."""

import json

import pytest
import safetensors.torch
import test_bundle
import torch

import topo_opt
from topo_opt.tools import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(test_bundle.write(tmp_path_factory.mktemp("run") / "bundle"))


def output(capsys, *arguments):
    code = run.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_passes_and_names_every_result(folder, capsys):
    code, out, _ = output(capsys, folder, "--device", "cpu", "--random-weights", 1, "--check")
    assert code == 0 and "check passed" in out
    assert all(name in out for name in ("output 0", "output 1", "cache", "2 weights are random (seed 1)"))


def test_check_fails_on_a_wrong_kernel(tmp_path, capsys):
    wrong = test_bundle.SOURCES | {"k_add": test_bundle.SOURCES["k_add"].replace("a + b", "a - b")}
    built = test_bundle.samples.build(test_bundle.samples.CACHE_IR, test_bundle.samples.CACHE_KERNELS)
    folder = test_bundle.write_bundle(tmp_path / "b", built, wrong, aten=test_bundle.ATEN)
    code, out, _ = output(capsys, folder, "--device", "cpu", "--random-weights", 1, "--check")
    assert code == 1 and "check FAILED" in out and "times eager's error" in out


def test_check_is_not_passed_by_falling_back(tmp_path, capsys):
    broken = test_bundle.SOURCES | {
        "k_add": test_bundle.SOURCES["k_add"].replace("tl.store(out", "tl.store(out + 99")
    }
    built = test_bundle.samples.build(test_bundle.samples.CACHE_IR, test_bundle.samples.CACHE_KERNELS)
    folder = test_bundle.write_bundle(tmp_path / "b", built, broken, aten=test_bundle.ATEN)
    code, _, err = output(capsys, folder, "--device", "cpu", "--random-weights", 1, "--check")
    assert code == 1 and "after it had changed state" in err and err.count("\n") == 1


def test_kernels_lists_launches_and_memory_without_weights(folder, capsys):
    code, out, _ = output(capsys, folder, "--kernels")
    assert code == 0 and out.startswith("4 kernels, 4 launches") and "k_update" in out
    assert "without reuse" in out


def test_bench_compares(folder, capsys, monkeypatch):
    from topo_opt.tools import run_bench

    monkeypatch.setattr(run_bench, "BENCH_S", 0.02)
    arguments = ("--device", "cpu", "--random-weights", 1, "--bench", "--compare", "eager")
    code, out, _ = output(capsys, folder, *arguments)
    assert code == 0 and "topo-opt" in out and "eager" in out and "4 launches" in out


def test_given_inputs_and_weights_are_used(folder, capsys, tmp_path):
    safetensors.torch.save_file(
        {"x": torch.full((1, 8), 2.0), "pos": torch.tensor([3])}, tmp_path / "inputs.safetensors"
    )
    safetensors.torch.save_file(
        {"bias": torch.zeros(1, 8), "cache": torch.zeros(4, 8)}, tmp_path / "weights.safetensors"
    )
    code, out, _ = output(
        capsys, folder, "--device", "cpu", "--inputs", tmp_path / "inputs.safetensors",
        "--weights", tmp_path / "weights.safetensors",
    )  # fmt: skip
    assert code == 0 and "output 1: float32[], mean magnitude 48" in out and "random" not in out


@pytest.mark.parametrize(
    ("names", "message"),
    [(["x"], "has no 'pos'"), (["x", "pos", "input"], "has 'input'")],
    ids=["missing", "unknown"],
)
def test_given_inputs_are_those_that_the_function_takes(folder, capsys, tmp_path, names, message):
    tensors = {"x": torch.ones(1, 8), "pos": torch.tensor([3]), "input": torch.ones(1, 8)}
    safetensors.torch.save_file({n: tensors[n] for n in names}, tmp_path / "i.safetensors")
    code, _, err = output(
        capsys,
        folder,
        "--device",
        "cpu",
        "--random-weights",
        1,
        "--inputs",
        tmp_path / "i.safetensors",
        "--check",
    )
    assert code == 1 and message in err and err.count("\n") <= 2


def test_strict_refuses_operators_left_to_aten(tmp_path, capsys):
    model = torch.nn.ConvTranspose1d(2, 2, 3).eval()
    topo_opt.compile(model, (torch.randn(1, 2, 5),), topology="cpu", out=tmp_path / "b")
    code, _, err = output(capsys, tmp_path / "b", "--device", "cpu", "--strict", "--check")
    assert code == 1 and "left to ATen: 1 x aten.convolution" in err
    assert output(capsys, tmp_path / "b", "--device", "cpu", "--check")[0] == 0


MISTAKES = [
    (["{none}"], "there is no bundle at"),
    (["{b}", "--device", "cpu"], "is not in the bundle"),
    (
        ["{b}", "--device", "cpu", "--random-weights", "1", "--function", "prefill"],
        "there is no function 'prefill'",
    ),
    (["{b}", "--device", "cpu", "--random-weights", "1", "--bucket", "batch=3"], "no variant has batch=3"),
    (
        ["{b}", "--device", "cpu", "--random-weights", "1", "--inputs", "{none}"],
        "can't be read as a safetensors file",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistakes_are_one_line(folder, capsys, tmp_path, arguments, message):
    filled = [a.format(b=folder, none=tmp_path / "none") for a in arguments]
    code, _, err = output(capsys, *filled)
    assert code == 1 and err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_no_gpu_is_one_line(folder, capsys):
    code, _, err = output(capsys, folder, "--device", "cuda")
    assert code == 1 and "torch sees no GPU" in err and err.count("\n") == 1


def test_a_damaged_bundle_is_one_line(tmp_path, capsys):
    folder = test_bundle.write(tmp_path / "b")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest)[:-9])
    code, _, err = output(capsys, folder, "--device", "cpu")
    assert code == 1 and "manifest.json is not valid JSON" in err and err.count("\n") == 1
