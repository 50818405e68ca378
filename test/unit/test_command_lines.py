"""Exit codes of all tools: 2 for what is wrong with a command line by itself, 1 for what is wrong with what it names."""

import pytest

from topo_opt.tools import hw, opt, run
from topo_opt.tuning import kernel_ir, prepared, ship

MODEL = ["model.pt2"]
SEVERAL = [*MODEL, "--mesh", "x=2", "--topology", "cpu"]
CALIBRATE = ["calibrate", "--topology", "cpu"]
TILES = ["problems.json", "--topology", "h200-x1"]
WRONG = [
    (opt, [*MODEL, "-O9"], "argument -O: invalid choice: 9"),
    (opt, [*MODEL, "-Ofast"], "argument -O: invalid int value: 'fast'"),
    (opt, [*MODEL, "--jobs", "x"], "unrecognized arguments: --jobs x"),
    (opt, [*MODEL, "--emit=ptx"], "argument --emit: invalid choice: 'ptx'"),
    (opt, [*MODEL, "--bucket", "batch=many"], "'batch=many' is not a bucket"),
    (opt, [*MODEL, "--bucket", "b=1", "--bucket", "b=2"], "dim 'b' has two buckets"),
    (opt, ["f=a.pt2", "f=b.pt2"], "two models are called 'f'"),
    (opt, ["1st=a.pt2"], "'1st' cannot be the name of a function"),
    (opt, ["a.pt2", "b.mlir"], "'b.mlir' is not a .pt2 file"),
    (opt, [*MODEL, "-p", "cse"], "-p is for MLIR input"),
    (opt, [*MODEL, "--tuning-time", "soon"], "argument --tuning-time: invalid float value: 'soon'"),
    (opt, [*MODEL, "--tuning-time", "-1"], "a time limit of -1.0 s for tuning"),
    (opt, [*SEVERAL, "--memory-limit", "80G"], "argument --memory-limit: invalid int value: '80G'"),
    (opt, [*SEVERAL, "--memory-limit", "0"], "--memory-limit 0: expected bytes above 0"),
    (opt, [*SEVERAL, "--pin", "w"], "'w' is no pin of a sharding"),
    (opt, [*SEVERAL, "--pin", "w=a-b"], "'a-b' in 'w=a-b' is no axis"),
    (opt, [*MODEL, "--pin", "w=x"], "--pin is for models that are split over devices"),
    (opt, ["{model}", "--topology", "cpu", "--mesh", "x"], "'x' is no axis of a mesh"),
    (opt, ["{model}", "--topology", "cpu", "--mesh", "x=2,x=2"], "mesh 'x=2,x=2'"),
    (opt, ["{model}", "--topology", "cpu", "--mesh", "x=2", "--shard", "w"], "'w' does not say how"),
    (opt, ["{model}", "--topology", "cpu", "--shard", "w=x"], "no mesh was given"),
    (opt, ["{mlir}", "--strict"], "--strict is for models"),
    (opt, ["{mlir}", "-p", "cse("], "error: "),
    (opt, ["{mlir}", "-p", "topo-no-such-pass"], "'topo-no-such-pass'"),
    (opt, ["{mlir}", "-p", "topo-choose-tiles{tune=fast}"], "is 'fast'"),
    (opt, ["{mlir}", "-p", "cse", "--pass-pipeline", "builtin.module(cse)"], "both --pass-pipeline and -p"),
    (opt, ["{mlir}", "--mlir-print-ir-after=cs"], "--mlir-print-ir-after: there is no pass 'cs'"),
    (opt, ["a.mlir", "b.mlir"], "2 inputs were given"),
    (run, [], "required: BUNDLE"),
    (run, ["b", "--timeout", "long"], "argument --timeout: invalid float value: 'long'"),
    (run, ["b", "--timeout", "0"], "--timeout is 0, expected seconds above 0"),
    (run, ["b", "--timeout", "nan"], "--timeout is nan, expected seconds above 0"),
    (run, ["b", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
    (run, ["b", "--bucket", "batch"], "--bucket takes DIM=SIZE, not 'batch'"),
    (run, ["b", "--device", "toaster"], "'toaster' is not a device"),
    (run, ["b", "--compare", "eager"], "--compare says what --bench times"),
    (run, ["b", "--bench", "--compare", "jax"], "--compare does not know 'jax'"),
    (run, ["b", "--page", "times.html"], "--page shows what --bench measures"),
    (run, ["b", "--bench", "--page", "-"], "--page is '-', expected a file"),
    (hw, ["draw"], "invalid choice: 'draw'"),
    (hw, ["list", "--devices", "--links"], "not allowed with argument"),
    (hw, ["import", "dump.txt", "--name", "9 lives", "-o", "-"], "'9 lives' cannot name a topology"),
    (hw, [*CALIBRATE, "--repeats", "some"], "argument --repeats: invalid int value: 'some'"),
    (hw, [*CALIBRATE, "--repeats", "1"], "--repeats 1: quartiles need at least 4"),
    (hw, [*CALIBRATE, "--sizes", "8K,big"], "--sizes 8K,big: bytes from 64"),
    (hw, [*CALIBRATE, "--groups", "1"], "--groups 1: numbers from 2 on"),
    (hw, [*CALIBRATE, "--devices", "cpu0,cpu0"], "a device is named twice"),
    (kernel_ir, ["k.mlir", "--tune", "fast"], "argument --tune: invalid choice: 'fast'"),
    (kernel_ir, ["k.mlir", "--tuning-time", "0"], "a time limit of 0.0 s for tuning"),
    (prepared, [*TILES, "--tuning-time", "x"], "argument --tuning-time: invalid float value: 'x'"),
    (prepared, [*TILES, "--tuning-time", "-2"], "a time limit of -2.0 s for tuning"),
    (ship, ["cache"], "required: --device, -o"),
]
ABSENT = [
    (opt, MODEL, "model.pt2 does not exist"),
    (opt, ["absent.mlir"], "absent.mlir: No such file or directory"),
    (opt, ["{model}", "--topology", "abacus"], "there is no topology 'abacus'"),
    (opt, ["{model}", "--topology", "h200-x2", "--mesh", "x=4"], "does not fit a machine with 2"),
    (run, ["b"], "there is no bundle at b"),
    (hw, ["show", "abacus"], "there is no topology 'abacus'"),
    (hw, ["import", "dump.txt"], "dump.txt: No such file or directory"),
    (hw, [*CALIBRATE, "--groups", "2"], "--groups 2: 1 devices are measured"),
    (kernel_ir, ["k.mlir"], "k.mlir: No such file or directory"),
    (kernel_ir, ["{text}"], "bad.mlir:1:7: error: expected operation name"),
    (prepared, ["problems.json"], "problems.json has no tuning problems"),
    (ship, ["absent.json", "--device", "nvidia-h200-sxm", "-o", "tiles.json"], "absent.json"),
]


@pytest.fixture
def ended(tmp_path, monkeypatch, capfd):
    """Runs a tool where there is an empty model and an empty MLIR file; its exit code and what it said, files by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.pt2").write_bytes(b"")
    (tmp_path / "good.mlir").write_text("module {}")
    (tmp_path / "bad.mlir").write_text("module {")

    def end(tool, words):
        names = {"{model}": "empty.pt2", "{mlir}": "good.mlir", "{text}": "bad.mlir"}
        try:
            code = tool.main([names.get(word, word) for word in words])
        except SystemExit as exit:
            code = exit.code
        out, err = capfd.readouterr()
        return code, out, err

    return end


@pytest.mark.parametrize(("tool", "words", "said"), WRONG)
def test_a_command_line_that_does_not_parse_ends_with_2(ended, tool, words, said):
    code, out, err = ended(tool, words)
    assert (code, out) == (2, "")
    assert [said in line for line in err.splitlines() if "error: " in line] == [True]


@pytest.mark.parametrize(("tool", "words", "said"), ABSENT)
def test_what_a_command_line_names_and_cannot_be_used_ends_with_1(ended, tool, words, said):
    code, _, err = ended(tool, words)
    assert code == 1
    assert said in err and "error: " in err and "Traceback" not in err
