"""The reference executor on IR written by hand: maps, reductions and bodies that no lowering here produces, and its errors."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_mlir import ir

from topo_opt import reference
from topo_opt.dialects import load
from topo_opt.errors import InputError, UnsupportedError

MAPS = """
#id1 = affine_map<(d0) -> (d0)>
#id2 = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#none = affine_map<(d0, d1) -> ()>
"""


def run(text: str, *inputs: Tensor, symbol: str = "f", **options) -> list[Tensor]:
    """Parses `text` with the maps above and runs one of its functions."""
    module = ir.Module.parse(MAPS + text, load(ir.Context()))
    return reference.run(module, symbol, inputs, **options)


def elementwise(body: str, operand: str, result: str, *inputs: Tensor) -> Tensor:
    """One elementwise `linalg.generic` over vectors; the body sees %a, %b, ... and yields %r."""
    n = len(inputs)
    size = inputs[0].numel()
    names = "abcd"[:n]
    arguments = ", ".join(f"%{x}: {operand}" for x in names)
    types = ", ".join([f"tensor<{size}x{operand}>"] * n)
    (value,) = run(
        f"""
        func.func @f({", ".join(f"%t{x}: tensor<{size}x{operand}>" for x in names)}) -> tensor<{size}x{result}> {{
          %e = tensor.empty() : tensor<{size}x{result}>
          %o = linalg.generic {{indexing_maps = [{", ".join(["#id1"] * (n + 1))}], iterator_types = ["parallel"]}}
              ins({", ".join(f"%t{x}" for x in names)} : {types}) outs(%e : tensor<{size}x{result}>) {{
          ^bb0({arguments}, %out: {result}):
            {body}
            linalg.yield %r : {result}
          }} -> tensor<{size}x{result}>
          return %o : tensor<{size}x{result}>
        }}""",
        *inputs,
    )
    return value


def reduction(
    body: str, init: str, element: str, x: Tensor, maps: str = "#id2, #row", size: str = "4x"
) -> Tensor:
    """One row reduction of a 4x5 tensor; the body sees %x and %acc and yields %r."""
    (value,) = run(
        f"""
        func.func @f(%t: tensor<4x5x{element}>) -> tensor<{size}{element}> {{
          %start = arith.constant {init} : {element}
          %e = tensor.empty() : tensor<{size}{element}>
          %i = linalg.fill ins(%start : {element}) outs(%e : tensor<{size}{element}>) -> tensor<{size}{element}>
          %o = linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel", "reduction"]}}
              ins(%t : tensor<4x5x{element}>) outs(%i : tensor<{size}{element}>) {{
          ^bb0(%x: {element}, %acc: {element}):
            {body}
            linalg.yield %r : {element}
          }} -> tensor<{size}{element}>
          return %o : tensor<{size}{element}>
        }}""",
        x,
    )
    return value


FOLDS = {
    "sum": ("%r = arith.addf %acc, %x : f32", "0.5", lambda x: 0.5 + x.sum(1)),
    "product": ("%r = arith.mulf %x, %acc : f32", "2.0", lambda x: 2 * x.prod(1)),
    "maximum": ("%r = arith.maximumf %x, %acc : f32", "-1.0", lambda x: x.amax(1).clamp(min=-1)),
    "minnum": ("%r = arith.minnumf %acc, %x : f32", "1.0", lambda x: x.amin(1).clamp(max=1)),
    "sum of squares": (
        "%s = arith.mulf %x, %x : f32\n%r = arith.addf %s, %acc : f32",
        "0.0",
        lambda x: (x * x).sum(1),
    ),
    "last": ("%r = arith.negf %x : f32", "0.0", lambda x: -x[:, -1]),
    "last minus": (
        "%r = arith.subf %x, %acc : f32",
        "3.0",
        lambda x: x[:, 4] - x[:, 3] + x[:, 2] - x[:, 1] + x[:, 0] - 3,
    ),
    "horner": (
        "%h = arith.constant 0.5 : f32\n%s = arith.mulf %acc, %h : f32\n%r = arith.addf %s, %x : f32",
        "0.0",
        lambda x: sum(x[:, i] * 0.5 ** (4 - i) for i in range(5)),
    ),
    "select maximum": (
        "%c = arith.cmpf ogt, %x, %acc : f32\n%r = arith.select %c, %x, %acc : f32",
        "-9.0",
        lambda x: x.amax(1),
    ),
    "select minimum, mirrored": (
        "%c = arith.cmpf ogt, %acc, %x : f32\n%r = arith.select %c, %x, %acc : f32",
        "9.0",
        lambda x: x.amin(1),
    ),
}


@pytest.mark.parametrize("name", FOLDS)
def test_row_reductions(name: str) -> None:
    body, init, expected = FOLDS[name]
    x = torch.randn(4, 5)
    torch.testing.assert_close(reduction(body, init, "f32", x), expected(x))


def test_reduction_to_a_scalar_counts_every_iteration() -> None:
    x = torch.randn(4, 5)
    body = "%one = arith.constant 1.0 : f32\n%r = arith.addf %acc, %one : f32"
    assert reduction(body, "0.0", "f32", x, "#id2, #none", "").item() == 20.0


def test_maximum_propagates_nan_and_maxnum_does_not() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0, 0.0, 2.0]]).repeat(4, 1)
    assert reduction("%r = arith.maximumf %x, %acc : f32", "-9.0", "f32", x).isnan().all()
    assert reduction("%r = arith.maxnumf %x, %acc : f32", "-9.0", "f32", x).tolist() == [3.0] * 4


def test_selecting_maximum_keeps_its_order_with_nan() -> None:
    x = torch.tensor([[1.0, 5.0, math.nan, 3.0, 4.0]]).repeat(4, 1)
    body = "%c = arith.cmpf ule, %x, %acc : f32\n%r = arith.select %c, %acc, %x : f32"
    assert reduction(body, "-9.0", "f32", x).tolist() == [5.0] * 4


@pytest.mark.parametrize(("predicate", "position"), [("ogt", 1), ("oge", 3), ("olt", 0), ("ole", 4)])
def test_argmax_takes_the_first_or_last_of_equal_values(predicate: str, position: int) -> None:
    x = torch.tensor([[0.0, 2.0, 1.0, 2.0, 0.0], [0.0, 7.0, 7.0, 7.0, 0.0]])
    init = "-1.0e30" if predicate.startswith("og") else "1.0e30"
    _, index = run(
        f"""
        func.func @f(%t: tensor<2x5xf32>) -> (tensor<2xf32>, tensor<2xi64>) {{
          %c = arith.constant dense<{init}> : tensor<2xf32>
          %z = arith.constant dense<-1> : tensor<2xi64>
          %o:2 = linalg.generic {{indexing_maps = [#id2, #row, #row], iterator_types = ["parallel", "reduction"]}}
              ins(%t : tensor<2x5xf32>) outs(%c, %z : tensor<2xf32>, tensor<2xi64>) {{
          ^bb0(%x: f32, %best: f32, %at: i64):
            %i = linalg.index 1 : index
            %j = arith.index_cast %i : index to i64
            %m = arith.cmpf {predicate}, %x, %best : f32
            %v = arith.select %m, %x, %best : f32
            %k = arith.select %m, %j, %at : i64
            linalg.yield %v, %k : f32, i64
          }} -> (tensor<2xf32>, tensor<2xi64>)
          return %o#0, %o#1 : tensor<2xf32>, tensor<2xi64>
        }}""",
        x,
    )
    assert index[0].item() == position


def test_one_nest_with_an_elementwise_and_a_reduced_result() -> None:
    x = torch.randn(4, 5)
    doubled, total = run(
        """
        func.func @f(%t: tensor<4x5xf32>) -> (tensor<4x5xf32>, tensor<4xf32>) {
          %e = tensor.empty() : tensor<4x5xf32>
          %z = arith.constant dense<0.0> : tensor<4xf32>
          %o:2 = linalg.generic {indexing_maps = [#id2, #id2, #row], iterator_types = ["parallel", "reduction"]}
              ins(%t : tensor<4x5xf32>) outs(%e, %z : tensor<4x5xf32>, tensor<4xf32>) {
          ^bb0(%x: f32, %out: f32, %acc: f32):
            %d = arith.addf %x, %x : f32
            %s = arith.addf %acc, %d : f32
            linalg.yield %d, %s : f32, f32
          } -> (tensor<4x5xf32>, tensor<4xf32>)
          return %o#0, %o#1 : tensor<4x5xf32>, tensor<4xf32>
        }""",
        x,
    )
    torch.testing.assert_close(doubled, 2 * x)
    torch.testing.assert_close(total, 2 * x.sum(1))


def test_running_pair_that_no_rule_covers_runs_step_by_step() -> None:
    a, b = run(
        """
        func.func @f(%t: tensor<7xf32>) -> (tensor<f32>, tensor<f32>) {
          %c = arith.constant dense<0.0> : tensor<f32>
          %d = arith.constant dense<1.0> : tensor<f32>
          %o:2 = linalg.generic {indexing_maps = [#id1, affine_map<(d0) -> ()>, affine_map<(d0) -> ()>],
                                 iterator_types = ["reduction"]}
              ins(%t : tensor<7xf32>) outs(%c, %d : tensor<f32>, tensor<f32>) {
          ^bb0(%x: f32, %p: f32, %q: f32):
            %s = arith.addf %p, %q : f32
            linalg.yield %q, %s : f32, f32
          } -> (tensor<f32>, tensor<f32>)
          return %o#0, %o#1 : tensor<f32>, tensor<f32>
        }""",
        torch.zeros(7),
    )
    assert (a.item(), b.item()) == (13.0, 21.0)


def test_pooling_window_is_read_through_its_map() -> None:
    x = torch.randn(2, 11)
    (value,) = run(
        """
        func.func @f(%t: tensor<2x11xf32>) -> tensor<2x5xf32> {
          %w = tensor.empty() : tensor<3xf32>
          %i = arith.constant dense<0xFF800000> : tensor<2x5xf32>
          %o = linalg.generic {
              indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1 * 2 + d2)>, affine_map<(d0, d1, d2) -> (d2)>,
                               affine_map<(d0, d1, d2) -> (d0, d1)>],
              iterator_types = ["parallel", "parallel", "reduction"]}
              ins(%t, %w : tensor<2x11xf32>, tensor<3xf32>) outs(%i : tensor<2x5xf32>) {
          ^bb0(%x: f32, %unused: f32, %acc: f32):
            %r = arith.maximumf %x, %acc : f32
            linalg.yield %r : f32
          } -> tensor<2x5xf32>
          return %o : tensor<2x5xf32>
        }""",
        x,
    )
    torch.testing.assert_close(value, F.max_pool1d(x, 3, 2))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("-d0 + 5", lambda x: x.flip(0)),
        ("d0 floordiv 2 + d0 mod 2", lambda x: x[[0, 1, 1, 2, 2, 3]]),
        ("(d0 + 3) mod 6", lambda x: x.roll(3)),
        ("d0 ceildiv 2", lambda x: x[[0, 1, 1, 2, 2, 3]]),
    ],
)
def test_quasi_affine_reads(expression: str, expected) -> None:
    x = torch.randn(6)
    (value,) = run(
        f"""
        func.func @f(%t: tensor<6xf32>) -> tensor<6xf32> {{
          %e = tensor.empty() : tensor<6xf32>
          %o = linalg.generic {{indexing_maps = [affine_map<(d0) -> ({expression})>, #id1], iterator_types = ["parallel"]}}
              ins(%t : tensor<6xf32>) outs(%e : tensor<6xf32>) {{
          ^bb0(%x: f32, %out: f32):
            linalg.yield %x : f32
          }} -> tensor<6xf32>
          return %o : tensor<6xf32>
        }}""",
        x,
    )
    assert torch.equal(value, expected(x))


def test_large_elementwise_space_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from topo_opt.reference import loop_nest

    monkeypatch.setattr(loop_nest, "CHUNK_ELEMENTS", 7)
    x = torch.randn(4, 5)
    torch.testing.assert_close(reduction("%r = arith.maximumf %x, %acc : f32", "-9.0", "f32", x), x.amax(1))
    index = (
        "%i = linalg.index 0 : index\n%j = arith.index_cast %i : index to i64\n%r = arith.addi %a, %j : i64"
    )
    assert elementwise(index, "i64", "i64", torch.zeros(20, dtype=torch.int64)).tolist() == list(range(20))


def test_half_arithmetic_rounds_once_per_body() -> None:
    a = torch.full((3,), 256.0, dtype=torch.bfloat16)
    body = "%o = arith.constant 1.0 : bf16\n%s = arith.addf %a, %o : bf16\n%r = arith.subf %s, %a : bf16"
    assert elementwise(body, "bf16", "bf16", a).tolist() == [1.0] * 3
    cast = "%w = arith.extf %a : bf16 to f32\n%o = arith.constant 1.0 : f32\n%s = arith.addf %w, %o : f32\n"
    cast += "%n = arith.truncf %s : f32 to bf16\n%r = arith.subf %n, %a : bf16"
    assert elementwise(cast, "bf16", "bf16", a).tolist() == [0.0] * 3, "a user's cast rounds"


INTEGER_BODIES = {
    "unsigned compare": ("%r = arith.cmpi ult, %a, %b : i8", "i1", [True, True, False]),
    "signed compare": ("%r = arith.cmpi slt, %a, %b : i8", "i1", [True, False, True]),
    "unsigned divide": ("%r = arith.divui %b, %a : i8", "i8", [3, -2, 0]),
    "truncating divide": ("%r = arith.divsi %b, %a : i8", "i8", [3, -2, -127]),
    "remainder": ("%r = arith.remsi %b, %a : i8", "i8", [0, 0, 0]),
    "unsigned maximum": ("%r = arith.maxui %a, %b : i8", "i8", [3, -2, -1]),
    "wrapping add": ("%r = arith.addi %b, %b : i8", "i8", [6, -4, -2]),
    "logical shift": ("%c = arith.constant 1 : i8\n%r = arith.shrui %b, %c : i8", "i8", [1, 127, 63]),
    "arithmetic shift": ("%c = arith.constant 1 : i8\n%r = arith.shrsi %b, %c : i8", "i8", [1, -1, 63]),
    "zero extension": ("%r = arith.extui %b : i8 to i32", "i32", [3, 254, 127]),
    "sign extension": ("%r = arith.extsi %b : i8 to i32", "i32", [3, -2, 127]),
    "unsigned to float": ("%r = arith.uitofp %b : i8 to f32", "f32", [3.0, 254.0, 127.0]),
    "low bit": ("%r = arith.trunci %b : i8 to i1", "i1", [True, False, True]),
    "leading zeros": ("%r = math.ctlz %b : i8", "i8", [6, 0, 1]),
}


@pytest.mark.parametrize("name", INTEGER_BODIES)
def test_integer_ops(name: str) -> None:
    body, result, expected = INTEGER_BODIES[name]
    a, b = torch.tensor([1, 1, -1], dtype=torch.int8), torch.tensor([3, -2, 127], dtype=torch.int8)
    assert elementwise(body, "i8", result, a, b).tolist() == expected


BOOLEAN_BODIES = {
    "add": ("%r = arith.addi %a, %b : i1", "i1", [False, True, True, False]),
    "multiply": ("%r = arith.muli %a, %b : i1", "i1", [False, False, False, True]),
    "signed less": ("%r = arith.cmpi slt, %a, %b : i1", "i1", [False, False, True, False]),
    "unsigned less": ("%r = arith.cmpi ult, %a, %b : i1", "i1", [False, True, False, False]),
    "sign extension": ("%r = arith.extsi %a : i1 to i32", "i32", [0, 0, -1, -1]),
    "zero extension": ("%r = arith.extui %a : i1 to i32", "i32", [0, 0, 1, 1]),
    "to float": ("%r = arith.sitofp %a : i1 to f32", "f32", [0.0, 0.0, -1.0, -1.0]),
}


@pytest.mark.parametrize("name", BOOLEAN_BODIES)
def test_one_bit_integers(name: str) -> None:
    body, result, expected = BOOLEAN_BODIES[name]
    a, b = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    assert elementwise(body, "i1", result, a, b).tolist() == expected


def test_float_predicates_with_nan() -> None:
    a, b = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([2.0, 2.0, 1.0])
    expected = {
        "oeq": [0, 1, 0], "ogt": [0, 0, 0], "oge": [0, 1, 0], "olt": [1, 0, 0], "ole": [1, 1, 0], "one": [1, 0, 0],
        "ord": [1, 1, 0], "ueq": [0, 1, 1], "ugt": [0, 0, 1], "uge": [0, 1, 1], "ult": [1, 0, 1], "ule": [1, 1, 1],
        "une": [1, 0, 1], "uno": [0, 0, 1],
    }  # fmt: skip
    for predicate, wanted in expected.items():
        found = elementwise(f"%r = arith.cmpf {predicate}, %a, %b : f32", "f32", "i1", a, b)
        assert found.tolist() == [bool(w) for w in wanted], predicate


def test_constants_of_every_element_type() -> None:
    found = run(
        """
        func.func @f() -> (tensor<2xbf16>, tensor<2xcomplex<f32>>, tensor<3xi1>, tensor<bf16>, tensor<2x2xf32>, tensor<2xui8>,
                           tensor<2xf8E4M3FN>, tensor<1xf64>) {
          %a = arith.constant dense<[1.5, 0xFF80]> : tensor<2xbf16>
          %b = arith.constant dense<[(1.0, -2.0), (0x7FC00000, 0.5)]> : tensor<2xcomplex<f32>>
          %c = arith.constant dense<[true, false, true]> : tensor<3xi1>
          %d = arith.constant dense<-0.25> : tensor<bf16>
          %e = arith.constant dense<0x7F800000> : tensor<2x2xf32>
          %g = arith.constant dense<[0.5, -448.0]> : tensor<2xf8E4M3FN>
          %h = arith.constant dense<0.1> : tensor<1xf64>
          return %a, %b, %c, %d, %e, %g, %h
              : tensor<2xbf16>, tensor<2xcomplex<f32>>, tensor<3xi1>, tensor<bf16>, tensor<2x2xf32>, tensor<2xf8E4M3FN>,
                tensor<1xf64>
        }""".replace("tensor<2xui8>,\n", "\n")
    )
    assert found[0].tolist() == [1.5, -math.inf] and found[0].dtype == torch.bfloat16
    assert found[1][0].item() == 1 - 2j and math.isnan(found[1][1].real.item())
    assert found[2].tolist() == [True, False, True]
    assert found[3].shape == () and found[3].item() == -0.25
    assert found[4].shape == (2, 2) and found[4].isinf().all()
    assert found[5].float().tolist() == [0.5, -448.0]
    assert found[6].item() == 0.1


def test_large_constant_printed_as_raw_bytes() -> None:
    values = torch.randn(300).to(torch.bfloat16)
    raw = values.view(torch.int16).numpy().tobytes().hex().upper()
    text = f'func.func @f() -> tensor<300xbf16> {{ %a = arith.constant dense<"0x{raw}"> : tensor<300xbf16>\n'
    assert torch.equal(run(text + "return %a : tensor<300xbf16> }")[0], values)


def test_slices_pads_and_joins() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    sliced, inserted, padded, joined, coordinates = run(
        """
        func.func @f(%t: tensor<3x4xf32>) -> (tensor<2xf32>, tensor<3x4xf32>, tensor<4x7xf32>, tensor<6x4xf32>, tensor<2x3xf32>) {
          %s = tensor.extract_slice %t[1, 1] [1, 2] [1, 2] : tensor<3x4xf32> to tensor<2xf32>
          %i = tensor.insert_slice %s into %t[0, 0] [2, 1] [2, 1] : tensor<2xf32> into tensor<3x4xf32>
          %z = arith.constant -1.0 : f32
          %p = tensor.pad %t low[1, 0] high[0, 3] {
          ^bb0(%a: index, %b: index):
            tensor.yield %z : f32
          } : tensor<3x4xf32> to tensor<4x7xf32>
          %c = tensor.concat dim(0) %t, %i : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<6x4xf32>
          %g = tensor.generate {
          ^bb0(%a: index, %b: index):
            %k = arith.index_cast %b : index to i64
            %q = arith.sitofp %k : i64 to f32
            tensor.yield %q : f32
          } : tensor<2x3xf32>
          return %s, %i, %p, %c, %g
              : tensor<2xf32>, tensor<3x4xf32>, tensor<4x7xf32>, tensor<6x4xf32>, tensor<2x3xf32>
        }""",
        x,
    )
    wanted = x.clone()
    wanted[[0, 2], 0] = x[1, [1, 3]]
    assert torch.equal(sliced, x[1, 1::2]) and torch.equal(inserted, wanted)
    assert torch.equal(padded, F.pad(x, (0, 3, 1, 0), value=-1.0))
    assert torch.equal(joined, torch.cat([x, wanted])) and coordinates.tolist() == [[0.0, 1.0, 2.0]] * 2


def test_reading_a_tensor_nobody_wrote_shows() -> None:
    (value,) = run(
        "func.func @f() -> tensor<3xf32> { %e = tensor.empty() : tensor<3xf32> return %e : tensor<3xf32> }"
    )
    assert value.isnan().all()


ATTENTION = """
func.func @f(%q: tensor<2x6x5x8xbf16>, %k: tensor<2x3x7x8xbf16>, %v: tensor<2x3x7x4xbf16>, %m: tensor<2x1x5x7xi1>)
    -> tensor<2x6x5x4xbf16> {
  %r = "topo.attention"(%q, %k, %v, %m) {
      scale = 0.3 : f64, causal = CAUSAL, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>}
      : (tensor<2x6x5x8xbf16>, tensor<2x3x7x8xbf16>, tensor<2x3x7x4xbf16>, tensor<2x1x5x7xi1>) -> tensor<2x6x5x4xbf16>
  return %r : tensor<2x6x5x4xbf16>
}
"""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score_elements", [1, 1 << 24])
def test_attention(causal: bool, score_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from topo_opt.reference import topo_ops

    monkeypatch.setattr(topo_ops, "SCORE_ELEMENTS", score_elements)
    q, k, v = (torch.randn(s).bfloat16() for s in ((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)))
    mask = torch.rand(2, 1, 5, 7) > 0.3
    mask[1, 0, 2] = False
    allowed = mask & torch.ones(5, 7, dtype=torch.bool).tril() if causal else mask
    wide = [x.float() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=allowed, scale=0.3)
    wanted = wanted.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    (found,) = run(ATTENTION.replace("CAUSAL", str(causal).lower()), q, k, v, mask)
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=2e-2)
    assert not found[1, :, 2].any(), "a row without positions is zero"


INDEX_UPDATE = """
func.func @f(%d: tensor<2x4x3xf32>, %s: tensor<2x2x3xf32>, %i: tensor<2xi64>) -> tensor<2x4x3xf32> {
  %r = "topo.index_update"(%d, %s, %i) {dim = 1 : i64}
      : (tensor<2x4x3xf32>, tensor<2x2x3xf32>, tensor<2xi64>) -> tensor<2x4x3xf32>
  return %r : tensor<2x4x3xf32>
}
"""


def test_index_update_copies_and_checks() -> None:
    dest, source = torch.randn(2, 4, 3), torch.randn(2, 2, 3)
    before = dest.clone()
    (found,) = run(INDEX_UPDATE, dest, source, torch.tensor([3, 0]))
    assert torch.equal(found, before.index_copy(1, torch.tensor([3, 0]), source)) and torch.equal(
        dest, before
    )
    with pytest.raises(InputError, match="out of range for size 4"):
        run(INDEX_UPDATE, dest, source, torch.tensor([0, 4]))


def _scan(body: str, inclusive: bool) -> str:
    return f"""
    func.func @f(%t: tensor<2x4xf32>) -> (tensor<2x4xf32>, tensor<2xf32>) {{
      %e = tensor.empty() : tensor<2x4xf32>
      %z = arith.constant dense<1.0> : tensor<2xf32>
      %r:2 = tm_tensor.scan dimension(1) inclusive({str(inclusive).lower()})
          ins(%t : tensor<2x4xf32>) outs(%e, %z : tensor<2x4xf32>, tensor<2xf32>) {{
      ^bb0(%a: f32, %b: f32):
        {body}
        tm_tensor.yield %r : f32
      }} -> tensor<2x4xf32>, tensor<2xf32>
      return %r#0, %r#1 : tensor<2x4xf32>, tensor<2xf32>
    }}"""


def test_scans() -> None:
    x = torch.randn(2, 4)
    running, last = run(_scan("%r = arith.addf %a, %b : f32", True), x)
    torch.testing.assert_close(running, x.cumsum(1))
    torch.testing.assert_close(last, x.sum(1))
    shifted, _ = run(_scan("%r = arith.mulf %a, %b : f32", False), x)
    torch.testing.assert_close(shifted, torch.cat([torch.ones(2, 1), x.cumprod(1)[:, :3]], 1))
    general = "%h = arith.constant 0.5 : f32\n%s = arith.mulf %a, %h : f32\n%r = arith.addf %s, %b : f32"
    decayed, _ = run(_scan(general, True), x)
    torch.testing.assert_close(decayed[:, 2], x[:, 2] + 0.5 * x[:, 1] + 0.25 * x[:, 0])


def _scatter(body: str) -> str:
    return f"""
    func.func @f(%u: tensor<4xf32>, %i: tensor<4x1xi32>, %t: tensor<3xf32>) -> tensor<3xf32> {{
      %r = tm_tensor.scatter {{dimension_map = array<i64: 0>}} unique_indices(false)
          ins(%u, %i : tensor<4xf32>, tensor<4x1xi32>) outs(%t : tensor<3xf32>) {{
      ^bb0(%new: f32, %old: f32):
        {body}
        tm_tensor.yield {"%r" if body else "%new"} : f32
      }} -> tensor<3xf32>
      return %r : tensor<3xf32>
    }}"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%r = arith.addf %new, %old : f32", [11.0, 20.0, 39.0]),
        ("", [1.0, 20.0, 4.0]),
        ("%c = arith.constant 0.0 : f32\n%r = arith.addf %new, %c : f32", [1.0, 20.0, 4.0]),
        ("%r = arith.subf %new, %old : f32", [-9.0, 20.0, 32.0]),
    ],
    ids=["add", "replace", "replace, by a computed value", "subtract"],
)
def test_scatter_in_order(body: str, expected: list[float]) -> None:
    updates, indices = (
        torch.tensor([2.0, 1.0, 3.0, 4.0]),
        torch.tensor([[2], [0], [2], [2]], dtype=torch.int32),
    )
    original = torch.tensor([10.0, 20.0, 30.0])
    wanted = torch.tensor(expected)
    if "subf" in body:
        wanted[2] = 4.0 - (3.0 - (2.0 - 30.0))
    (found,) = run(_scatter(body), updates, indices, original)
    assert torch.equal(found, wanted)
    with pytest.raises(InputError, match="outside the tensor"):
        run(_scatter(body), updates, indices - 1, original)


KERNELS = """
func.func @main(%x: tensor<3xf32> {topo.kind = "input", topo.name = "x", topo.dtype = "float32"},
                %b: tensor<3xi8> {topo.kind = "buffer", topo.name = "mask", topo.dtype = "uint8"})
    -> (tensor<3xi8> {topo.kind = "mutation", topo.name = "mask", topo.dtype = "uint8"},
        tensor<3xf32> {topo.kind = "output", topo.name = "0", topo.dtype = "float32"}) {
  %y = func.call @k(%x) : (tensor<3xf32>) -> tensor<3xf32>
  %z = func.call @k(%y) : (tensor<3xf32>) -> tensor<3xf32>
  %s = func.call @aten.sort(%z) : (tensor<3xf32>) -> tensor<3xf32>
  return %b, %s : tensor<3xi8>, tensor<3xf32>
}
func.func private @k(%x: tensor<3xf32>) -> tensor<3xf32> attributes {topo.kernel = {family = "loops"}} {
  %e = tensor.empty() : tensor<3xf32>
  %o = linalg.generic {indexing_maps = [#id1, #id1], iterator_types = ["parallel"]}
      ins(%x : tensor<3xf32>) outs(%e : tensor<3xf32>) {
  ^bb0(%a: f32, %out: f32):
    %r = arith.negf %a : f32
    linalg.yield %r : f32
  } -> tensor<3xf32>
  return %o : tensor<3xf32>
}
func.func private @aten.sort(tensor<3xf32>) -> tensor<3xf32> attributes {
  topo.aten = "aten.neg.default", topo.call = "{\\22args\\22: [{\\22operand\\22: 0}], \\22kwargs\\22: {}}"}
"""


def test_kernels_aten_calls_and_binding() -> None:
    module = ir.Module.parse(MAPS + KERNELS, load(ir.Context()))
    x, mask = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0, 200, 255], dtype=torch.uint8)
    seen: list[str] = []
    arguments = reference.bind_inputs(module, "main", {"mask": mask}, [x])
    results = reference.run(module, "main", arguments, trace=lambda op, _: seen.append(op.name))
    outputs, mutations = reference.split_results(module, "main", results)
    assert torch.equal(outputs[0], -x) and torch.equal(mutations["mask"], mask)
    assert mutations["mask"].dtype == torch.uint8
    assert seen.count("linalg.generic") == 2 and seen.count("func.call") == 3
    with pytest.raises(InputError, match="needs the buffer 'mask'"):
        reference.bind_inputs(module, "main", {}, [x])
    with pytest.raises(InputError, match="takes 1 inputs, 2 were given"):
        reference.bind_inputs(module, "main", {"mask": mask}, [x, x])
    with pytest.raises(
        InputError, match=r"argument 'x' of @main is tensor<3xf32>, a torch\.float32 tensor of shape"
    ):
        reference.run(module, "main", [x[:2], mask])
    with pytest.raises(InputError, match="has no function @other"):
        reference.run(module, "other", [])


def test_gather_out_of_range_is_an_error() -> None:
    body = "%i = arith.index_cast %a : i64 to index\n%c = arith.constant dense<[5, 6]> : tensor<2xi64>\n"
    body += "%r = tensor.extract %c[%i] : tensor<2xi64>"
    assert elementwise(body, "i64", "i64", torch.tensor([1, 0])).tolist() == [6, 5]
    with pytest.raises(InputError, match="index -1 is out of range for dimension 0 of size 2"):
        elementwise(body, "i64", "i64", torch.tensor([1, -1]))


def test_failed_check_of_the_model_is_an_error() -> None:
    body = '%z = arith.constant 0 : i64\n%c = arith.cmpi sge, %a, %z : i64\ncf.assert %c, "negative"\n'
    body += "%r = arith.addi %a, %z : i64"
    assert elementwise(body, "i64", "i64", torch.tensor([1, 0])).tolist() == [1, 0]
    with pytest.raises(InputError, match="the model's own check failed: negative"):
        elementwise(body, "i64", "i64", torch.tensor([1, -1]))


def test_unknown_op_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"no rule for linalg\.softmax"):
        run(
            """
            func.func @f(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
              %e = tensor.empty() : tensor<2x3xf32>
              %r = linalg.softmax dimension(1) ins(%x : tensor<2x3xf32>) outs(%e : tensor<2x3xf32>) -> tensor<2x3xf32>
              return %r : tensor<2x3xf32>
            }""",
            torch.zeros(2, 3),
        )
