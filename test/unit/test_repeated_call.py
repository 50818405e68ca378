"""runtime.repeated_call: the short way gives what the long way gives, and is taken only where nothing differs."""

import plan_samples as samples
import pytest
import test_bundle
import torch

from topo_opt.codegen.bundle import write_bundle
from topo_opt.runtime import interpreter, load
from topo_opt.runtime.plan import Buffer, InputLeaf, OutputLeaf, Variant
from topo_opt.runtime.repeated_call import ArgumentOrder, RepeatedCall


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return test_bundle.write(tmp_path_factory.mktemp("repeated") / "bundle")


def quick(folder, monkeypatch, **options):
    """A program on the CPU with a short way, and the list of the calls that took it."""
    program = load(folder, "cpu", random_weights=3, **options)
    executor, taken = program.executor, []

    def repeated(variant, *, own_results):
        bound = executor.variants[id(variant)]

        def replay():
            taken.append(variant.symbol)
            with interpreter.interpreting():
                bound.run_steps()

        return RepeatedCall(variant, bound.tensors, program.device, replay, own_results=own_results)

    monkeypatch.setattr(executor, "repeated", repeated)
    return program, taken


X, ROW = torch.randn(1, 8), torch.tensor([1])
SAME = {
    "by position": (lambda p: p.decode(X, ROW)),
    "by name": (lambda p: p.decode(pos=ROW, x=X)),
    "both": (lambda p: p.decode(X, pos=ROW)),
    "strided": (lambda p: p.decode(X.T.contiguous().T, ROW)),
    "requires grad": (lambda p: p.decode(X.clone().requires_grad_(), ROW)),
}


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
def test_repeated_calls_take_the_short_way_and_give_the_same(folder, monkeypatch, call):
    program, taken = quick(folder, monkeypatch)
    first = program.decode(X, ROW)
    assert not taken
    program.state.reset()
    second = call(program)
    assert taken == ["decode"]
    for a, b in zip(first, second):
        assert torch.equal(a, b) and not b.requires_grad
    assert torch.equal(program.state["cache"][1], X[0] + program.memory.tensors["bias"][0])


OTHER = {
    "another shape": (torch.randn(2, 8), torch.tensor([0, 1])),
    "a subclass": (torch.nn.Parameter(X, requires_grad=False), ROW),
}


@pytest.mark.parametrize("arguments", OTHER.values(), ids=OTHER)
def test_other_kinds_of_arguments_take_the_long_way(folder, monkeypatch, arguments):
    program, taken = quick(folder, monkeypatch)
    program.decode(X, ROW)
    program.decode(*arguments)
    assert not taken


def test_results_are_the_callers_unless_they_are_asked_to_be_static(folder, monkeypatch):
    for static in (False, True):
        program, taken = quick(folder, monkeypatch, static_results=static)
        program.decode(X, ROW)
        kept = program.decode(X, ROW)[0]
        saved = kept.clone()
        again = program.decode(X + 1, ROW)[0]
        assert len(taken) == 2
        assert torch.equal(kept, saved) is not static and (kept.data_ptr() == again.data_ptr()) is static


def test_wrong_arguments_are_still_errors_after_the_short_way(folder, monkeypatch):
    from topo_opt.errors import InputError

    program, _ = quick(folder, monkeypatch)
    program.decode(X, ROW)
    program.decode(X, ROW)
    for arguments, names in (((X,), {}), ((X, ROW, 1), {}), ((X,), {"x": X}), ((X,), {"row": ROW})):
        with pytest.raises(InputError):
            program.decode(*arguments, **names)


def test_functions_that_rewrite_their_inputs_have_no_short_way(tmp_path, monkeypatch):
    state = 'topo.kind = "{}", topo.name = "cache"'
    text = samples.CACHE_IR.replace(state.format("buffer"), state.format("input"))
    built = samples.build(text, samples.CACHE_KERNELS)
    folder = write_bundle(tmp_path / "b", built, test_bundle.SOURCES)
    program, taken = quick(folder, monkeypatch)
    cache = torch.zeros(4, 8)
    for _ in range(2):
        program.decode(cache, X, ROW)
    assert not taken and torch.equal(cache[1], X[0] + program.memory.tensors["bias"][0])


@pytest.mark.parametrize("first", ["load", "call", "repeated"])
def test_calls_in_and_outside_of_inference_mode_mix(folder, monkeypatch, first):
    with torch.inference_mode(first == "load"):
        program, taken = quick(folder, monkeypatch)
    with torch.inference_mode(first == "call"):
        expected = program.decode(X, ROW)
    with torch.inference_mode(first == "repeated"):
        program.decode(X, ROW)
    assert torch.equal(program.decode(X.clone(), ROW)[0], expected[0]) and len(taken) == 2
    program.state.reset()
    x, y = torch.randn(2, 8), torch.tensor([0, 1])
    program.decode(x, y)
    assert torch.equal(program.state["cache"][:2], x + program.memory.tensors["bias"])


# -- in isolation ---------------------------------------------------------------------------------------------------


def variant_of(inputs, outputs, buffers):
    return Variant("f", {}, tuple(inputs), tuple(outputs), tuple(buffers), (), 0, 0)


def test_inputs_of_a_dtype_are_copied_together_and_literals_are_compared():
    kinds = [("float32", (2,)), ("float32", (3,)), ("int64", (1,))]
    inputs = [InputLeaf("tensor", f"x{i}", d, s, i) for i, (d, s) in enumerate(kinds)]
    inputs += [InputLeaf("literal", "flag", value=True), InputLeaf("tensor", "unused", "float32", (4,))]
    buffers = [Buffer("input", d, s) for d, s in kinds]
    outputs = [
        OutputLeaf("tensor", 1, "float32"),
        OutputLeaf("literal", value=7),
        OutputLeaf("tensor", 1, "float32"),
    ]
    tensors = [torch.zeros(s, dtype=getattr(torch, d)) for d, s in kinds]
    runs = []
    call = RepeatedCall(
        variant_of(inputs, outputs, buffers), tensors, torch.device("cpu"), lambda: runs.append("replay"),
        enter=lambda: runs.append("enter"), leave=lambda: runs.append("leave"),
    )  # fmt: skip
    leaves = [torch.ones(2), torch.arange(6.0)[::2], torch.tensor([5]), True, torch.ones(4)]
    assert call.accepts(leaves)
    results = call(leaves)
    assert runs == ["enter", "replay", "leave"] and len(call.batched) == 1 and len(call.single) == 1
    assert [t.tolist() for t in tensors] == [[1, 1], [0, 2, 4], [5]]
    assert results[0].tolist() == [0, 2, 4] and results[0] is results[2] and results[1] == 7
    assert not call.accepts([*leaves[:3], 1, leaves[4]]) and not call.accepts(leaves[:4])
    assert not call.accepts([leaves[0].double(), *leaves[1:]]) and not call.accepts([None, *leaves[1:]])


ORDERS = [
    ((1, 2), {}, [1, 2]), ((1,), {"b": 2}, [1, 2]), ((), {"b": 2, "a": 1}, [1, 2]),
    ((1,), {}, None), ((1, 2, 3), {}, None), ((1,), {"a": 2}, None), ((1,), {"c": 2}, None),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs", "leaves"), ORDERS)
def test_leaves_are_found_by_position_and_name(args, kwargs, leaves):
    found = ArgumentOrder(["a", "b"]).leaves(args, kwargs)
    assert (None if found is None else list(found)) == leaves
