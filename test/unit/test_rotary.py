"""Rotary embeddings in every spelling: raised to one op, and kernels that give the same numbers."""

import pytest
import torch
from kernel_check import check_kernels, to_kernel_ir
from torch import Tensor

from topo_opt import reference
from topo_opt.frontend.ingest import structured_module
from topo_opt.pipeline.run import run
from topo_opt.pipeline.spec import parse


def chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def slices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def unbound(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    return x.float() * cos + torch.cat((-second.float(), first.float()), -1) * sin


def in_f32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return slices(x.float(), cos.float(), sin.float()).to(x.dtype)


def after_transpose(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return chunks(x.transpose(1, 2).contiguous(), cos[:2], sin[:2])


def alternating(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = slices(x[..., :6], cos[..., :6], sin[..., :6])
    return torch.cat((turned, x[..., 6:]), -1)


SPELLINGS = (chunks, slices, unbound, in_f32, after_transpose, alternating, partial)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spelling(spelling) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 3, 10, generator=generator).to(torch.bfloat16)
    cos, sin = (torch.randn(3, 10, generator=generator).to(torch.bfloat16) for _ in range(2))
    module = structured_module(spelling, (x, cos, sin))
    with module.context:
        run(parse("builtin.module(topo-raise-rotary, topo-verify-structured)"), module)
    text = str(module)
    assert text.count('"topo.rotate_half"') == 1
    assert f"interleaved = {'true' if spelling is alternating else 'false'}" in text
    (found,) = reference.run(module, "main", [x, cos, sin])
    torch.testing.assert_close(found, spelling(x, cos, sin), rtol=0, atol=0)
    for checked in check_kernels(to_kernel_ir(module)):
        for ours, expected in zip(checked.ours, checked.expected):
            torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
