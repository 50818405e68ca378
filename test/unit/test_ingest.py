"""What the frontend promises about the structured module and the records beside it."""

import json

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from topo_opt.errors import InputError
from topo_opt.frontend.ingest import ingest, parse, structured_module
from topo_opt.reference import run


class Parts(nn.Module):
    """Tied weights, a mutated buffer, a non-persistent one, nested outputs, a literal input, a constant output."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(3, 4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, ids, steps: int):
        hidden = self.embed(ids) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.cache.copy_(hidden)
        return {
            "logits": self.head(hidden),
            "ids": ids,
            "twice": [hidden, hidden],
            "none": None,
            "steps": steps + 1,
        }


@pytest.fixture(scope="module")
def parts():
    return ingest({"main": export(Parts(), (torch.tensor([1, 2, 3]), 5), strict=False)})


def test_each_tensor_is_one_argument(parts):
    (record,) = parts.functions
    kinds = [(r.kind, r.target) for r in record.signature.inputs]
    assert [kind for kind, _ in kinds].count("param") == 1
    assert ("buffer", "cache") in kinds and ("buffer", "scale") in kinds
    (tied,) = [r for r in record.signature.inputs if r.kind == "param"]
    assert {tied.target, *tied.aliases} == {"embed.weight", "head.weight"}


def test_literals_are_in_the_signature_alone(parts):
    (record,) = parts.functions
    assert [(r.name, r.value) for r in record.signature.inputs if r.kind == "literal"] == [("steps", 5)]
    assert [(r.target, r.value) for r in record.signature.outputs if r.kind == "literal"] == [
        ("4", None),
        ("5", 6),
    ]
    assert record.signature.out_tree["keys"] == ["logits", "ids", "twice", "none", "steps"]
    json.dumps(record.as_json())


def test_results_are_mutations_first_and_keep_their_order(parts):
    text = str(parse(parts.module))
    kinds = [r.kind for r in parts.functions[0].signature.outputs]
    assert kinds[0] == "mutation" and parts.functions[0].signature.outputs[0].target == "cache"
    assert text.count('topo.kind = "output"') == 4 and text.count('topo.kind = "mutation"') == 1


def test_the_module_computes_what_eager_computes(parts):
    model, ids = Parts(), torch.tensor([1, 2, 3])
    state = {**model.state_dict(), "scale": model.scale}
    inputs = []
    for record in parts.functions[0].signature.inputs:
        if record.kind == "constant":
            inputs.append(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        elif record.kind != "literal":
            inputs.append(state.get(record.target, ids))
    cache, logits, same, *twice = run(parse(parts.module), "main", inputs)
    with torch.no_grad():
        expected = model(ids, 5)
    torch.testing.assert_close(logits, expected["logits"])
    torch.testing.assert_close(cache, expected["twice"][0])
    assert torch.equal(same, ids) and torch.equal(twice[0], twice[1])


def test_a_buffer_that_is_also_a_constant_is_one_argument():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4))
            self.held = [self.cache]  # export sees this one as a constant

        def forward(self, x):
            self.held[0].add_(x)
            return self.cache * 2

    program = export(Cached(), (torch.ones(4),), strict=False)
    assert {s.kind.name for s in program.graph_signature.input_specs} >= {"BUFFER", "CONSTANT_TENSOR"}
    result = ingest({"main": program})
    signature = result.functions[0].signature
    assert [(r.kind, r.target) for r in signature.inputs] == [("buffer", "cache"), ("input", "x")]
    assert [(r.kind, r.target) for r in signature.outputs] == [("mutation", "cache"), ("output", "0")]
    cache, out = run(parse(result.module), "main", [torch.zeros(4), torch.ones(4)])
    assert torch.equal(cache, torch.ones(4)) and torch.equal(out, 2 * torch.ones(4))


def _scaled(x, y):
    return torch.cat([x.relu(), x + y.shape[0]]) * x.shape[0]


@pytest.fixture(scope="module")
def dynamic():
    class Scaled(nn.Module):
        def forward(self, x, y):
            return _scaled(x, y)

    batch = Dim("batch", min=2, max=16)
    shapes = {"x": {0: batch}, "y": {0: 2 * batch}}
    return export(Scaled(), (torch.randn(4, 3), torch.randn(8)), dynamic_shapes=shapes, strict=False)


def test_a_bucket_makes_every_size_a_number(dynamic):
    result = ingest({"f": dynamic}, {"f": [{"batch": 5}, {"x[0]": 3}]})
    assert [(r.symbol, r.bucket) for r in result.functions] == [
        ("f__batch_5", {"batch": 5}),
        ("f__batch_3", {"batch": 3}),
    ]
    module, x = parse(result.module), torch.randn(5, 3)
    (out,) = run(module, "f__batch_5", [x, torch.zeros(10)])
    torch.testing.assert_close(out, _scaled(x, torch.zeros(10)))


@pytest.mark.parametrize(
    ("bucket", "message"), [({"batch": 17}, "exported for 2 to 16"), ({"seq": 3}, "no dynamic dim")]
)
def test_a_bucket_that_does_not_fit_is_refused(dynamic, bucket, message):
    with pytest.raises(InputError, match=message):
        ingest({"f": dynamic}, {"f": [bucket]})


def test_names_that_clash_are_refused(dynamic):
    with pytest.raises(InputError, match="same symbol"):
        ingest({"a-b": dynamic, "a_b": dynamic})


def test_a_function_whose_sizes_depend_on_data_is_left_whole():
    class Masked(nn.Module):
        def forward(self, x):
            return x[x > 0] * 2

    result = ingest({"main": export(Masked(), (torch.randn(4),), strict=False)})
    (record,), (remark,) = result.functions, result.remarks
    assert record.symbol is None and "depends on data" in remark.reason
    assert remark.where is not None and remark.where.startswith(__file__)
    assert "func.func" not in str(parse(result.module))
    assert [n["op"] for n in record.aten_program()["nodes"]][-1] == "aten.mul.Tensor"


def test_control_flow_is_left_whole_with_its_bodies():
    class Either(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    result = ingest({"main": export(Either(), (torch.randn(3),), strict=False)})
    (record,), (remark,) = result.functions, result.remarks
    assert record.symbol is None and "control flow" in remark.reason
    assert '"graph"' in json.dumps(record.aten_program())


def test_what_is_left_to_aten_has_its_reason_and_line():
    class Mixed(nn.Module):
        def forward(self, x):
            return torch.sort(x.sin()), torch.lgamma(x)

    result = ingest({"main": export(Mixed(), (torch.randn(3, 4),), strict=False)})
    reasons = {r.subject: r.reason for r in result.remarks}
    assert "sorting" in reasons["aten.sort.default"] and "no lowering" in reasons["aten.lgamma.default"]
    assert all(r.where is not None and r.where.startswith(__file__) for r in result.remarks)
    text = str(parse(result.module))
    assert 'topo.dtypes = ["float32", "float32", "int64"]' in text and text.count("call @aten.") == 2


def test_extra_externs_are_left_to_aten():
    program = export(nn.ReLU(), (torch.randn(3),), strict=False)
    result = ingest({"main": program}, extra_externs={"main": {"relu": "it crashes"}})
    assert [(r.subject, r.reason) for r in result.remarks] == [("aten.relu.default", "it crashes")]


def test_a_half_op_rounds_once_at_its_end():
    def f(x):
        return (torch.nn.functional.layer_norm(x, (8,)) + 1).to(torch.float16)

    text = str(structured_module(f, (torch.randn(4, 8, dtype=torch.bfloat16),)))
    assert text.count("topo.demote") == 2  # layer_norm and add
    assert text.count("arith.truncf") == 1  # the cast that was written


def test_contractions_accumulate_in_f32_and_keep_transposes_in_their_maps():
    def f(x, w):
        return torch.nn.functional.linear(x, w) @ w

    x, w = torch.randn(2, 3, 8).half(), torch.randn(5, 8).half()
    text = str(structured_module(f, (x, w)))
    assert text.count("linalg.contract") == 2 and text.count("-> tensor<2x3x5xf32>") >= 1
    assert "linalg.transpose" not in text and "affine_map<(d0, d1, d2, d3) -> (d3, d2)>" in text


def test_bytecode_does_not_depend_on_the_run():
    def once():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Softmax(-1))
        return ingest({"main": export(model, (torch.randn(2, 4),), strict=False)}).module

    assert once() == once()
