"""Mutated MLIR, as text and as bytecode: `topo-opt` answers with IR or with diagnostics, whatever MLIR itself does."""

import faulthandler
import io
import json
import os
import random
import re
import resource
import signal
import time

import pytest
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.errors import TopoError
from topo_opt.tools import opt, opt_mlir

TEXT = """
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m)>
func.func private @aten.0(tensor<4x8xf32>) -> tensor<4x8xf32> attributes {topo.aten = "aten.sort.values", topo.call = "{}", topo.reason = "r"}
func.func @main(%x: tensor<4x8xbf16> {topo.kind = "input", topo.name = "x", topo.dtype = "bfloat16"},
                %c: tensor<1x2x16x8xbf16> {topo.kind = "buffer", topo.name = "c", topo.dtype = "bfloat16"},
                %i: tensor<4xi64> {topo.kind = "input", topo.name = "i", topo.dtype = "int64"})
    -> (tensor<4xf32> {topo.kind = "output", topo.name = "0", topo.dtype = "float32"})
    attributes {topo.function = "main", topo.bucket = {batch = 4 : i64}} {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x8xf32>
  %0 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x8xbf16>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%a: bf16, %o: f32):
    %w = arith.extf %a : bf16 to f32
    %m = math.exp %w : f32
    linalg.yield %m : f32
  } -> tensor<4x8xf32>
  %1 = func.call @aten.0(%0) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %d = "topo.demote"(%1) : (tensor<4x8xf32>) -> tensor<4x8xbf16>
  %s = tensor.expand_shape %d [[0, 1, 2], [3]] output_shape [1, 1, 4, 8] : tensor<4x8xbf16> into tensor<1x1x4x8xbf16>
  %t = tensor.concat dim(1) %s, %s : (tensor<1x1x4x8xbf16>, tensor<1x1x4x8xbf16>) -> tensor<1x2x4x8xbf16>
  %u = "topo.index_update"(%c, %t, %i) {dim = 2 : i64} : (tensor<1x2x16x8xbf16>, tensor<1x2x4x8xbf16>, tensor<4xi64>) -> tensor<1x2x16x8xbf16>
  %v = "topo.attention"(%t, %u, %u) {scale = 0.5 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>}
      : (tensor<1x2x4x8xbf16>, tensor<1x2x16x8xbf16>, tensor<1x2x16x8xbf16>) -> tensor<1x2x4x8xbf16>
  %r = tensor.empty() : tensor<4xf32>
  %f = linalg.fill ins(%zero : f32) outs(%r : tensor<4xf32>) -> tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]}
      ins(%1 : tensor<4x8xf32>) outs(%f : tensor<4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %p = arith.addf %a, %o : f32
    linalg.yield %p : f32
  } -> tensor<4xf32>
  return %y : tensor<4xf32>
}
"""
PIPELINE = "topo-verify-structured,cse,canonicalize,topo-form-kernels,topo-mark-inout,topo-choose-tiles"
COUNT = 1000
SECONDS = 10
BYTES = 2 << 30


@pytest.fixture(autouse=True)
def no_stack_dumps():
    """pytest prints the stack of whatever dies of a signal; here that is expected."""
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if was_enabled:
        faulthandler.enable()


@pytest.fixture(scope="module")
def seeds():
    module = ir.Module.parse(TEXT, dialects.load(ir.Context()))
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return TEXT.encode(), buffer.getvalue()


def mutate(rng, data):
    """Byte flips, cuts, repeats, exchanged words and strange numbers."""
    out = bytearray(data)
    words = [m.span() for m in re.finditer(rb"[A-Za-z0-9_.%@#]+", bytes(out))]
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(out))
        kind = rng.randrange(6)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at : at + rng.randint(1, 30)]
        elif kind == 2:
            out[at:at] = out[at : at + rng.randint(1, 60)]
        elif kind == 3:
            (a, b), (c, d) = rng.choice(words), rng.choice(words)
            out[a:b] = data[c:d]
        elif kind == 4:
            numbers = [m.span() for m in re.finditer(rb"\d+", bytes(out))] or [(at, at + 1)]
            a, b = rng.choice(numbers)
            out[a:b] = rng.choice(
                [b"0", b"1", b"-1", b"7", b"9223372036854775807", b"99999999999999999999", b"?"]
            )
        else:
            out = out[: rng.randrange(1, len(out) + 1)]
        if not out:
            return b"x"
    return bytes(out)


def arguments():
    return opt._parser().parse_args(["-", "-p", PIPELINE])


def verdict(data, given):
    """How one input ends: "ok", "diagnosed", or what went wrong."""
    start = time.monotonic()
    try:
        opt_mlir._optimize(given, "fuzz.mlir", data, opt_mlir._pipeline(given, data))
        result = "ok"
    except TopoError as error:
        result = "diagnosed" if error.render() else "an empty diagnostic"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    return f"took {seconds:.0f} s" if seconds > SECONDS else result


def in_child(inputs):
    """Verdicts of the inputs in order; fewer when the child died of the one behind the last."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        given = arguments()
        # All in one context: making it takes forty times as long as an input.
        context = opt_mlir._context(given)
        opt_mlir._context = lambda _: context
        for data in inputs:
            os.write(write, (json.dumps(verdict(data, given)) + "\n").encode())
        os._exit(0 if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < BYTES else 3)
    os.close(write)
    with os.fdopen(read) as stream:
        verdicts = [json.loads(line) for line in stream]
    return verdicts, os.waitpid(child, 0)[1]


def test_the_seeds_are_good(seeds):
    for data in seeds:
        assert verdict(data, arguments()) == "ok"


@pytest.mark.parametrize("form", [0, 1], ids=["text", "bytecode"])
def test_mutated_input_gives_ir_or_diagnostics(seeds, form, tmp_path, capfd):
    rng = random.Random(form)
    waiting = [mutate(rng, seeds[form]) for _ in range(COUNT // 2)]
    seen, deaths = [], 0
    while waiting:
        verdicts, status = in_child(waiting)
        seen += verdicts
        waiting = waiting[len(verdicts) :]
        if not waiting:
            assert status == 0, "more than 2 GiB were used"
            break
        # MLIR itself died of this one. The command must not: it says so in one line.
        assert os.WIFSIGNALED(status), status
        deaths += 1
        path = tmp_path / "deadly.mlir"
        path.write_bytes(waiting.pop(0))
        assert opt.main([str(path), "-p", PIPELINE, "-o", os.devnull]) == 1
        message = capfd.readouterr().err.strip().splitlines()[-1]
        assert re.match(
            rf"error: .*deadly.mlir: MLIR died with {signal.Signals(os.WTERMSIG(status)).name}", message
        )
    assert set(seen) <= {"ok", "diagnosed"}, [v for v in seen if v not in ("ok", "diagnosed")][:5]
    assert seen.count("diagnosed") > COUNT // 10
    assert deaths < COUNT // 20
