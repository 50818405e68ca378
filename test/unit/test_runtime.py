"""runtime.program on the CPU: calls, state, weights, fallbacks, structure of arguments and results."""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import plan_samples as samples
import pytest
import test_bundle
import torch

from topo_opt.codegen.plan import VariantRequest
from topo_opt.errors import InputError, StrictError, TopoError
from topo_opt.runtime import interpreter, interpreter_floats, load, pytree
from topo_opt.runtime.interpreter import KernelError
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.steps import StepFailed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return test_bundle.write(tmp_path_factory.mktemp("runtime") / "bundle")


@pytest.fixture
def program(folder):
    return load(folder, "cpu", random_weights=3)


def expected(program, x, row, cache):
    cache = cache.clone()
    cache[row] = x[0] + program.memory.tensors["bias"][0]
    return cache, cache + 1, (cache + 1).sum()


def test_calls_update_the_state_and_results_are_kept(program):
    cache = torch.zeros(4, 8)
    kept = []
    for row in (2, 0, 2):
        x = torch.randn(1, 8)
        cache, out, total = expected(program, x, row, cache)
        kept.append((program.decode(x, torch.tensor([row])), out, total))
        assert torch.equal(program.state["cache"], cache)
    for got, out, total in kept:
        assert torch.equal(got[0], out)
        torch.testing.assert_close(got[1], total)
    assert not program.fallbacks
    program.state.reset()
    assert not program.state["cache"].any()
    assert list(program.state) == ["cache"] and dir(program).count("decode") == 1


def test_keyword_arguments_and_strided_inputs(program):
    x = torch.randn(8, 2)
    got = program(pos=torch.tensor([1]), x=x[:, :1].T)
    assert torch.equal(got[0][1], x[:, 0] + program.memory.tensors["bias"][0] + 1)


def test_another_shape_runs_as_aten_and_is_counted(program, caplog):
    got = program.decode(torch.ones(2, 8), torch.tensor([0, 3]))
    assert torch.equal(got[0][3], 2 + program.memory.tensors["bias"][0])
    assert torch.equal(program.state["cache"][0], 1 + program.memory.tensors["bias"][0])
    (reason,) = program.fallbacks
    assert reason == "x is float32[2, 8], it was compiled for float32[1, 8]"
    assert reason in caplog.text
    program.strict = True
    with pytest.raises(StrictError, match="compiled for float32"):
        program.decode(torch.ones(2, 8), torch.tensor([0, 3]))


WRONG = [
    ((torch.ones(8), torch.tensor([0])), r"x is float32\[8\]"),
    ((torch.ones(1, 8, dtype=torch.int64), torch.tensor([0])), r"x is int64\[1, 8\]"),
    ((torch.ones(1, 8), 0), "pos should be a tensor, not int"),
    ((torch.ones(1, 8),), "the argument 'pos' is missing"),
    ((torch.ones(1, 8), torch.tensor([0]), 3), "takes 2 arguments"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments_say_what_was_expected(program, arguments, message):
    with pytest.raises(InputError, match=message):
        program.decode(*arguments)


def test_another_device_is_named(program):
    with pytest.raises(InputError, match="x is on meta, the program runs on cpu"):
        program.decode(torch.ones(1, 8, device="meta"), torch.tensor([0]))


def test_weights_must_be_there_and_have_their_type(folder):
    with pytest.raises(InputError, match=r"the weight bias .* is not in the bundle"):
        load(folder, "cpu")
    with pytest.raises(InputError, match=r"bias is float64\[1, 8\], the bundle was compiled for float32"):
        load(folder, "cpu", weights={"bias": torch.ones(1, 8).double()}, random_weights=0)
    bias = torch.full((1, 8), 5.0)
    program = load(folder, "cpu", weights={"bias": bias, "cache": torch.ones(4, 8)})
    program.decode(torch.zeros(1, 8), torch.tensor([0]))
    assert program.state["cache"][:, 0].tolist() == [5, 1, 1, 1]
    program.state.reset()
    assert program.state["cache"].eq(1).all()


def test_random_weights_are_reproducible(folder):
    a, b, c = (load(folder, "cpu", random_weights=s).memory.tensors["bias"] for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_failing_step_falls_back_before_state_changed_and_raises_after(program, monkeypatch):
    real = interpreter.launch

    def failing(name):
        def launch(function, *rest):
            if function.__name__ == name:
                raise KernelError("it broke")
            real(function, *rest)

        return launch

    monkeypatch.setattr(interpreter, "launch", failing("k_add1"))
    program.decode(torch.ones(1, 8), torch.tensor([0]))
    assert dict(program.fallbacks) == {"kernel k_add1: it broke": 1}
    monkeypatch.setattr(interpreter, "launch", failing("k_add"))
    with pytest.raises(TopoError, match="after it had changed state"):
        program.decode(torch.ones(1, 8), torch.tensor([0]))


def test_a_kernel_that_fails_half_way_leaves_no_dirt_in_the_zeroed_scratch(program, monkeypatch):
    real = interpreter.launch

    def dirty(function, *rest):
        real(function, *rest)
        if function.__name__ == "k_sum":
            program.memory.zeroed(0).fill_(1)
            raise KernelError("it broke")

    x, row = torch.ones(1, 8), torch.tensor([0])
    _, total = program.decode(x, row)
    with monkeypatch.context() as patch, pytest.raises(TopoError, match="it broke"):
        patch.setattr(interpreter, "launch", dirty)
        program.decode(x, row)
    assert torch.equal(program.decode(x, row)[1], total)


@pytest.mark.parametrize(
    "assembly, message", [("griddepcontrol.wait; // $0", None), ("brkpt; // $0", "no assembly: brkpt")]
)
def test_of_assembly_the_interpreter_runs_a_wait_for_the_kernel_in_front_alone(assembly, message):
    source = f"""import triton
import triton.language as tl


@triton.jit
def k(out):
    tl.inline_asm_elementwise("{assembly}", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out, 3)
"""
    out = torch.zeros(1, dtype=torch.int32)
    with interpreter.interpreting(), contextlib.ExitStack() as stack:
        if message:
            stack.enter_context(pytest.raises(KernelError, match=message))
        interpreter.launch(load_function(source, "k.py", "k"), (1, 1, 1), {"out": out}, [out])
    assert out.item() == (0 if message else 3)


def test_an_access_outside_a_buffer_is_an_error_not_a_crash(folder):
    program = load(folder, "cpu", random_weights=0, strict=True)
    with pytest.raises(StrictError, match="kernel k_update: it stores 8 of 8 elements outside its buffers"):
        program.decode(torch.ones(1, 8), torch.tensor([4000]))


def test_calls_from_threads_do_not_mix(program):
    wrong = []

    def work(row):
        for i in range(5):
            x = torch.full((1, 8), float(row * 100 + i))
            out, _ = program.decode(x, torch.tensor([row]))
            if not torch.equal(out[row], x[0] + program.memory.tensors["bias"][0] + 1):
                wrong.append(row)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def leaf():
    return {"type": "leaf"}


def node(kind, *children, keys=None, cls=None):
    out = {"type": kind, "children": list(children)}
    return out | ({"keys": keys} if keys is not None else {}) | ({"class": cls} if cls else {})


def test_call_structure_by_position_or_name():
    tree = node(
        "tuple", node("tuple", leaf(), node("list", leaf(), leaf())), node("dict", leaf(), keys=["scale"])
    )
    names = ["ids", "l0", "l1", "scale"]
    assert pytree.flatten_call(tree, names, (1, [2, 3]), {"scale": 4}) == [1, 2, 3, 4]
    assert pytree.flatten_call(tree, names, (1, [2, 3], 4), {}) == [1, 2, 3, 4]
    with pytest.raises(InputError, match="argument 1 should be a list of 2, not list of 1"):
        pytree.flatten_call(tree, names, (1, [2]), {"scale": 4})
    with pytest.raises(InputError, match="'size' but it has no such argument"):
        pytree.flatten_call(tree, names, (1, [2, 3]), {"size": 4})


def test_results_of_unknown_classes_keep_their_names():
    tree = node(
        "object", leaf(), node("tuple", leaf(), leaf()), keys=["logits", "caches"], cls="no.such.Module"
    )
    out = pytree.unflatten(tree, [1, 2, 3])
    assert (
        out["logits"] == out.logits == out[0] == 1 and out.caches == (2, 3) and out.to_tuple() == (1, (2, 3))
    )
    same = pytree.flatten(tree, SimpleNamespace(logits=1, caches=(2, 3)), "x")
    assert same == [1, 2, 3]


def test_a_class_that_torch_knows_is_made_again():
    from transformers.modeling_outputs import BaseModelOutput

    name = f"{BaseModelOutput.__module__}.{BaseModelOutput.__qualname__}"
    tree = node("object", leaf(), keys=["last_hidden_state"], cls=name)
    out = pytree.unflatten(tree, [torch.ones(1)])
    assert isinstance(out, BaseModelOutput) and out.last_hidden_state.item() == 1
    evil = node("object", leaf(), keys=["args"], cls="subprocess.Popen")
    assert isinstance(pytree.unflatten(evil, ["true"]), pytree.Outputs)


INTERPRETED = '''"""k"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def k(x, y, out, top, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a * b + a)
    tl.store(out + B + i, libdevice.tanh(a.to(tl.float32)).to(tl.bfloat16))
    tl.store(out + 2 * B + i, tl.dot(a[:, None] + tl.zeros((B, B), tl.bfloat16), b[None, :] + tl.zeros((B, B), tl.bfloat16)).to(tl.bfloat16).max(1))
    tl.store(top, tl.reduce(a.to(tl.float32), 0, larger))
    tl.store(top + 1, tl.sum(b.to(tl.float32), 0))
    tl.store(top + 2 + i, tl.associative_scan(b.to(tl.float32), 0, larger))
'''


def test_interpreter_is_right_for_bf16_and_libdevice_and_leaves_triton_alone():
    import triton.language as tl

    before = {n: getattr(tl, n) for n in ("sum", "load", "reduce", "max")}
    x, y = torch.randn(16).bfloat16(), torch.randn(16).bfloat16()
    x[3] = float("nan")
    out, top = torch.zeros(48, dtype=torch.bfloat16), torch.zeros(18)
    with interpreter.interpreting():
        function = load_function(INTERPRETED, "interpreted_sample.py", "k")
        interpreter.launch(
            function, (1, 1, 1), {"x": x, "y": y, "out": out, "top": top, "B": 16}, [x, y, out, top]
        )
    assert {n: getattr(tl, n) for n in before} == before
    torch.testing.assert_close(out[:16], (x * y) + x, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out[16:32], torch.tanh(x.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert top[0].isnan() and torch.isclose(top[1], y.float().sum())
    torch.testing.assert_close(top[2:], y.float().cummax(0).values, rtol=0, atol=0)
    torch.testing.assert_close(out[32], ((x[0].float() * y.float()) * 16).max().bfloat16(), rtol=1e-2, atol=0)


def test_bf16_rounds_to_nearest_even():
    values = np.concatenate([np.linspace(-3, 3, 1001), [np.inf, -np.inf, np.nan, 3.4e38, 1e-40]]).astype(
        np.float32
    )
    ours = torch.from_numpy(interpreter_floats.f32_to_bf16(values).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(ours, torch.from_numpy(values).bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["fp8e4nv", "fp8e5"])
def test_fp8_rounds_as_torch_does(name):
    values = np.linspace(-3, 3, 1001).astype(np.float32)
    dtype = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}[name]
    source = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(x, out, B: tl.constexpr):\n"
    source += f"    i = tl.arange(0, B)\n    v = tl.load(x + i, mask=i < 1001, other=0).to(tl.{name.replace('fp8', 'float8')})\n"
    source += "    tl.store(out + i, v.to(tl.float32), mask=i < 1001)\n"
    x, out = torch.from_numpy(values), torch.zeros(1001)
    with interpreter.interpreting():
        interpreter.launch(
            load_function(source, f"{name}_sample.py", "k"),
            (1, 1, 1),
            {"x": x, "out": out, "B": 1024},
            [x, out],
        )
    assert torch.equal(out, x.to(dtype).float())


def test_a_step_that_fails_tells_its_name(program, monkeypatch):
    variant = program.variants("decode")[0]
    program.decode(torch.ones(1, 8), torch.tensor([0]))
    bound = program.executor.variants[id(variant)]
    monkeypatch.setattr(interpreter, "launch", lambda *_: (_ for _ in ()).throw(ValueError("boom")))
    with pytest.raises(StepFailed, match="kernel k_add1: ValueError: boom"):
        bound.run_steps()


def test_samples_agree_with_aten(program):
    leaves = [torch.randn(1, 8), torch.tensor([1])]
    eager = program.run_aten("decode", leaves, commit=False)
    ours = program.call_flat("decode", leaves)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
    assert samples.CACHE_KERNELS.keys() == program.plan.kernels.keys()


MIXED_IR = """
func.func private @k_add(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<4xf32> }
func.func private @aten.flip(tensor<2x2xi8>) -> tensor<2x2xi8> attributes {topo.aten = "aten.flip.default",
    topo.call = "{\\"args\\": [{\\"operand\\": 0}, [0]], \\"kwargs\\": {}}", topo.dtypes = ["uint8", "uint8"], topo.reason = "a test"}
func.func private @aten.sort(tensor<4xf32>) -> (tensor<4xf32>, tensor<4xi64>) attributes {topo.aten = "aten.sort.default",
    topo.call = "{\\"args\\": [{\\"operand\\": 0}], \\"kwargs\\": {}}", topo.dtypes = ["float32", "float32", "int64"]}
func.func @main(%x: tensor<4xf32> {topo.kind = "input", topo.name = "x", topo.dtype = "float32"},
                %m: tensor<4xi8> {topo.kind = "input", topo.name = "m", topo.dtype = "uint8"})
    -> (tensor<4xf32> {topo.kind = "mutation", topo.name = "x", topo.dtype = "float32"},
        tensor<2x2xi8> {topo.kind = "output", topo.name = "0", topo.dtype = "uint8"},
        tensor<4xi64> {topo.kind = "output", topo.name = "1", topo.dtype = "int64"},
        tensor<4xf32> {topo.kind = "output", topo.name = "2", topo.dtype = "float32"},
        tensor<4xi8> {topo.kind = "output", topo.name = "3", topo.dtype = "uint8"})
    attributes {topo.function = "main", topo.bucket = {}} {
  %b = tensor.expand_shape %m [[0, 1]] output_shape [2, 2] : tensor<4xi8> into tensor<2x2xi8>
  %f = call @aten.flip(%b) : (tensor<2x2xi8>) -> tensor<2x2xi8>
  %s, %i = call @aten.sort(%x) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xi64>)
  %n = call @k_add(%x, %s) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %n, %f, %i, %x, %m : tensor<4xf32>, tensor<2x2xi8>, tensor<4xi64>, tensor<4xf32>, tensor<4xi8>
}
"""


def test_aten_steps_mutated_inputs_unsigned_bytes_and_results_that_are_inputs(tmp_path):
    kernels = {"k_add": samples.add_kernel("k_add", "fp32", 4)}
    records = [
        SimpleNamespace(kind="literal", name="flag", target="flag", value=True),
        SimpleNamespace(kind="input", name="x", target="x", dtype="float32", shape=(4,), value=None),
        SimpleNamespace(kind="input", name="unused", target="unused", dtype="bool", shape=(3,), value=None),
        SimpleNamespace(kind="input", name="m", target="m", dtype="uint8", shape=(4,), value=None),
    ]
    results = [
        SimpleNamespace(kind="mutation", target="x"),
        SimpleNamespace(kind="literal", target="0", value=None),
    ]
    results += [SimpleNamespace(kind="output", target=str(i)) for i in range(4)]
    built = samples.build(MIXED_IR, kernels, requests=[VariantRequest("main", "main", {}, records, results)])
    folder = test_bundle.write_bundle(tmp_path / "b", built, {"k_add": kernels["k_add"].source})
    program = load(folder, "cpu", strict=True)
    x, m = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([1, 2, 3, 255], dtype=torch.uint8)
    old = x.clone()
    none, flipped, order, before, same = program(True, x, torch.ones(3, dtype=torch.bool), m)
    assert none is None and flipped.tolist() == [[3, 255], [1, 2]] and flipped.dtype == torch.uint8
    assert order.tolist() == [3, 1, 2, 0] and torch.equal(before, old)
    assert x.tolist() == [3.0, 2.0, 4.0, 3.0], "the caller's tensor takes the new value"
    assert torch.equal(same, m) and same.data_ptr() != m.data_ptr()
    with pytest.raises(StrictError, match="flag is False, it was compiled for True"):
        program(False, x, torch.ones(3, dtype=torch.bool), m)
