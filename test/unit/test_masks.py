"""Masks of attention in the spellings that models use: what they become, and that the numbers stay."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from topo_opt import reference
from topo_opt.frontend.ingest import structured_module
from topo_opt.pipeline.run import run
from topo_opt.pipeline.spec import parse

B, H, M, N, D = 2, 2, 6, 12, 4


@dataclass(frozen=True)
class Spelling:
    """`mask(*inputs)` for B x M rows and N keys, and what the op must have afterwards."""

    mask: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()
    causal: bool = False
    low: str | None = None
    high: str | None = None
    positions: str | None = None
    rest: str | None = None


def rows(start: int | Tensor = 0) -> Tensor:
    return (torch.arange(M) + start)[:, None]


def causal() -> Tensor:
    return torch.ones(M, N, dtype=torch.bool).tril()


def causal_triu() -> Tensor:
    return ~torch.triu(torch.ones(M, N, dtype=torch.bool), diagonal=1)


def causal_additive() -> Tensor:
    hidden = torch.full((M, N), torch.finfo(torch.float32).min)
    return torch.triu(hidden, diagonal=1)


def causal_infinite() -> Tensor:
    return torch.zeros(M, N).masked_fill(rows() < torch.arange(N), -math.inf)


def causal_at_the_end() -> Tensor:
    return torch.ones(M, N, dtype=torch.bool).tril(N - M)


def window() -> Tensor:
    distance = rows() - torch.arange(N)
    return (distance >= 0) & (distance < 3)


def chunks() -> Tensor:
    n = torch.arange(N)
    return (n <= rows()) & (n // 4 == rows() // 4)


def cache(start: Tensor) -> Tensor:
    return torch.arange(N) <= rows(start)


def cache_window(start: Tensor) -> Tensor:
    n = torch.arange(N)
    return (n <= rows(start)) & (n > rows(start) - 4)


def cache_chunks(start: Tensor) -> Tensor:
    n = torch.arange(N)
    return (n <= rows(start)) & (n >= rows(start) // 4 * 4)


def position_ids(ids: Tensor) -> Tensor:
    return torch.arange(N) <= ids[:, None, :, None]


def lengths(length: Tensor) -> Tensor:
    return (torch.arange(N) < length[:, None])[:, None, None, :]


def padding(keep: Tensor) -> Tensor:
    return keep.bool()[:, None, None, :].expand(B, 1, M, N)


def causal_padding(keep: Tensor) -> Tensor:
    return causal()[None, None] & keep.bool()[:, None, None, :]


def additive_padding(keep: Tensor) -> Tensor:
    return (1.0 - keep[:, None, None, :].float()) * torch.finfo(torch.float32).min


def sequences(ids: Tensor) -> Tensor:
    same = ids[:, :M, None] == ids[:, None, :]
    return (same & causal())[:, None]


def everything() -> Tensor:
    return torch.ones(1, 1, M, N, dtype=torch.bool)


START, KEEP = torch.tensor(3), torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
SPELLINGS = {
    "causal": Spelling(causal, causal=True),
    "causal, triu": Spelling(causal_triu, causal=True),
    "causal, additive": Spelling(causal_additive, causal=True),
    "causal, infinite": Spelling(causal_infinite, causal=True),
    "causal at the end": Spelling(causal_at_the_end, high="d0 + 7"),
    "window": Spelling(window, causal=True, low="d0 - 2"),
    "chunks": Spelling(chunks, causal=True, low="(d0 floordiv 4) * 4", high="(d0 floordiv 4) * 4 + 4"),
    "cache": Spelling(cache, (START,), high="d0 + d1 + 1", positions="1x1"),
    "cache window": Spelling(cache_window, (START,), low="d0 + d1 - 3", high="d0 + d1 + 1", positions="1x1"),
    "cache chunks": Spelling(
        cache_chunks, (START,), low="((d0 + d1) floordiv 4) * 4", high="d0 + d1 + 1", positions="1x1"
    ),
    "position ids": Spelling(
        position_ids, (torch.tensor([[3, 1, 2, 5, 11, 0]] * 2),), high="d1 + 1", positions="2x6"
    ),
    "lengths": Spelling(lengths, (torch.tensor([12, 5]),), high="d1", positions="2x1"),
    "padding": Spelling(padding, (KEEP,), rest="2x1x1x12xi1"),
    "causal padding": Spelling(causal_padding, (KEEP,), causal=True, rest="2x1x1x12xi1"),
    "additive padding": Spelling(additive_padding, (KEEP,), rest="2x1x1x12xf32"),
    "sequences": Spelling(sequences, (KEEP,), causal=True, rest="2x1x6x12xi1"),
    "everything": Spelling(everything),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    spelling = SPELLINGS[name]

    def model(q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=spelling.mask(*inputs))

    torch.manual_seed(0)
    arguments = [torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D), *spelling.inputs]
    module = structured_module(model, tuple(arguments))
    with module.context:
        run(parse("builtin.module(topo-raise-masks, topo-verify-structured)"), module)
    (found,) = reference.run(module, "main", arguments)
    torch.testing.assert_close(found, model(*arguments), rtol=1e-5, atol=1e-5)

    (op,) = (
        o.operation
        for f in module.body.operations
        for o in f.operation.regions[0].blocks[0].operations
        if o.operation.name == "topo.attention"
    )
    assert op.attributes["causal"].value == spelling.causal
    for attribute in ("low", "high"):
        wanted = getattr(spelling, attribute)
        made = str(op.attributes[attribute]) if attribute in op.attributes else None
        assert made == (wanted and f"affine_map<(d0, d1) -> ({wanted})>")
    others = [str(o.type) for o in list(op.operands)[3:]]
    assert others == [
        f"tensor<{t}>" for t in (spelling.rest, spelling.positions and f"{spelling.positions}xi64") if t
    ]
    if spelling.rest is None:
        assert f"{M}x{N}" not in str(module)
