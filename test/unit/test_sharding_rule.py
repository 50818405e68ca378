"""What operations allow to be split: factors, and the dimensions that carry them."""

from __future__ import annotations

import pytest

from topo_opt.frontend.ingest import parse
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rules import sharding_rules
from topo_opt.structured.graph import read


def rule_of(name: str, text: str) -> Rule:
    """The rule of the only op of this name in a function body."""
    module = parse(text)
    graph = read(module.body.operations[0].operation)
    rules = sharding_rules(graph)
    (found,) = [rule for node, rule in zip(graph.nodes, rules, strict=True) if node.name == name]
    return found


def kinds(rule: Rule) -> list[str]:
    return [f.kind for f in rule.factors]


def test_product() -> None:
    rule = rule_of(
        "linalg.contract",
        """func.func @main(%x: tensor<4x6xf32>, %w: tensor<8x6xf32>) -> tensor<4x8xf32> {
          %z = arith.constant 0.0 : f32
          %e = tensor.empty() : tensor<4x8xf32>
          %i = linalg.fill ins(%z : f32) outs(%e : tensor<4x8xf32>) -> tensor<4x8xf32>
          %y = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
            ins(%x, %w : tensor<4x6xf32>, tensor<8x6xf32>) outs(%i : tensor<4x8xf32>) -> tensor<4x8xf32>
          return %y : tensor<4x8xf32>
        }""",
    )
    assert kinds(rule) == ["parallel", "parallel", "reduction"]
    assert rule.factors[2].combiner == "add" and [f.size for f in rule.factors] == [4, 8, 6]
    assert rule.operands == (((0,), (2,)), ((1,), (2,)), ((0,), (1,)))
    assert rule.results == (((0,), (1,)),)


def test_product_on_top_of_another_tensor_is_not_split_along_k() -> None:
    rule = rule_of(
        "linalg.contract",
        """func.func @main(%x: tensor<4x6xf32>, %w: tensor<8x6xf32>, %i: tensor<4x8xf32>) -> tensor<4x8xf32> {
          %y = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
            ins(%x, %w : tensor<4x6xf32>, tensor<8x6xf32>) outs(%i : tensor<4x8xf32>) -> tensor<4x8xf32>
          return %y : tensor<4x8xf32>
        }""",
    )
    assert kinds(rule) == ["parallel", "parallel", "replicated"]


REDUCTION = """func.func @main(%x: tensor<4x6x{element}>, %i: tensor<4x{element}>) -> tensor<4x{element}> {{
  %y = linalg.generic {{indexing_maps = [affine_map<(m, k) -> (m, k)>, affine_map<(m, k) -> (m)>],
                       iterator_types = ["parallel", "reduction"]}}
       ins(%x : tensor<4x6x{element}>) outs(%i : tensor<4x{element}>) {{
  ^bb0(%a: {element}, %acc: {element}):
    {body}
    linalg.yield %r : {element}
  }} -> tensor<4x{element}>
  return %y : tensor<4x{element}>
}}"""


@pytest.mark.parametrize(
    ("element", "body", "kind", "combiner"),
    [
        ("f32", "%r = arith.maximumf %a, %acc : f32", "reduction", "max"),
        ("i64", "%r = arith.minsi %acc, %a : i64", "reduction", "min"),
        ("i1", "%r = arith.ori %a, %acc : i1", "reduction", "or"),
        ("i1", "%r = arith.andi %a, %acc : i1", "reduction", "and"),
        ("i64", "%r = arith.ori %a, %acc : i64", "replicated", "add"),
        ("f32", "%r = arith.addf %a, %acc : f32", "replicated", "add"),  # what it starts from is not zero
        ("f32", "%s = arith.mulf %a, %acc : f32\n %r = arith.maximumf %s, %acc : f32", "replicated", "add"),
        ("f32", "%r = arith.subf %acc, %a : f32", "replicated", "add"),
    ],
)
def test_combiners(element: str, body: str, kind: str, combiner: str) -> None:
    rule = rule_of("linalg.generic", REDUCTION.format(element=element, body=body))
    assert (rule.factors[1].kind, rule.factors[1].combiner) == (kind, combiner)


def test_compound_and_constant_indices() -> None:
    rule = rule_of(
        "linalg.generic",
        """func.func @main(%x: tensor<8x5xf32>, %b: tensor<1x5xf32>) -> tensor<8x5xf32> {
          %e = tensor.empty() : tensor<8x5xf32>
          %y = linalg.generic {indexing_maps = [affine_map<(m, n) -> (7 - m, n)>, affine_map<(m, n) -> (0, n)>, affine_map<(m, n) -> (m, n)>],
                               iterator_types = ["parallel", "parallel"]}
               ins(%x, %b : tensor<8x5xf32>, tensor<1x5xf32>) outs(%e : tensor<8x5xf32>) {
          ^bb0(%a: f32, %c: f32, %o: f32):
            %r = arith.addf %a, %c : f32
            linalg.yield %r : f32
          } -> tensor<8x5xf32>
          return %y : tensor<8x5xf32>
        }""",
    )
    assert kinds(rule) == ["replicated", "parallel"]
    assert rule.operands[:2] == (((), (1,)), ((), (1,)))


def test_lookup_carries_the_table_rows_as_a_sum() -> None:
    rule = rule_of(
        "linalg.generic",
        """func.func @main(%t: tensor<100x16xbf16>, %ids: tensor<3xi64>) -> tensor<3x16xf32> {
          %e = tensor.empty() : tensor<3x16xf32>
          %y = linalg.generic {indexing_maps = [affine_map<(m, n) -> (m)>, affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}
               ins(%ids : tensor<3xi64>) outs(%e : tensor<3x16xf32>) {
          ^bb0(%id: i64, %o: f32):
            %i = arith.index_cast %id : i64 to index
            %j = linalg.index 1 : index
            %v = tensor.extract %t[%i, %j] : tensor<100x16xbf16>
            %r = arith.extf %v : bf16 to f32
            linalg.yield %r : f32
          } -> tensor<3x16xf32>
          return %y : tensor<3x16xf32>
        }""",
    )
    assert [(f.size, f.kind) for f in rule.factors] == [(3, "parallel"), (16, "parallel"), (100, "reduction")]
    assert rule.operands == (((0,),), ((0,), (1,)), ((2,), (1,)))


def test_reshapes_order_the_parts_of_a_dimension() -> None:
    text = """func.func @main(%x: tensor<2x12xf32>) -> tensor<2x3x4x1xf32> {
      %y = tensor.expand_shape %x [[0], [1, 2, 3]] output_shape [2, 3, 4, 1] : tensor<2x12xf32> into tensor<2x3x4x1xf32>
      return %y : tensor<2x3x4x1xf32>
    }"""
    rule = rule_of("tensor.expand_shape", text)
    assert rule.operands == (((0,), (1, 2)),)
    assert rule.results == (((0,), (1,), (2,), (3,)),)


def test_slices_keep_the_dimensions_they_take_whole() -> None:
    text = """func.func @main(%x: tensor<2x12x5xf32>) -> tensor<2x4x5xf32> {
      %y = tensor.extract_slice %x[0, 4, 0] [2, 4, 5] [1, 1, 1] : tensor<2x12x5xf32> to tensor<2x4x5xf32>
      return %y : tensor<2x4x5xf32>
    }"""
    rule = rule_of("tensor.extract_slice", text)
    assert rule.operands == (((0,), (), (1,)),) and rule.results == rule.operands


ATTENTION = """func.func @main(%q: tensor<2x6x5x8xf32>, %k: tensor<2x3x7x8xf32>, %v: tensor<2x3x7x4xf32>, %p: tensor<2x5xi64>) -> tensor<2x6x5x4xf32> {{
  %y = "topo.attention"(%q, %k, %v, %p) {{scale = 1.0 : f64, causal = false, high = affine_map<(m, p) -> ({bound})>,
       operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>}}
       : (tensor<2x6x5x8xf32>, tensor<2x3x7x8xf32>, tensor<2x3x7x4xf32>, tensor<2x5xi64>) -> tensor<2x6x5x4xf32>
  return %y : tensor<2x6x5x4xf32>
}}"""


@pytest.mark.parametrize(
    ("bound", "kind"), [("m + p + 1", "parallel"), ("p + 1", "parallel"), ("m + 1", "replicated")]
)
def test_attention(bound: str, kind: str) -> None:
    rule = rule_of("topo.attention", ATTENTION.format(bound=bound))
    assert [f.size for f in rule.factors] == [2, 3, 2, 5, 4]
    assert rule.operands[0] == ((0,), (1, 2), (3,), ()) and rule.operands[1] == ((0,), (1,), (), ())
    assert rule.results == (((0,), (1, 2), (3,), (4,)),)
    assert rule.factors[3].kind == kind


CALL = """module {{ func.func @main({arguments}) -> {result} {{
  %y = call @aten.0({names}) : ({operands}) -> {result}
  return %y : {result}
}}
func.func private @aten.0({operands}) -> {result} attributes {{topo.aten = "aten.{op}.default", topo.call = "{{\\22args\\22: [{args}], \\22kwargs\\22: {{}}}}"}} }}"""


def call_rule(op: str, args: str, operands: list[str], result: str) -> Rule:
    """The rule of a call left to ATen; `#i` in `args` is operand i."""
    for i in range(len(operands)):
        args = args.replace(f"#{i}", f"{{\\22operand\\22: {i}}}")
    text = CALL.format(
        op=op,
        args=args,
        arguments=", ".join(f"%x{i}: {kind}" for i, kind in enumerate(operands)),
        names=", ".join(f"%x{i}" for i in range(len(operands))),
        operands=", ".join(operands),
        result=result,
    )
    return rule_of("func.call", text)


IMAGE, MADE = "tensor<3x8x9x9xf32>", "tensor<3x6x9x9xf32>"
INNER = ((), ())


def test_convolution_has_images_and_channels() -> None:
    """Images, and channels of the result: the first dimension of the weight, of transposed convolutions the second."""
    args = "#0, #1, #2, [1, 1], [1, 1], [1, 1], {}, [0, 0], 1"
    bias = "tensor<6xf32>"
    rule = call_rule("convolution", args.format("false"), [IMAGE, "tensor<6x8x3x3xf32>", bias], MADE)
    assert [(f.size, f.kind) for f in rule.factors] == [(3, "parallel"), (6, "parallel")]
    assert rule.operands == (((0,), (), *INNER), ((1,), (), *INNER), ((1,),))
    assert rule.results == (((0,), (1,), *INNER),)
    rule = call_rule("convolution", args.format("true"), [IMAGE, "tensor<8x6x3x3xf32>", bias], MADE)
    assert rule.operands[1] == ((), (1,), *INNER)


def test_convolution_in_groups_has_images_only() -> None:
    args = "#0, #1, null, [1, 1], [1, 1], [1, 1], false, [0, 0], 2"
    rule = call_rule("convolution", args, [IMAGE, "tensor<6x4x3x3xf32>"], MADE)
    assert kinds(rule) == ["parallel", "replicated"]
    assert rule.operands == (((0,), (), *INNER), ((), (), *INNER))


@pytest.mark.parametrize(("axis", "dims"), [("0", ((), (0,), (1,))), ("-1, true", ((0,), (1,), ()))])
def test_sort_keeps_what_it_sorts_together(axis: str, dims: tuple[tuple[int, ...], ...]) -> None:
    rule = call_rule("argsort", f"#0, {axis}", ["tensor<4x5x6xf32>"], "tensor<4x5x6xi64>")
    assert rule.operands == (dims,) and rule.results == (dims,)


def test_other_calls_are_whole() -> None:
    assert call_rule("linalg_inv", "#0", [IMAGE], IMAGE).factors == ()


def test_a_call_of_which_nothing_is_known_is_whole() -> None:
    text = """module { func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = call @aten.0(%x) : (tensor<4xf32>) -> tensor<4xf32>
      return %y : tensor<4xf32>
    }
    func.func private @aten.0(tensor<4xf32>) -> tensor<4xf32> }"""
    rule = rule_of("func.call", text)
    assert rule == Rule((), (((),),), (((),),))
