"""What an exported program refuses to be called with, because only the module itself would be right."""

import pytest
import torch
from topo_opt_case import compiled

import topo_opt
from topo_opt.errors import InputError


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x.sum() / x.shape[0]


class Power(torch.nn.Module):
    def forward(self, x, n: int):
        return x * n


class Both(torch.nn.Module):
    def forward(self, x, y):
        x.mul_(2)
        return x + y


def test_sizes_the_export_fixed_are_refused():
    program = compiled(Scaled(), (torch.randn(8, 4),))
    with pytest.raises(InputError, match=r"exported for float32\[8, 4\]"):
        program(torch.randn(3, 4))
    with pytest.raises(InputError, match="float64"):
        program(torch.randn(8, 4, dtype=torch.float64))


def test_sizes_the_export_left_open_run_within_their_range():
    dims = {"x": {0: torch.export.Dim("b", min=2, max=9)}}
    program = compiled(Scaled(), (torch.randn(8, 4),), dynamic_shapes=dims)
    x = torch.randn(5, 4)
    torch.testing.assert_close(program(x), Scaled()(x))
    assert sum(program.fallbacks.values()) == 1
    with pytest.raises(InputError, match="2 to 9"):
        program(torch.randn(20, 4))


def test_equal_dims_must_be_equal():
    batch = torch.export.Dim("b", min=2, max=9)

    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return x + y

    program = compiled(
        Sum(), (torch.randn(4, 3), torch.randn(4, 3)), dynamic_shapes={"x": {0: batch}, "y": {0: batch}}
    )
    with pytest.raises(InputError, match="exported with them equal"):
        program(torch.randn(5, 3), torch.randn(2, 3))


@pytest.mark.parametrize("other", [5, True, 3.0])
def test_literals_are_what_they_were(other):
    program = compiled(Power(), (torch.randn(4), 3))
    with pytest.raises(InputError, match="was 3 when the model was exported"):
        program(torch.randn(4), other)


def test_a_rewritten_input_may_not_share_memory_with_another():
    program = compiled(Both(), (torch.ones(3), torch.ones(3)))
    storage = torch.ones(4)
    with pytest.raises(InputError, match="shares memory"):
        program(storage[1:], storage[:-1])
    assert torch.equal(storage, torch.ones(4))
    x = torch.ones(3)
    assert torch.equal(program(x, torch.ones(3)), torch.full((3,), 3.0))
    assert torch.equal(x, torch.full((3,), 2.0))


def test_custom_operators_of_the_callers_own_run():
    library = torch.library.Library("topo_admission", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")

    class Custom(torch.nn.Module):
        def forward(self, x):
            return torch.ops.topo_admission.twice(x) + 1

    program = compiled(Custom(), (torch.ones(4),))
    assert torch.equal(program(torch.ones(4)), torch.full((4,), 3.0))
    assert topo_opt.__version__


@pytest.mark.parametrize("index", [20, -1, 10**12])
def test_an_index_out_of_range_is_an_error(index):
    program = compiled(torch.nn.Embedding(20, 8), (torch.tensor([1, 2]),))
    with pytest.raises(InputError, match="index out of range"):
        program(torch.tensor([0, index]))
