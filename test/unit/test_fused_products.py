"""What joins a product's kernel: norms in every spelling, gates, rotations, appends; plans and numbers against eager."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from float64_rule import check
from topo_opt_case import compiled
from torch import Tensor, nn
from torch_mlir import ir

from topo_opt.frontend.ingest import structured_module
from topo_opt.runtime.numerics import float64_outputs

WIDTH = 24


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def divided(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w


def one_plus(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + w.float())).type_as(x)


def without_weight(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6).to(x.dtype)


def of_torch(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), w, 1e-6)


SPELLINGS = (by_hand, divided, one_plus, without_weight, of_torch)


class Projections(nn.Module):
    """Two products of one norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.randn(WIDTH) + 1)
        self.first, self.second = nn.Linear(WIDTH, 16, bias=False), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x, self.weight)
        return self.first(normed), self.second(normed)


class Layer(nn.Module):
    """A decoder layer of one token a sequence, with a cache."""

    def __init__(self, batch: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in (32, 16, 16))
        self.o, self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((32, WIDTH), (WIDTH, 40), (WIDTH, 40), (40, WIDTH))
        )
        self.weights = nn.Parameter(torch.randn(2, WIDTH) / 4 + 1)
        self.register_buffer("keys", torch.randn(batch, 2, 12, 8))
        self.register_buffer("values", torch.randn(batch, 2, 12, 8))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        normed = by_hand(x, self.weights[0])
        heads = [f(normed).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        turned = []
        for y in heads[:2]:
            left, right = y.chunk(2, -1)
            turned.append(y * cos + torch.cat((-right, left), -1) * sin)
        self.keys.index_copy_(2, at, turned[1])
        self.values.index_copy_(2, at, heads[2])
        mixed = F.scaled_dot_product_attention(turned[0], self.keys, self.values, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = by_hand(x, self.weights[1])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def families(module: ir.Module) -> Counter[str]:
    """How many kernel calls of each family the plan makes."""
    kernels = {}
    for view in module.body.operations:
        op = view.operation
        if "topo.kernel" in op.attributes:
            family = ir.DictAttr(op.attributes["topo.kernel"])["family"]
            kernels[ir.StringAttr(op.attributes["sym_name"]).value] = ir.StringAttr(family).value
    calls = [
        ir.FlatSymbolRefAttr(v.operation.attributes["callee"]).value
        for v in module.body.operations[0].operation.regions[0].blocks[0].operations
        if v.operation.name == "func.call"
    ]
    return Counter(kernels[c] for c in calls)


def scheduled(module: nn.Module, args: tuple[Tensor, ...]) -> ir.Module:
    """Kernel IR, before kernels are put into packs."""
    from topo_opt.pipeline import levels
    from topo_opt.pipeline.run import run

    made = structured_module(module.eval(), args)
    with made.context, ir.Location.unknown():
        run(levels.pipeline(2, ("schedule",)), made)
    return made


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_a_norm_becomes_part_of_the_products(spelling, rows) -> None:
    torch.manual_seed(0)
    module = Projections(spelling).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, rows, WIDTH).to(torch.bfloat16)
    assert families(scheduled(module, (x,))) == {"gemm": 2}
    ours = compiled(module, (x,))(x)
    check(ours, module(x), float64_outputs(module, (x,), {}))


@pytest.mark.parametrize("batch", [1, 9])
def test_a_decoder_layer_is_seven_kernels(batch) -> None:
    torch.manual_seed(0)
    module = Layer(batch).to(torch.bfloat16).eval().requires_grad_(False)
    x, cos, sin = (torch.randn(n, 1, w).to(torch.bfloat16) for n, w in ((batch, WIDTH), (1, 8), (1, 8)))
    args = (x, cos, sin, torch.tensor([5]))
    assert families(scheduled(module, args)) == {"gemm": 6, "attention": 1}
    program = compiled(module, args)
    ours = program(*args)
    assert not program.fallbacks
    exact = float64_outputs(module, args, {})
    check(ours, module(*args), exact)


def test_rows_beyond_the_limit_keep_their_norm() -> None:
    module = Projections(by_hand).to(torch.bfloat16)
    assert families(scheduled(module, (torch.randn(1, 65, WIDTH).to(torch.bfloat16),))) == {
        "gemm": 2,
        "loops": 1,
    }


class NormedHeads(nn.Module):
    """A norm of every head, transposed and rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = by_hand(x.unflatten(-1, (3, 8)), self.weight).transpose(1, 2)
        left, right = y.chunk(2, -1)
        return y * cos + torch.cat((-right, left), -1) * sin


def test_a_norm_of_heads_stores_them_transposed_and_rotated() -> None:
    torch.manual_seed(0)
    module = NormedHeads().to(torch.bfloat16).requires_grad_(False)
    args = tuple(torch.randn(s).to(torch.bfloat16) for s in ((2, 5, 24), (5, 8), (5, 8)))
    assert families(scheduled(module, args)) == {"loops": 1}
    check(compiled(module, args)(*args), module(*args), float64_outputs(module, args, {}))


class Quantised(nn.Module):
    """A linear layer with weights of one byte and a scale a row of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (16, WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(16, 1) / 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_weights_are_dequantised_inside_the_product(rows) -> None:
    torch.manual_seed(0)
    module = Quantised()
    x = torch.randn(rows, WIDTH).to(torch.bfloat16)
    assert families(scheduled(module, (x,))) == {"gemm": 1}
    check(compiled(module, (x,))(x), module(x), float64_outputs(module, (x,), {}))


class Gated(nn.Module):
    """Two products that meet in a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("rows", [3, 70])
def test_products_that_meet_are_one_kernel(rows) -> None:
    torch.manual_seed(0)
    module = Gated().to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, WIDTH).to(torch.bfloat16)
    assert families(scheduled(module, (x,))) == {"gemm": 1}
    check(compiled(module, (x,))(x), module(x), float64_outputs(module, (x,), {}))


class Centred(nn.Module):
    """A product of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(self.norm(x)))


@pytest.mark.parametrize(("rows", "plan"), [(3, {"gemm": 1}), (9, {"gemm": 1, "loops": 1})])
def test_the_vector_form_normalises_its_operand_itself(rows, plan) -> None:
    torch.manual_seed(0)
    module = Centred().to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, WIDTH).to(torch.bfloat16)
    assert families(scheduled(module, (x,))) == plan
    check(compiled(module, (x,))(x), module(x), float64_outputs(module, (x,), {}))
