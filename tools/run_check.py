"""`topo-run --check`: compiled results against eager ATen and against float64, from the same inputs, weights and state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from topo_opt.runtime import numerics
from topo_opt.runtime.numerics import Verdict
from topo_opt.runtime.plan import Variant
from topo_opt.runtime.program import Program
from topo_opt.runtime.sample_inputs import sample_leaves
from topo_opt.sharding.parts import global_shape


@dataclass(frozen=True)
class Checked:
    """The verdicts of one variant: one for each output, then one for each state buffer and input that it changes."""

    symbol: str
    verdicts: list[Verdict]
    fallback: str | None
    """Why the call was answered by ATen, which makes the comparison empty; None when the kernels ran."""

    @property
    def passed(self) -> bool:
        """Whether the kernels ran and every result is right."""
        return self.fallback is None and all(v.passed for v in self.verdicts)


def check_variant(
    program: Program,
    function: str,
    variant: Variant,
    *,
    seed: int = 0,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Checked:
    """Runs one variant three ways and compares. The program's state is left as it was."""
    leaves = sample_leaves(program.whole_inputs(variant).inputs, program.device, seed, given)
    before = {name: t.clone() for name, t in program.state.items()}
    names, eager = _run_aten(program, function, _copies(leaves))
    exact = _run_float64(program, function, _copies(leaves))
    fallbacks = dict(program.fallbacks)
    mine = _copies(leaves)
    try:
        ours = _whole_results(program, variant, program.call_flat(function, mine))
        ours = ours + [_mutated(program, function, n, mine) for n in names[len(ours) :]]
    finally:
        for name, value in before.items():
            program.state[name].copy_(value)
    new = [r for r, count in program.fallbacks.items() if count > fallbacks.get(r, 0)]
    verdicts = []
    for name, o, e, x in zip(names, ours, eager, exact, strict=True):
        if isinstance(e, torch.Tensor):
            verdicts.append(numerics.compare(o, e, x, name))
        elif o != e:
            verdicts.append(Verdict(name, False, f"{o!r} is not {e!r}", *[float("nan")] * 6))
    return Checked(variant.symbol, verdicts, new[0] if new else None)


def _whole_results(program: Program, variant: Variant, results: list[Any]) -> list[Any]:
    """Results that every rank has a part of, put together."""
    ranks = program.ranks
    if ranks is None:
        return results
    whole = []
    for out, value in zip(variant.outputs, results, strict=True):
        if out.sharding is None or out.buffer is None:
            whole.append(value)
            continue
        shape = global_shape(out.sharding, variant.buffers[out.buffer].shape, ranks.mesh, out.whole)
        whole.append(ranks.whole(value, out.sharding, shape))
    return whole


def _copies(leaves: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]


def _run_aten(program: Program, function: str, leaves: list[Any]) -> tuple[list[str], list[Any]]:
    """Names and values: outputs first, then new values of state and inputs."""
    aten = program.aten[function]
    results = aten.run(program.aten_inputs(function, leaves), program.device)
    return _sorted(aten, results)


def _run_float64(program: Program, function: str, leaves: list[Any]) -> list[Any]:
    aten = program.aten[function]
    inputs = [
        numerics.to_float64(v) if isinstance(v, torch.Tensor) else v
        for v in program.aten_inputs(function, leaves)
    ]
    with numerics.Float64Arithmetic():
        results = aten.run(inputs, program.device)
    return _sorted(aten, results)[1]


def _sorted(aten: Any, results: list[Any]) -> tuple[list[str], list[Any]]:
    outputs = [
        (f"output {i}", r) for i, (o, r) in enumerate(zip(aten.outputs, results)) if o.kind == "output"
    ]
    outputs = [(f"output {i}", r) for i, (_, r) in enumerate(outputs)]
    mutations = [(str(o.target), r) for o, r in zip(aten.outputs, results) if o.kind == "mutation"]
    both = outputs + mutations
    return [n for n, _ in both], [r for _, r in both]


def _mutated(program: Program, function: str, name: str, leaves: list[Any]) -> torch.Tensor:
    if name in program.state:
        return program.whole_state(name)
    return leaves[program.input_names(function).index(name)]
