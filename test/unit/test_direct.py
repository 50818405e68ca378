"""runtime.direct: what a variant gives on the caller's own tensors is what it gives on static memory."""

import gc
import weakref

import plan_samples as samples
import pytest
import test_bundle
import torch
from direct_launcher import direct_of

from topo_opt.codegen.bundle import write_bundle
from topo_opt.runtime import addresses, direct_parts, load
from topo_opt.runtime import direct as direct_module
from topo_opt.runtime.steps import StepFailed

pytest.importorskip("triton")

ADD = 'func.func private @k_add(%a: tensor<8xf32>, %b: tensor<8xf32>) -> tensor<8xf32> attributes {topo.kernel = {family = "loops"}} { return %a : tensor<8xf32> }\n'
ATEN = """func.func private @{name}(%a: tensor<8xf32>) -> tensor<8xf32>
  attributes {{topo.aten = "{op}", topo.call = "{{\\22args\\22: [{{\\22operand\\22: 0}}{rest}], \\22kwargs\\22: {{}}}}",
  topo.dtypes = ["float32"], topo.reason = "test"}}
"""
X = 'tensor<8xf32> {topo.kind = "input", topo.name = "x", topo.dtype = "float32"}'
Y = X.replace('"x"', '"y"')
OUT = 'tensor<8xf32> {topo.kind = "output", topo.name = "0", topo.dtype = "float32"}'
OUT1 = OUT.replace('"0"', '"1"')
NEW_X = X.replace('"input"', '"mutation"')
KERNELS = {"k_add": samples.add_kernel("k_add", "fp32", 8)}


def program_of(tmp_path, text, kernels=KERNELS):
    built = samples.build(text, kernels)
    return load(write_bundle(tmp_path / "b", built, {k: v.source for k, v in kernels.items()}), "cpu")


def plan_function(arguments, results, body):
    return f'func.func @f({arguments}) -> ({results}) attributes {{topo.function = "f", topo.bucket = {{}}}} {{ {body} }}'


@pytest.fixture
def add(tmp_path):
    body = (
        "%o = call @k_add(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> return %o : tensor<8xf32>"
    )
    return direct_of(program_of(tmp_path, ADD + plan_function(f"%x: {X}, %y: {Y}", OUT, body)), "f")


def test_results_are_fresh_and_inputs_are_not_copied(add):
    direct, _, call = add
    x, y = torch.randn(8), torch.randn(8)
    first, second = call(x, y)[0], call(x, x)[0]
    assert torch.equal(first, x + y) and torch.equal(second, x + x)
    assert first.data_ptr() != second.data_ptr() and not direct.uses_shared_memory
    assert all(direct.fixed[b].is_meta for b in direct.varying)


UNREADABLE = {
    "strided": lambda: torch.randn(16)[::2],
    "expanded": lambda: torch.randn(1).expand(8),
    "misaligned": lambda: torch.randn(9)[1:],
    "negated": lambda: torch._neg_view(torch.randn(8)),
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_memory_that_kernels_cannot_read_is_copied(add, make):
    x, y = make(), torch.randn(8)
    assert not addresses.readable(x, -1)
    assert torch.equal(add[2](x, y)[0], x + y)


def test_the_short_way_gives_the_same_and_steps_aside_where_inputs_are_copied(add):
    direct, _, call = add
    assert direct.short is not None
    x, y = torch.randn(8), torch.randn(8)
    for _ in range(2):
        first, second = call(x, y, short=True)[0], call(y, y, short=True)[0]
        assert torch.equal(first, x + y) and torch.equal(second, y + y)
    kept = len(direct.short.kept)
    for make in UNREADABLE.values():
        z = make()
        assert torch.equal(call(z, y, short=True)[0], z + y)
    assert len(direct.short.kept) == kept > 0


def test_the_short_way_makes_results_of_their_own_shape_and_literals(tmp_path):
    body = """%o = call @k_add(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
      %v = tensor.expand_shape %o [[0, 1]] output_shape [2, 4] : tensor<8xf32> into tensor<2x4xf32>
      return %v : tensor<2x4xf32>"""
    text = ADD + plan_function(f"%x: {X}, %y: {Y}", OUT.replace("<8x", "<2x4x"), body)
    direct, _, call = direct_of(program_of(tmp_path, text), "f")
    x, y = torch.randn(8), torch.randn(8)
    for short in (False, True, True):
        (result,) = call(x, y, short=short)
        assert result.shape == (2, 4) and torch.equal(result.view(-1), x + y)
    assert direct.short is not None


def test_launches_are_kept_by_address_and_no_more_than_a_few(add, monkeypatch):
    monkeypatch.setattr(direct_parts, "KEPT", 3)
    direct, launcher, call = add
    inputs, results = [torch.randn(8) for _ in range(6)], []
    for x in (*inputs, *inputs):
        results.append(call(x, x)[0])
        assert torch.equal(results[-1], 2 * x)
    assert len(direct.parts[0].kept) == 3 and len(launcher.prepared) == 12
    assert launcher.prepared[0] == ("k_add", False)


def test_what_was_given_is_not_kept(tmp_path):
    body = (
        "%o = call @k_add(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> return %o : tensor<8xf32>"
    )
    program = program_of(tmp_path, ADD + plan_function(f"%x: {X}, %y: {Y}", OUT, body))
    direct, _, call = direct_of(program, "f", lasting=False)
    x = torch.randn(8)
    result = call(x, x)[0]
    watched = [weakref.ref(x), weakref.ref(result)]
    del x, result
    gc.collect()
    assert [w() for w in watched] == [None, None] and not direct.parts[0].kept


def test_state_weights_and_scratch_are_those_of_the_program(tmp_path, monkeypatch):
    folder = test_bundle.write(tmp_path / "b")
    reference, program = (load(folder, "cpu", random_weights=3) for _ in range(2))
    direct, launcher, call = direct_of(program, "decode")
    x = torch.randn(1, 8)
    for row in (1, 3):
        expected = reference.decode(x, torch.tensor([row]))
        got = call(x, torch.tensor([row]))
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        assert torch.equal(program.state["cache"], reference.state["cache"])
    assert direct.uses_shared_memory
    assert [d for _, d in launcher.prepared[:4]] == [False, True, True, True]
    state = program.state["cache"]
    before = state.clone()
    with monkeypatch.context() as patch:
        given = []
        patch.setattr(direct_module, "readable", lambda t, place: given.append(t) or True)
        call(state[1:2], torch.tensor([1]))  # an input that is a part of what is rewritten
    assert (
        direct.short is None
        and given
        and torch.equal(state[1], before[1] + program.memory.tensors["bias"][0])
    )
    at = direct.inputs[0][1]
    assert all(
        key[1 + direct.parts[0].roots.index(at)] != state[1:2].data_ptr() for key in direct.parts[0].kept
    )


def test_rewritten_inputs_are_written_in_place_however_they_lie(tmp_path):
    body = "%o = call @k_add(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> return %o, %o : tensor<8xf32>, tensor<8xf32>"
    program = program_of(tmp_path, ADD + plan_function(f"%x: {X}, %y: {Y}", f"{NEW_X}, {OUT}", body))
    _, _, call = direct_of(program, "f")
    for x in (torch.randn(8), torch.randn(16)[::2], torch.randn(9)[1:]):
        y, before, version = torch.randn(8), x.clone(), x._version
        (result,) = call(x, y)
        assert torch.equal(x, before + y) and torch.equal(result, x) and x._version > version
        x.zero_()
        assert torch.equal(result, before + y)


def test_a_result_that_is_an_input_or_the_same_memory_twice_is_a_tensor_of_its_own(tmp_path):
    body = """%o = call @k_add(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
      %v = tensor.expand_shape %o [[0, 1]] output_shape [2, 4] : tensor<8xf32> into tensor<2x4xf32>
      return %x, %o, %v : tensor<8xf32>, tensor<8xf32>, tensor<2x4xf32>"""
    view = OUT.replace("<8x", "<2x4x").replace('"0"', '"2"')
    program = program_of(tmp_path, ADD + plan_function(f"%x: {X}, %y: {Y}", f"{OUT}, {OUT1}, {view}", body))
    x, y = torch.randn(8), torch.randn(8)
    same, total, again = direct_of(program, "f")[2](x, y)
    assert torch.equal(same, x) and torch.equal(total, x + y) and torch.equal(again.view(-1), total)
    assert len({t.data_ptr() for t in (x, same, total, again)}) == 4 and again.shape == (2, 4)


def aten_program(tmp_path, op, rest=""):
    """relu-like call of x, the sum of it and y, and the call's result itself."""
    text = ADD + ATEN.format(name="a", op=op, rest=rest)
    body = """%a = call @a(%x) : (tensor<8xf32>) -> tensor<8xf32>
      %o = call @k_add(%a, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
      return %a, %o : tensor<8xf32>, tensor<8xf32>"""
    return program_of(tmp_path, text + plan_function(f"%x: {X}, %y: {Y}", f"{OUT}, {OUT1}", body))


ATEN_CALLS = {
    "a tensor of its own": ("aten.relu.default", "", torch.relu, 0),
    "its argument": ("aten.alias.default", "", lambda x: x, 1),
    "a copy": ("aten.repeat.default", ", [1]", lambda x: x, 0),
}


@pytest.mark.parametrize(("op", "rest", "function", "copies"), ATEN_CALLS.values(), ids=ATEN_CALLS)
def test_what_aten_returns_is_taken_unless_it_is_the_callers_memory(
    tmp_path, monkeypatch, op, rest, function, copies
):
    _, _, call = direct_of(aten_program(tmp_path, op, rest), "f")
    stored = []
    monkeypatch.setattr(direct_parts, "store", lambda target, r: stored.append(target) or target.copy_(r))
    for _ in range(3):
        x, y = torch.randn(8), torch.randn(8)
        a, o = call(x, y)
        assert torch.equal(a, function(x)) and torch.equal(o, function(x) + y)
        assert a.data_ptr() != x.data_ptr()
    assert len(stored) == 3 * copies


def test_what_only_other_steps_need_is_freed_in_between(tmp_path):
    text = (
        ADD
        + ATEN.format(name="a", op="aten.relu.default", rest="")
        + ATEN.format(name="b", op="aten.neg.default", rest="")
    )
    body = """%a = call @a(%x) : (tensor<8xf32>) -> tensor<8xf32>
      %b = call @b(%a) : (tensor<8xf32>) -> tensor<8xf32>
      %o = call @k_add(%b, %y) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32> return %o : tensor<8xf32>"""
    program = program_of(tmp_path, text + plan_function(f"%x: {X}, %y: {Y}", OUT, body))
    direct, _, call = direct_of(program, "f")
    assert [len(p.frees) for p in direct.parts] == [0, 1, 1]
    x, y = torch.randn(8), torch.randn(8)
    assert torch.equal(call(x, y)[0], y - torch.relu(x))


def test_a_failing_step_is_named_and_tells_whether_anything_changed(add, monkeypatch):
    direct, _, call = add

    def fail(*arguments):
        raise RuntimeError("out of order")

    monkeypatch.setattr(direct.parts[0], "run", fail)
    with pytest.raises(StepFailed, match="kernel k_add: RuntimeError: out of order") as caught:
        call(torch.ones(8), torch.ones(8))
    assert not caught.value.mutated
