"""Programs that torch orders by effect tokens run, and check what eager checks."""

import pytest
import torch
from torch.export.graph_signature import InputKind, OutputKind

import topo_opt
from topo_opt.errors import InputError
from topo_opt.frontend.decomposition import decompose

SQUARE = torch.eye(4) * 3 + 1


class Solves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        self.calls.add_(1)
        return {"inverse": torch.linalg.inv(x) + 1, "root": torch.linalg.cholesky(x)}, torch.linalg.solve(
            x, y
        )


def test_factorizations_run_and_refuse_what_eager_refuses():
    y = torch.arange(8.0).reshape(4, 2)
    program = topo_opt.compile(Solves().eval(), (SQUARE, y), topology="cpu")
    torch.testing.assert_close(program(SQUARE, y), Solves()(SQUARE, y))
    assert not program.fallbacks and program.plan.functions["main"].variants
    with pytest.raises(InputError, match="singular"):
        program(torch.zeros(4, 4), y)


def test_no_token_is_left_in_graph_and_signature():
    class Prints(torch.nn.Module):
        def forward(self, x):
            torch.ops.aten._print("x")
            return torch.linalg.inv(x)

    plain = decompose(torch.export.export(Prints(), (SQUARE,), strict=False))
    assert InputKind.TOKEN not in {s.kind for s in plain.graph_signature.input_specs}
    assert OutputKind.TOKEN not in {s.kind for s in plain.graph_signature.output_specs}
    targets = [str(n.target) for n in plain.graph.find_nodes(op="placeholder")]
    assert targets == ["x"]
    assert "with_effects" not in str(plain.graph) and "check_errors: True" in str(plain.graph)
