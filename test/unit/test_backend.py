"""`torch.compile(backend="topo")`: right results, specialisation by shape, and no silent fallback."""

import warnings

import pytest
import torch

from topo_opt.backend import BackendOptions, EagerFallback, Specializer, topo
from topo_opt.errors import InputError, StrictError

STRICT = {"strict": True, "topology": "cpu"}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4)).eval()


@pytest.fixture
def prepared(monkeypatch):
    """Shapes that were compiled, in order."""
    seen = []
    original = Specializer.prepare

    def prepare(self, key):
        seen.append(key[-1][0] if len(key[-1][0]) == 2 else key[0][0])
        original(self, key)

    monkeypatch.setattr(Specializer, "prepare", prepare)
    return seen


def test_dynamic_shapes_are_specialised_as_they_come(model, prepared):
    compiled = torch.compile(model, backend="topo", dynamic=True, fullgraph=True, options=STRICT)
    with torch.no_grad():
        for rows in (3, 5, 3, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(prepared) == 2


def test_an_input_that_is_written_is_written(prepared):
    def step(x, total):
        total.add_(x)
        return total * 2

    compiled = torch.compile(step, backend="topo", fullgraph=True, options=STRICT)
    x, total = torch.ones(4), torch.zeros(4)
    for count in (1, 2):
        torch.testing.assert_close(compiled(x, total), torch.full((4,), 2.0 * count))
        torch.testing.assert_close(total, torch.full((4,), 1.0 * count))


def test_an_integer_that_changes_is_compiled_for_its_value():
    def scale(x, n):
        return x.repeat(n) * n + x.shape[0]

    compiled = torch.compile(scale, backend="topo", fullgraph=True, options=STRICT)
    x = torch.arange(5.0)
    for n in (3, 4, 6, 4):
        torch.testing.assert_close(compiled(x, n), scale(x, n))


def test_an_input_of_another_kind_runs_eagerly_with_a_warning():
    graph = torch.fx.symbolic_trace(lambda x, y: torch.add(x, y))
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), (torch.ones(2), object()), strict=True):
        node.meta["example_value"] = value
    with pytest.warns(EagerFallback, match="input 1 is a object, not a tensor or an integer"):
        callable_graph = topo(graph, [torch.ones(2), object()])
    torch.testing.assert_close(callable_graph(torch.ones(2), 2), torch.full((2,), 3.0))
    with pytest.raises(StrictError, match="input 1 is a object"):
        topo(graph, [torch.ones(2), object()], options=STRICT)


def test_gradients_fall_back_with_a_warning_and_strict_refuses(model):
    x = torch.randn(2, 8)
    with pytest.warns(EagerFallback, match="gradients are needed"):
        torch.compile(model, backend="topo", options={"topology": "cpu"})(x).sum().backward()
    assert model[0].weight.grad is not None
    torch._dynamo.reset()
    with pytest.raises(StrictError, match="gradients are needed"):
        torch.compile(model, backend="topo", options=STRICT)(x)


def test_more_shapes_than_allowed_run_eagerly_with_a_warning(model):
    options = {"topology": "cpu", "max_variants": 1}
    compiled = torch.compile(model, backend="topo", dynamic=True, options=options)
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error", EagerFallback)
            compiled(torch.randn(3, 8))
        x = torch.randn(6, 8)
        with pytest.warns(EagerFallback, match="more than 1 shapes"):
            result = compiled(x)
        torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize(
    "wrong",
    [
        {"topology": "foo"},
        {"level": 9},
        {"level": "2"},
        {"tune": "zz"},
        {"tuning_time": -1},
        {"tuning_data": ["/nope"]},
        {"tuning_data": "/nope"},
    ],
    ids=str,
)
def test_wrong_values_of_options_raise(wrong):
    model = torch.nn.Linear(4, 4).eval()
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"InputError|there is no|does not exist|tuning|topology"),
    ):
        torch.compile(model, backend="topo", options={"topology": "cpu"} | wrong)(torch.randn(2, 4))


def test_options_are_checked():
    with pytest.raises(InputError, match="no option 'levle'"):
        BackendOptions.of({"levle": 1})
    with pytest.raises(Exception, match="has no mode 'reduce-overhead'"):
        torch.compile(torch.relu, backend="topo", mode="reduce-overhead")(torch.randn(2))
