"""Attention that models spell out with products and a softmax becomes one op; what is something else is told apart."""

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from topo_opt_case import compiled
from torch import Tensor
from torch_mlir import ir

import topo_opt
from topo_opt import reference
from topo_opt.frontend.ingest import structured_module
from topo_opt.pipeline.run import run
from topo_opt.pipeline.spec import parse
from topo_opt.runtime.numerics import compare

B, H, M, N, D = 2, 4, 6, 10, 8


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v


def scaled_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q * D**-0.5) @ k.mT, dim=-1) @ v


def wide_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.1, training=False), v)


def wide_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q.float() @ k.float().transpose(-1, -2), -1).to(v.dtype) @ v


def causal_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)
    hidden = torch.triu(torch.ones(M, N, dtype=torch.bool), 1)
    return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


def causal_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    keep = torch.ones(M, N, dtype=torch.bool).tril()
    return F.softmax(torch.where(keep, scores, torch.finfo(scores.dtype).min), dim=-1) @ v


def causal_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((M, N), float("-inf"), dtype=q.dtype).triu(1)
    return F.softmax(q @ k.transpose(-2, -1) + mask, dim=-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.transpose(-2, -1) * 0.5 / 5.0) * 5.0
    keep = torch.ones(M, N, dtype=torch.bool).tril()
    return F.softmax(scores.masked_fill(~keep, float("-inf")), dim=-1) @ v


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).mul(0.25).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (B, H))


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhmd,bhnd->bhmn", q, k).softmax(-1)
    return torch.einsum("bhmn,bhne->bhme", weights, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t[:, :2, None].expand(B, 2, 2, N, D).reshape(B, H, N, D) for t in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


SPELLINGS = {
    plain: "", scaled_query: "", wide_softmax: "", wide_product: "", batched: "", einsum: "", grouped: "",
    causal_filled: "causal", causal_where: "causal", causal_added: "causal", capped: "causal softcap",
}  # fmt: skip


def attention_ops(module: ir.Module) -> list[ir.Operation]:
    return [
        o.operation
        for f in module.body.operations
        for o in f.operation.regions[0].blocks[0].operations
        if o.operation.name == "topo.attention"
    ]


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, n, D).to(dtype) for n in (M, N, N))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spelling(spelling: Callable[..., Tensor], dtype: torch.dtype) -> None:
    arguments = inputs(dtype)
    module = structured_module(spelling, arguments)
    with module.context:
        run(parse("builtin.module(topo-raise-masks, topo-verify-structured)"), module)
    (op,) = attention_ops(module)
    assert op.attributes["causal"].value == ("causal" in SPELLINGS[spelling])
    assert ("softcap" in op.attributes) == ("softcap" in SPELLINGS[spelling])
    assert len(op.operands) == 3
    assert "linalg.contract" not in str(module)
    (found,) = reference.run(module, "main", list(arguments))
    exact = spelling(*(a.double() for a in arguments))
    assert compare(found, spelling(*arguments), exact).passed


def returns_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ k.transpose(-2, -1), -1)
    return weights @ v, weights


def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat((q @ k.transpose(-2, -1), q[..., :1]), -1)
    return torch.softmax(scores, -1)[..., :-1] @ v


def through_sine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.sin(q @ k.transpose(-2, -1)), -1) @ v


def over_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -2) @ v


MISSES = {
    returns_weights: "its weights are used elsewhere too",
    through_sine: "scores pass through aten.sin.default",
}


@pytest.mark.parametrize(
    "function", [returns_weights, with_sink, through_sine, over_rows], ids=lambda f: f.__name__
)
def test_other_programs_stay(function: Callable[..., Tensor]) -> None:
    arguments = inputs(torch.float32)
    module = structured_module(function, arguments)
    assert not attention_ops(module)
    found = reference.run(module, "main", list(arguments))
    expected = function(*arguments)
    for ours, theirs in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (main,) = [f.operation for f in module.body.operations]
    told = (
        [ir.StringAttr(a).value for a in main.attributes["topo.missed"]]
        if "topo.missed" in main.attributes
        else []
    )
    if function in MISSES:
        assert len(told) == 1 and told[0].startswith(MISSES[function])
        assert re.search(r"\.py:\d+\)$", told[0])


@pytest.mark.parametrize("spelled", [True, False])
def test_attention_in_double_precision_is_left_to_aten(spelled: bool) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if spelled:
                return torch.softmax(q @ k.transpose(-2, -1), -1) @ v
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    arguments, model = inputs(torch.float64), Attention()
    torch.testing.assert_close(compiled(model, arguments)(*arguments), model(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("fill", [-65504.0, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("choose", [False, True], ids=["masked_fill", "where"])
def test_rows_without_keys_have_equal_weights_where_a_finite_number_is_filled_in(dtype, fill, choose) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.mT).float()
        hidden = torch.where(keep, scores, fill) if choose else scores.masked_fill(~keep, fill)
        return hidden.softmax(-1).to(v.dtype) @ v

    keep = torch.ones(M, N, dtype=torch.bool).tril()
    keep[2] = False
    q, k, v = (torch.randn(B, H, rows, D).to(dtype) for rows in (M, N, N))
    program = topo_opt.compile(Function(attend), (q, k, v, keep), topology="cpu")
    assert [k.family for k in program.bundle.plan.kernels.values()].count("attention") == 1
    result = program(q, k, v, keep)
    torch.testing.assert_close(result, attend(q, k, v, keep), rtol=0.02, atol=0.02)
    torch.testing.assert_close(result[:, :, 2].float(), v.float().mean(-2), rtol=0.02, atol=0.02)


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)
