"""Norms between two products: what the first leaves for the second, in plans and in numbers."""

import pytest
import torch
import torch.nn.functional as F
from float64_rule import check
from test_fused_products import by_hand, divided, one_plus, scheduled, without_weight
from topo_opt_case import compiled
from torch import Tensor, nn
from torch_mlir import ir

from topo_opt.runtime.numerics import float64_outputs


class Block(nn.Module):
    """A product with a residual, a norm, a gated product back, and a norm before the last product."""

    def __init__(self, width: int, norm) -> None:
        super().__init__()
        self.norm = norm
        self.o, self.gate, self.up, self.down, self.head = (
            nn.Linear(a, b, bias=bias)
            for a, b, bias in (
                (40, width, True),
                (width, 48, False),
                (width, 48, False),
                (48, width, False),
                (width, 72, False),
            )
        )
        self.weights = nn.Parameter(torch.randn(2, width) / 4 + 1)

    def forward(self, x: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.o(heads)
        normed = self.norm(x, self.weights[0])
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return self.head(self.norm(x, self.weights[1])), x


def handed(module: ir.Module) -> int:
    """How many kernels leave parts of rows: their last result is in f32 beside narrow ones."""
    kinds = [
        [str(t) for t in ir.FunctionType(ir.TypeAttr(v.operation.attributes["function_type"]).value).results]
        for v in module.body.operations
        if "topo.kernel" in v.operation.attributes
    ]
    return sum(len(k) > 1 and k[-1].endswith("xf32>") for k in kinds)


def made(width: int, rows: tuple[int, ...], norm=by_hand, dtype=torch.bfloat16) -> tuple[Block, tuple]:
    torch.manual_seed(0)
    module = Block(width, norm).to(dtype).eval().requires_grad_(False)
    return module, (torch.randn(*rows, width).to(dtype), torch.randn(*rows, 40).to(dtype))


@pytest.mark.parametrize(
    ("width", "rows"), [(64, (8,)), (64, (3,)), (96, (5, 1)), (48, (1, 7)), (64, (33,)), (64, (2, 3, 4))]
)
def test_a_norm_between_products_is_split(width, rows) -> None:
    module, args = made(width, rows)
    assert handed(scheduled(module, args)) == 2
    program = compiled(module, args)
    assert not program.fallbacks
    check(program(*args), module(*args), float64_outputs(module, args, {}))


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (divided, torch.bfloat16),
        (one_plus, torch.bfloat16),
        (without_weight, torch.bfloat16),
        (by_hand, torch.float16),
        (one_plus, torch.float32),
    ],
)
def test_spellings_and_types(norm, dtype) -> None:
    module, args = made(64, (8,), norm, dtype)
    check(compiled(module, args)(*args), module(*args), float64_outputs(module, args, {}))


@pytest.mark.parametrize(
    ("width", "rows"),
    [(64, (2,)), (64, (65,)), (40, (8,)), (16, (8,))],
    ids=["few rows", "many rows", "no chunks", "one chunk"],
)
def test_what_stays_with_its_product(width, rows) -> None:
    module, args = made(width, rows)
    assert handed(scheduled(module, args)) == 0
    check(compiled(module, args)(*args), module(*args), float64_outputs(module, args, {}))


class TwoNorms(nn.Module):
    """Two products normalise one value, with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 64, bias=False)
        self.left, self.right = nn.Linear(64, 48, bias=False), nn.Linear(64, 72, bias=False)
        self.weights = nn.Parameter(torch.randn(2, 64) / 4 + 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return self.left(by_hand(x, self.weights[0])), self.right(by_hand(x, self.weights[1]))


def test_norms_that_differ_are_not_mixed_up() -> None:
    torch.manual_seed(0)
    module = TwoNorms().to(torch.bfloat16).eval().requires_grad_(False)
    x = torch.randn(8, 40).to(torch.bfloat16)
    assert handed(scheduled(module, (x,))) == 1
    check(compiled(module, (x,))(x), module(x), float64_outputs(module, (x,), {}))


class Chain(nn.Module):
    """Every product but the first and the last takes a norm and makes rows for one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.weights = nn.ParameterList(torch.randn(64) / 4 + 1 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.weights):
            x = by_hand(layer(x), weight)
        return self.layers[-1](x)


def test_a_product_can_take_a_norm_and_leave_one() -> None:
    torch.manual_seed(0)
    module = Chain().to(torch.bfloat16).eval().requires_grad_(False)
    x = torch.randn(8, 64).to(torch.bfloat16)
    kernels = scheduled(module, (x,))
    assert handed(kernels) == 2  # the first, and one for the two in the middle
    check(compiled(module, (x,))(x), module(x), float64_outputs(module, (x,), {}))
