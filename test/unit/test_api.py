"""`topo_opt.compile`: what it takes, what it gives back, and what it refuses."""

import dataclasses
import gc
import re
from pathlib import Path

import pytest
import torch

import topo_opt
from topo_opt import driver
from topo_opt.errors import CompilerCrash, InputError, StrictError, UnsupportedError


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": torch.ones(2)}, r"args is a Tensor, expected a tuple.*\(write args=\(x,\)\)"),
        ({"args": {"x": 1}}, r"args is a dict.*\(give kwargs\)"),
        ({"kwargs": ["x"]}, "kwargs is a list, expected a dictionary"),
        ({"buckets": [1, 2]}, "buckets is a list, expected a dictionary"),
        ({"buckets": {"b": 1}}, "bucket 'b' is 1, expected a list of sizes"),
        ({"buckets": {"b": "18"}}, "bucket 'b' is '18', expected a list of sizes"),
        ({"buckets": {"b": ["1"]}}, "bucket 'b' has the size '1', expected whole numbers"),
        ({"buckets": {"b": []}}, "bucket 'b' has no sizes"),
        ({"buckets": {0: [1]}}, "the key 0, expected the name of a dynamic dim"),
        ({"out": "/proc/none/b"}, "can't be written"),
    ],
    ids=str,
)
def test_arguments_of_another_form_are_refused_before_the_export(options, message, monkeypatch):
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("it was exported"))
    with pytest.raises(InputError) as caught:
        topo_opt.compile(torch.nn.ReLU(), topology="cpu", **options)
    assert re.search(message, caught.value.render())


def test_a_function_is_no_program_that_is_exported_already():
    with pytest.raises(InputError, match=r"a function cannot be compiled .*forward of a module"):
        topo_opt.compile(lambda x: x, (torch.ones(2),), topology="cpu")
    with pytest.raises(InputError, match="is empty"):
        topo_opt.compile({}, topology="cpu")


def test_a_bundle_that_cannot_be_read_back_is_not_written(tmp_path, monkeypatch):
    from topo_opt import driver

    imported = driver.import_model

    def broken(*args, **kwargs):
        model = imported(*args, **kwargs)
        text = model.aten["main"].replace('"kind": "input"', '"kind": "token"')
        return dataclasses.replace(model, aten={"main": text})

    monkeypatch.setattr(driver, "import_model", broken)
    with pytest.raises(CompilerCrash, match=r"of 'main' cannot be read back: aten.main.inputs\[0\]"):
        topo_opt.compile(torch.nn.ReLU(), (torch.ones(2),), topology="cpu", out=tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


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


def test_modules_in_training_mode_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Dropout(0.1))
    with pytest.warns(UserWarning, match=r"'1' and 1 more of the model is in training mode"):
        topo_opt.compile(model, (torch.randn(2, 4),), topology="cpu")


def test_random_weights_stand_in_for_an_archive_that_is_gone(tmp_path):
    program = torch.export.export(torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    torch.export.save(program, tmp_path / "m.pt2")
    driver.compile({"main": tmp_path / "m.pt2"}, driver.Options(topology="cpu"), tmp_path / "b")
    (tmp_path / "m.pt2").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        topo_opt.load(tmp_path / "b", "cpu")
    made_up = topo_opt.load(tmp_path / "b", "cpu", random_weights=3)
    assert made_up(torch.ones(2, 4)).shape == (2, 4)
    assert len(made_up.memory.random_names) == 2
