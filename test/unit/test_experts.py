"""Mixtures of experts as models write them: what is raised to grouped products, what is not, and that the values stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lowering import left_to_aten, lowered
from torch import Tensor, nn

from topo_opt import reference

TOKENS, SHARE, WIDTH, HIDDEN, EXPERTS = 7, 2, 16, 8, 5


class Experts(nn.Module):
    """Rows sorted by expert, multiplied group by group, put back by `back`; options as models have them."""

    def __init__(self, *, bias=False, transposed=False, norm=False, back="gather", stray=False):
        super().__init__()
        self.options = bias, transposed, norm, back, stray
        shape = (EXPERTS, WIDTH, 2 * HIDDEN) if transposed else (EXPERTS, 2 * HIDDEN, WIDTH)
        self.up = nn.Parameter(torch.randn(shape) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        bias, transposed, norm, back, stray = self.options
        weights, expert = torch.topk((x @ self.router.T).sigmoid(), SHARE)
        sorted_expert, order = torch.sort(expert.reshape(-1))
        rows = x[order // SHARE]
        counts = torch.histc(sorted_expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        both = torch._grouped_mm(rows, self.up if transposed else self.up.transpose(-2, -1), offs=ends)
        if bias:
            both = both + self.bias[sorted_expert]
        gate, up = both.chunk(2, dim=-1)
        hidden = F.gelu(gate) * up
        result = torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)
        if norm:
            result = F.rms_norm(result, (WIDTH,))
        result = result * weights.reshape(-1)[order].unsqueeze(-1)
        if back == "gather":
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0])
            result = result[inverse].view(TOKENS, SHARE, WIDTH).sum(1)
        else:
            result = torch.zeros_like(x).index_add_(0, order // SHARE, result)
        return (result, hidden.cumsum(0)) if stray else (result,)


class Gathered(nn.Module):
    """The matrices of a row gathered, then multiplied one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        left = torch.bmm(self.weights[expert], x.unsqueeze(-1)).squeeze(-1)
        right = torch.bmm((x + 1).unsqueeze(1), self.weights.transpose(1, 2)[expert]).squeeze(1)
        return left - 2 * right


def products(module: str) -> int:
    return module.count('"topo.grouped_product"')


def evaluate(structured, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    state = {n: p.detach() for n, p in model.named_parameters()}
    arguments = reference.bind_inputs(structured, "main", state, list(inputs))
    return reference.run(structured, "main", arguments)


def half(model: nn.Module) -> tuple[nn.Module, Tensor]:
    """The model in bf16, which torch's grouped products want, and an input."""
    return model.to(torch.bfloat16).eval(), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)


OPTIONS = [
    {}, {"bias": True}, {"transposed": True}, {"norm": True}, {"back": "add"}, {"bias": True, "norm": True, "back": "add"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_sorting_by_expert_disappears(options):
    torch.manual_seed(0)
    model, x = half(Experts(**options))
    program = torch.export.export(model, (x,), strict=False)
    structured = lowered(program)
    assert products(str(structured)) == 2
    assert left_to_aten(structured) == set()
    found = evaluate(structured, model, (x,))[0]
    torch.testing.assert_close(found, model(x)[0], rtol=2e-2, atol=2e-2)


def test_rows_that_are_used_in_sorted_order_stay_sorted():
    torch.manual_seed(0)
    model, x = half(Experts(stray=True))
    structured = lowered(torch.export.export(model, (x,), strict=False))
    assert products(str(structured)) == 0
    assert {"sort", "_grouped_mm"} <= left_to_aten(structured)


def test_gathered_matrices_are_never_made():
    torch.manual_seed(0)
    model, x = Gathered().eval(), torch.randn(4, WIDTH)
    expert = torch.tensor([3, 0, -1, 3])
    structured = lowered(torch.export.export(model, (x, expert), strict=False))
    text = str(structured)
    assert products(text) == 2 and "tensor<4x8x16xf32>" not in text
    torch.testing.assert_close(evaluate(structured, model, (x, expert))[0], model(x, expert))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("largest", [True, False])
def test_top_k_along_any_dim(dim, largest):
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.topk(x, 2, dim=dim, largest=largest)

    x = torch.randperm(60).reshape(3, 4, 5).to(torch.float32)
    structured = lowered(torch.export.export(Picks(), (x,), strict=False))
    assert left_to_aten(structured) == set()
    values, indices = evaluate(structured, Picks(), (x,))
    wanted = Picks()(x)
    assert torch.equal(values, wanted[0]) and torch.equal(indices, wanted[1])


def test_long_rows_are_left_to_torch():
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.topk(x, 2)[0]

    structured = lowered(torch.export.export(Picks(), (torch.randn(2, 4096),), strict=False))
    assert left_to_aten(structured) == {"topk"}
