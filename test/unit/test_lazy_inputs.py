"""Example inputs that are no plain tensors: lazily conjugated or negated views, views of each other, other layouts."""

import pytest
import torch

import topo_opt
from topo_opt.errors import InputError


class Parts(torch.nn.Module):
    def forward(self, x):
        return x.abs() + x.real, torch.view_as_real(x * 2)


class Product(torch.nn.Module):
    def forward(self, x, y):
        return x @ y


SQUARE = torch.complex(torch.arange(9.0).reshape(3, 3), torch.ones(3, 3))


def test_a_conjugated_example_stands_for_any_tensor():
    program = topo_opt.compile(Parts(), (SQUARE.mH,), topology="cpu")
    for x in (SQUARE.mH, SQUARE.mH.resolve_conj()):
        torch.testing.assert_close(program(x), Parts()(x))
    assert not program.fallbacks


def test_a_negated_example_stands_for_any_tensor():
    class Twice(torch.nn.Module):
        def forward(self, x):
            return x * 2 + 1

    x = SQUARE.conj().imag
    assert x.is_neg()
    program = topo_opt.compile(Twice(), (x,), topology="cpu")
    for given in (x, x.resolve_neg()):
        torch.testing.assert_close(program(given), given * 2 + 1)


@pytest.mark.parametrize("view", [SQUARE.mT, SQUARE.mH], ids=["transposed", "conjugated"])
def test_examples_that_are_views_of_each_other(view):
    program = topo_opt.compile(Product(), (view, SQUARE), topology="cpu")
    torch.testing.assert_close(program(view.clone(), SQUARE), view @ SQUARE)


@pytest.mark.parametrize(
    "convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn]
)
def test_other_layouts_are_refused(convert):
    with pytest.raises(InputError, match="an argument has layout torch"):
        topo_opt.compile(Product(), (convert(torch.eye(3)), torch.eye(3)), topology="cpu")
    if convert is torch.Tensor.to_sparse:
        program = torch.export.export(Product(), (convert(torch.eye(3)), torch.eye(3)), strict=False)
        with pytest.raises(InputError, match=r"layout torch\.sparse_coo"):
            topo_opt.compile(program, topology="cpu")
