"""`topo_opt.compile`: what it takes, what it gives back, and what it refuses."""

import gc
from pathlib import Path

import pytest
import torch

import topo_opt
from topo_opt.errors import InputError, StrictError, UnsupportedError


class Counter(torch.nn.Module):
    """State, two outputs in a dictionary, a number among the arguments."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x, factor: float):
        self.total.add_(x.sum(0))
        return {"scaled": x * self.weight * factor, "total": self.total.clone()}


def test_a_module_becomes_a_program_with_state_and_the_callers_structure():
    x = torch.randn(4, 8)
    program = topo_opt.compile(Counter().eval(), (x, 2.0), topology="cpu", strict=True)
    model = Counter().eval()
    for _ in range(2):
        result, expected = program(x, 2.0), model(x, 2.0)
        assert list(result) == ["scaled", "total"]
        torch.testing.assert_close(result, expected)
    assert not program.fallbacks


def test_the_folder_lives_as_long_as_the_program():
    program = topo_opt.compile(torch.nn.ReLU(), (torch.randn(3),), topology="cpu", level=0)
    folder = Path(program.bundle.path)
    assert folder.is_dir()
    del program
    gc.collect()
    assert not folder.exists()


def test_programs_by_name_share_weights_and_the_bundle_is_kept_with_its_weights(tmp_path):
    linear = torch.nn.Linear(8, 4).eval()
    programs = {f"rows{n}": torch.export.export(linear, (torch.randn(n, 8),), strict=False) for n in (1, 3)}
    program = topo_opt.compile(programs, topology="cpu", out=tmp_path / "b")
    x = torch.randn(3, 8)
    torch.testing.assert_close(program.rows3(x), linear(x))
    again = topo_opt.load(tmp_path / "b", device="cpu", strict=True)
    torch.testing.assert_close(again.rows1(x[:1]), linear(x[:1]))


def test_what_is_refused():
    program = torch.export.export(torch.nn.ReLU(), (torch.randn(3),), strict=False)
    with pytest.raises(InputError, match="args was given"):
        topo_opt.compile(program, (torch.randn(3),), topology="cpu")
    with pytest.raises(InputError, match="'f' is a ReLU"):
        topo_opt.compile({"f": torch.nn.ReLU()}, topology="cpu")
    with pytest.raises(InputError, match="'a b' cannot be the name"):
        topo_opt.compile({"a b": program}, topology="cpu")
    with pytest.raises(InputError, match="a function cannot be compiled"):
        topo_opt.compile(test_what_is_refused, topology="cpu")
    with pytest.raises(InputError, match="level 7 does not exist"):
        topo_opt.compile(program, topology="cpu", level=7)
    with pytest.raises(InputError, match="there is no topology"):
        topo_opt.compile(program, topology="abacus")


def test_strict_and_export_errors_reach_the_caller():
    class Ordered(torch.nn.Module):
        def forward(self, x):
            return torch.sort(x)[0]

    with pytest.raises(StrictError, match=r"aten\.sort"):
        topo_opt.compile(Ordered(), (torch.randn(4),), topology="cpu", strict=True)

    class Branches(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedError):
        topo_opt.compile(Branches(), (torch.randn(4),), topology="cpu")
