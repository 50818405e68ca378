"""Exported programs, written as data and run again, give what eager gives, bit for bit."""

import json
import math

import pytest
import torch
from torch import nn

from topo_opt.errors import InputError, UnsupportedError, UntrustedError
from topo_opt.frontend.aten_export import Signature, call_template, export_aten
from topo_opt.runtime import aten_ops
from topo_opt.runtime.aten_program import AtenCall, AtenProgram, call_aten

Dim = torch.export.Dim


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def leaves(value):
    return torch.utils._pytree.tree_leaves(value)


def flat_inputs(program, ep, args):
    """Clones of all inputs in program order."""
    user = iter(leaves((args, {})))
    state = {**ep.constants, **ep.state_dict}
    values = [next(user) if entry.kind == "input" else state[entry.target] for entry in program.inputs]
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for left, right in zip(got, expected):
        if isinstance(right, torch.Tensor):
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            assert torch.equal(torch.nan_to_num(left), torch.nan_to_num(right))
        else:
            assert left == right and type(left) is type(right)


def round_trip(module, args, dynamic_shapes=None, more_args=()):
    """Exports, writes, reads and runs `module` both ways; returns the program."""
    if isinstance(module, Fn) and dynamic_shapes is not None:
        dynamic_shapes = (dynamic_shapes,)  # one entry for `*args`
    ep = torch.export.export(module.eval(), args, dynamic_shapes=dynamic_shapes, strict=False)
    expected_state = {k: v.detach().clone() for k, v in ep.state_dict.items()}
    ep = ep.run_decompositions({})
    text = json.dumps(export_aten(ep.graph_module, ep.graph_signature))
    program = AtenProgram(json.loads(text))
    graph_module = program.to_graph_module()
    for one in [args, *more_args]:
        inputs = flat_inputs(program, ep, one)
        with torch.no_grad():
            expected = leaves(module(*torch.utils._pytree.tree_map(_copy, one)))
        buffers = dict(module.named_buffers())
        results = program.run(inputs)
        assert_same([r for o, r in zip(program.outputs, results) if o.kind == "output"], expected)
        for entry, value in zip(program.inputs, inputs):
            if entry.kind == "buffer" and entry.target in expected_state:
                assert torch.equal(value, expected_state[entry.target]), "run must not change state"
        for output, value in zip(program.outputs, results):
            if output.kind == "mutation" and output.target in buffers:
                assert torch.equal(value, buffers[output.target])
        with torch.no_grad():
            assert_same(list(graph_module(*inputs)), expected)
        for entry, value in zip(program.inputs, inputs):
            if entry.kind == "buffer" and entry.target in buffers:
                assert torch.equal(value, buffers[entry.target]), (
                    "the graph module must update state in place"
                )
        for name, value in expected_state.items():
            if name in buffers:
                buffers[name].copy_(value)
    return program


def _copy(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("cache", torch.zeros(2, 4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.constant = torch.tensor([1.0, 2.0])

    def forward(self, x, n, flag, none):
        self.cache[0].copy_(x[0] * n)
        y = self.b(self.a(x)).to(torch.bfloat16)
        return {"y": y + self.table, "k": self.constant + 0, "n": n, "again": x, "top": torch.topk(x, 2)}


def test_state_tied_weights_and_literals():
    program = round_trip(Stateful(), (torch.randn(3, 4), 2.0, True, None))
    kinds = [entry.kind for entry in program.inputs]
    assert kinds.count("param") >= 3 and {"buffer", "constant"} <= set(kinds)
    assert [(e.literal, e.value) for e in program.inputs[-3:]] == [(True, 2.0), (True, True), (True, None)]


X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
FUNCTIONS = {
    "views": lambda x: (x.transpose(0, 2), x.flatten(1), x[:, ::2, 1:], x.unfold(2, 2, 1), x.chunk(2, 2)),
    "factories": lambda x: (torch.arange(5) + torch.zeros(5), torch.full((2,), 3.5), torch.eye(3), x.new_ones(2)),
    "specials": lambda x: (x.masked_fill(x > 0, -math.inf), torch.full((2,), math.nan), x.clamp(max=math.inf)),
    "dtypes": lambda x: (x.half(), x.to(torch.float8_e4m3fn).float(), x.int(), x > 0, x.to(torch.complex64)),
    "complex": lambda x: (torch.view_as_real(torch.polar(x.abs(), x)), torch.complex(x, x) * (1 + 2j)),
    "formats": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "sorting": lambda x: (x.sort(-1, descending=True), x.argmax(), x.kthvalue(2), x.flatten().unique()),
    "scatter": lambda x: (
        torch.zeros(4, 4).index_put((torch.tensor([0, 0]), torch.tensor([1, 2])), x[0, 0, :2], accumulate=True),
        torch.zeros(2, 3, 4).scatter_add(1, torch.zeros(2, 3, 4, dtype=torch.long), x),
    ),
    "slices_in_place": lambda x: x.clone().index_fill_(1, torch.tensor([0]), 3.0).add_(1),
    "norms": lambda x: (nn.functional.layer_norm(x, (4,)), nn.functional.softmax(x, -1), x.std((0, 1))),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "conv": lambda x: nn.functional.conv1d(x, torch.ones(5, 3, 2), padding=1),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "linalg": lambda x: torch.linalg.qr(x[0] @ x[0].T + torch.eye(3)),
    "strings": lambda x: (torch.gradient(x, dim=2)[0], nn.functional.gelu(x, approximate="tanh"), x.div(2, rounding_mode="floor")),
    "none_and_scalars": lambda x: (None, 3, 2.5, "text", x.shape[0]),
    "autocast": lambda x: _autocast(x),
    "empty": lambda x: (x[:0].sum(), x[:, :0]),
    "duplicated": lambda x: (x, x + 1, x),
}  # fmt: skip


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.transpose(1, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name):
    round_trip(Fn(FUNCTIONS[name]), (X.clone(),))


def test_random_is_reproducible():
    ep = torch.export.export(Fn(lambda x: x + torch.rand(3, 4)), (X,), strict=False).run_decompositions({})
    program = AtenProgram(export_aten(ep.graph_module, ep.graph_signature))
    torch.manual_seed(0)
    first = program.run([X])[0]
    torch.manual_seed(0)
    assert torch.equal(first, X + torch.rand(3, 4))


def test_input_mutation():
    program = round_trip(Fn(lambda x: x.add_(1) * 2), (X.clone(),))
    assert [o.kind for o in program.outputs] == ["mutation", "output"]
    x = X.clone()
    program.to_graph_module()(x)
    assert torch.equal(x, X + 1)


def test_dynamic_shapes_and_size_arithmetic():
    def fn(x):
        n = x.shape[0]
        most = torch.sym_max(n, 5)
        return (
            x * (n // 2),
            most,
            x.reshape(n * 3, 4),
            torch.arange(n * 2 - 1),
            x * (n / 3),
            n % 3,
            x.sum() * torch.sym_sqrt(n),
        )

    args = [(torch.randn(n, 3, 4),) for n in (4, 7, 2)]
    program = round_trip(Fn(fn), args[0], ({0: Dim("batch", min=2, max=32)},), more_args=args[1:])
    assert program.inputs[0].shape == (None, 3, 4)


def test_symbolic_scalar_input():
    round_trip(Fn(lambda x, n: (x * n, n + 1)), (X, 3), (None, Dim.DYNAMIC), more_args=[(X, 5)])


def test_data_dependent_sizes():
    def fn(x):
        found = torch.nonzero(x > 0)
        n = (x > 0).sum().item()
        torch._check(n <= 24)
        return found, x[x > 0] * 2, torch.zeros(n)

    round_trip(Fn(fn), (X,), more_args=[(X - 1,), (-X.abs(),)])


def test_cond():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: (x + 1, x * 2), lambda x: (x - 1, x * 3), (x,))

    round_trip(Fn(fn), (X + 1,), more_args=[(X - 1,)])


def test_cond_with_parameters_and_symbolic_predicate():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.cond(x.shape[0] > 4, self.large.forward, self.small.forward, (x,))

    sizes = [(torch.randn(n, 4),) for n in (3, 9)]
    round_trip(Gate(), sizes[0], ({0: Dim("batch", min=2, max=32)},), more_args=sizes[1:])


def test_while_loop():
    def fn(x):
        return torch.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2 + i), (torch.tensor(0), x))

    round_trip(Fn(fn), (X,))


def test_map():
    from torch._higher_order_ops.map import map as control_flow_map

    round_trip(Fn(lambda x, y: control_flow_map(lambda a, b: a * b + 1, x, y)), (X, torch.randn(3, 4)))


def test_scan():
    from torch._higher_order_ops.scan import scan

    round_trip(Fn(lambda init, x: scan(lambda c, a: (c + a, c * a), init, x)), (torch.randn(3, 4), X))


def test_associative_scan():
    from torch._higher_order_ops.associative_scan import associative_scan

    round_trip(Fn(lambda x: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")), (X,))


def test_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    def fn(q, bias):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[i] - j)

    round_trip(Fn(fn), (torch.randn(1, 2, 16, 16), torch.randn(16)))


def _scale_in_place(x, k):
    x.mul_(k)


def test_custom_operators_that_mutate():
    library = torch.library.Library("topo_test_mutating", "DEF")
    library.define("scale_(Tensor(a!) x, float k) -> ()")
    library.impl("scale_", _scale_in_place, "CompositeExplicitAutograd")

    def fn(x):
        y = x.clone()
        torch.ops.topo_test_mutating.scale_(y, 2.0)
        return y + 1

    ep = torch.export.export(Fn(fn), (X,), strict=False).run_decompositions({})
    data = json.loads(json.dumps(export_aten(ep.graph_module, ep.graph_signature)))
    assert "higher_order.auto_functionalized_v2" in [node["op"] for node in data["nodes"]]
    with pytest.raises(UntrustedError, match="topo_test_mutating"):
        AtenProgram(data)
    program = AtenProgram(data, extra_namespaces=["topo_test_mutating"])
    assert torch.equal(program.run([X])[0], X * 2 + 1)
    assert torch.equal(program.to_graph_module()(X)[0], X * 2 + 1)


def test_memory_is_released_after_the_last_use():
    ep = torch.export.export(Fn(lambda x: ((x + 1) * 2 - 3).exp()), (X,), strict=False).run_decompositions({})
    program = AtenProgram(export_aten(ep.graph_module, ep.graph_signature))
    assert [call.dead for call in program.calls] == [(), (1,), (2,), (3,)]


def test_meta_device_run_gives_shapes_only():
    ep = torch.export.export(Fn(lambda x: x + torch.arange(4)), (X,), strict=False).run_decompositions({})
    program = AtenProgram(export_aten(ep.graph_module, ep.graph_signature))
    assert program.run([X.to("meta")])[0].device.type == "meta"


@pytest.mark.parametrize("name", ["llama_cache_decode", "qwen3_moe"])
def test_models_equal_the_decomposed_program(name):
    pytest.importorskip("transformers")
    from model_zoo import ZOO

    case = ZOO[name](torch.bfloat16)
    ep = torch.export.export(case.module, case.args, case.kwargs, strict=False).run_decompositions({})
    program = AtenProgram(json.loads(json.dumps(export_aten(ep.graph_module, ep.graph_signature))))
    inputs = flat_inputs(program, ep, (case.args, case.kwargs))
    results = program.run(inputs)
    with torch.no_grad():
        expected = leaves(ep.module()(*case.args, **case.kwargs))
    assert_same([r for o, r in zip(program.outputs, results) if o.kind == "output"], expected)
    assert_same(list(program.to_graph_module()(*inputs)), expected)


def test_grouped_mm_without_transformers():
    """A serving process runs the operator that transformers registers without having transformers."""
    pytest.importorskip("transformers.integrations.moe")
    name = "transformers.grouped_mm_fallback.default"
    x, weight, ends = torch.randn(7, 4), torch.randn(3, 4, 5), torch.tensor([2, 2, 6])
    registered = aten_ops.resolve(name)
    assert isinstance(registered, torch._ops.OpOverload)
    assert torch.equal(aten_ops._SUBSTITUTES[name](x, weight, ends), registered(x, weight, ends))


# Single calls


def _node(fn, *args, op):
    ep = torch.export.export(Fn(fn), args, strict=False).run_decompositions({})
    return next(n for n in ep.graph.nodes if str(n.target) == op)


def test_call_template_round_trip():
    node = _node(lambda x, y: torch.cat([x, y, x], 1), X, X + 1, op="aten.cat.default")
    template, operands = call_template(node)
    assert template == {
        "op": "aten.cat.default",
        "args": [[{"operand": 0}, {"operand": 1}, {"operand": 0}], 1],
        "kwargs": {},
    }
    assert [n.name for n in operands] == [n.name for n in node.all_input_nodes]
    assert torch.equal(call_aten(json.dumps(template), [X, X + 1])[0], torch.cat([X, X + 1, X], 1))


def test_call_aten_multiple_outputs_and_override():
    template = {"args": [{"operand": 0}, 2], "kwargs": {"largest": False}}
    got = call_aten(template, [X], op="aten.topk.default")
    assert_same(got, list(torch.topk(X, 2, largest=False)))


@pytest.mark.parametrize(
    "template, message",
    [
        ("{", "not JSON"),
        ([], "must be an object"),
        ({"op": "aten.add.Tensor", "args": [{"operand": -1}]}, "not an operand number"),
        ({"op": "aten.add.Tensor", "args": {}}, "args must be a list"),
        ({"op": "aten.add.Nothing"}, "is not registered"),
        ({"op": "mylib.foo.default"}, "namespace 'mylib', which is not on the list"),
        ({"op": "aten.from_file.default"}, "reaches files"),
        ({"op": "operator.attrgetter"}, "is not an operator name"),
        ({"op": "os.system"}, "is not an operator name"),
        ({"op": "aten.add.__class__"}, "is not an operator name"),
        ({"op": "higher_order.aoti_call_delegate"}, "higher-order"),
        ({"op": 3}, "must be a string"),
    ],
)
def test_bad_call_templates(template, message):
    with pytest.raises(InputError, match=message):
        AtenCall.parse(template)


def test_call_with_too_few_operands_or_bad_values():
    call = AtenCall.parse({"op": "aten.mm.default", "args": [{"operand": 0}, {"operand": 1}], "kwargs": {}})
    with pytest.raises(InputError, match="takes 2 operands, got 1"):
        call.run([X])
    with pytest.raises(InputError, match=r"aten\.mm\.default .*failed: .*2-?D|matrix|matrices"):
        call.run([X, X])


# Malformed programs


GOOD = {
    "inputs": [{"name": "x", "kind": "input", "target": "x", "shape": [2], "dtype": "float32"}],
    "nodes": [{"name": "y", "op": "aten.add.Tensor", "args": [{"ref": "x"}, 1], "kwargs": {}}],
    "outputs": [{"kind": "output", "target": "0", "value": {"ref": "y"}}],
}


def _with(path, value):
    data = json.loads(json.dumps(GOOD))
    *parents, last = path
    place = data
    for step in parents:
        place = place[step]
    place[last] = value
    return data


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("nodes",), None, "lists inputs, nodes and outputs"),
        (("inputs", 0), 3, r"aten\.inputs\[0\]: expected an object"),
        (("inputs", 0, "kind"), "other", "whose kind is one of"),
        (("inputs", 0, "shape"), [-1], "malformed"),
        (("nodes", 0, "name"), "x", "not a new name"),
        (("nodes", 0, "args", 0), {"ref": "z"}, r"aten\.nodes\[0\]\.args\[0\]: 'z' is not defined"),
        (("nodes", 0, "args", 0), {"ref": ["x"]}, "not defined"),
        (("nodes", 0, "args", 0), {"item": "x"}, "not a valid item"),
        (("nodes", 0, "args", 0), {"dtype": "load"}, "not a valid dtype"),
        (("nodes", 0, "args", 0), {"python": "1"}, "not an argument kind"),
        (("nodes", 0, "args", 0), {"a": 1, "b": 2}, "object with one key"),
        (("nodes", 0, "args", 0), {"graph": []}, "expected an object with the lists"),
        (("nodes", 0, "args", 0), _nested(100), "nested deeper"),
        (("outputs", 0, "kind"), "input", "expected an object with kind"),
        (("outputs", 0), {"kind": "mutation", "target": "w", "value": 1}, "rewrites 'w'"),
    ],
)
def test_malformed_programs(path, value, message):
    AtenProgram(GOOD)
    with pytest.raises(InputError, match=message):
        AtenProgram(_with(path, value))


def test_operator_not_on_the_list_is_untrusted():
    with pytest.raises(UntrustedError):
        AtenProgram(_with(("nodes", 0, "op"), "c10d.broadcast_.default"))


def test_wrong_number_of_inputs():
    with pytest.raises(InputError, match="takes 1 inputs, got 2"):
        AtenProgram(GOOD).run([X, X])


def test_custom_namespace_needs_consent():
    library = torch.library.Library("topo_test_aten", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    data = _with(
        ("nodes", 0),
        {"name": "y", "op": "topo_test_aten.twice.default", "args": [{"ref": "x"}], "kwargs": {}},
    )
    with pytest.raises(UntrustedError, match="topo_test_aten"):
        AtenProgram(data)
    assert torch.equal(AtenProgram(data, extra_namespaces=["topo_test_aten"]).run([X])[0], X * 2)


def test_in_place_graph_is_refused_with_the_source_line():
    ep = torch.export.export(Fn(lambda x: x.clone().add_(1)), (X,), strict=False)
    with pytest.raises(UnsupportedError, match="changes a tensor in place") as info:
        export_aten(ep.graph_module, ep.graph_signature)
    assert info.value.where and info.value.where.split(":")[0].endswith("test_aten_program.py")


def test_signature_names_user_outputs_by_position():
    ep = torch.export.export(
        Stateful(), (torch.randn(3, 4), 2.0, True, None), strict=False
    ).run_decompositions({})
    outputs = Signature.of(ep.graph_signature).outputs
    assert (outputs[0].kind, outputs[0].target) == ("mutation", "cache")
    assert [o.target for o in outputs[1:]] == [str(i) for i in range(len(outputs) - 1)]


def test_views_do_not_depend_on_the_layout_of_their_operand():
    """On another device an op may return other strides than the export saw."""
    x = torch.randn(2, 3, 4).transpose(1, 2)
    call = {"op": "aten.view.default", "args": [{"operand": 0}, [2, 12]], "kwargs": {}}
    assert torch.equal(call_aten(json.dumps(call), [x])[0], x.reshape(2, 12))
