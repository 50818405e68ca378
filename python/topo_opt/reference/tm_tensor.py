"""`tm_tensor.scan` (cumulative ops) and `tm_tensor.scatter` (`index_put`, `scatter`), with any combining body."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference.body import Body, Space
from topo_opt.reference.element_types import value_dtype, wide
from topo_opt.reference.program import Program, Step, evaluates

_CUMULATIVE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "arith.addf": lambda x, dim: x.cumsum(dim, dtype=x.dtype),
    "arith.addi": lambda x, dim: x.cumsum(dim, dtype=x.dtype),
    "arith.mulf": lambda x, dim: x.cumprod(dim, dtype=x.dtype),
    "arith.muli": lambda x, dim: x.cumprod(dim, dtype=x.dtype),
    "arith.maximumf": lambda x, dim: x.cummax(dim).values,
    "arith.maxsi": lambda x, dim: x.cummax(dim).values,
    "arith.minimumf": lambda x, dim: x.cummin(dim).values,
    "arith.minsi": lambda x, dim: x.cummin(dim).values,
}


def combining_op(body: Body) -> str | None:
    """The name of the op when the body is one commutative op of its two arguments."""
    if len(body.nodes) == 1 and set(body.nodes[0].inputs) == {0, 1} and body.yields == body.nodes[0].outputs:
        return body.nodes[0].name
    return None


@evaluates("tm_tensor.scan")
def scan(op: ir.Operation, _program: Program) -> Step:
    """Results: the running combination along `dimension`, and the last one (the accumulator).

    Inclusive: `out[0] = in[0]`, `out[i] = body(out[i-1], in[i])`. Exclusive: `out[0] = init`, `out[i] = body(out[i-1], in[i-1])`.
    """
    dim, inclusive = int(op.attributes["dimension"].value), bool(op.attributes["inclusive"].value)
    dtypes = [value_dtype(r.type) for r in op.results]
    body = Body(op)
    name = combining_op(body)

    def step(operands: list[Tensor]) -> list[Tensor]:
        source, initial, outer = operands[0], operands[2], operands[3:]
        values = source.to(wide(source.dtype))
        if values.shape[dim] == 0:
            return [source.to(dtypes[0]), initial.to(dtypes[1])]
        if inclusive and name in _CUMULATIVE and values.dtype != torch.bool:
            running = _CUMULATIVE[name](values, dim)
        else:
            running = _run(values, initial.to(wide(initial.dtype)), outer)
        last = running.select(dim, -1)
        return [running.to(dtypes[0]), last.to(dtypes[1])]

    def _run(values: Tensor, initial: Tensor, outer: list[Tensor]) -> Tensor:
        slices = values.unbind(dim)
        state = slices[0] if inclusive else initial
        states = [state]
        for element in slices[1:] if inclusive else slices[:-1]:
            box = Space((0,) * state.dim(), tuple(state.shape))
            (state,) = body.evaluate(body.yields, [state, element], outer, box)
            states.append(state)
        return torch.stack(states, dim)

    return step


@evaluates("tm_tensor.scatter")
def scatter(op: ir.Operation, _program: Program) -> Step:
    """`original[indices[i]] = body(updates[i], original[indices[i]])` for each i in order."""
    dims = list(op.attributes["dimension_map"]) if "dimension_map" in op.attributes else None
    dtype = value_dtype(op.results[0].type)
    body = Body(op)
    name = combining_op(body)
    replaces = body.yields == (0,)

    def step(operands: list[Tensor]) -> list[Tensor]:
        updates, indices, original, *outer = operands
        depth = indices.shape[1]
        order = dims if dims is not None else list(range(depth))
        result = original.to(wide(original.dtype)).clone(memory_format=torch.contiguous_format)
        sizes = torch.tensor([original.shape[d] for d in order])
        wanted = indices.to(torch.int64)
        if wanted.numel() and bool(((wanted < 0) | (wanted >= sizes)).any()):
            raise InputError(
                f"tm_tensor.scatter: an index is outside the tensor of shape {tuple(original.shape)}"
            )
        rest = [d for d in range(original.dim()) if d not in order]
        cells = result.permute([*order, *rest])
        flat = torch.zeros(len(wanted), dtype=torch.int64)
        for position, d in enumerate(order):
            flat = flat * original.shape[d] + wanted[:, position]
        rows = updates.to(wide(updates.dtype)).reshape([len(wanted), *(original.shape[d] for d in rest)])
        if name in ("arith.addf", "arith.addi") and result.dtype != torch.bool:
            cells.index_put_(tuple(wanted.unbind(1)), rows, accumulate=True)
        elif replaces:
            last = torch.tensor(
                sorted({cell: i for i, cell in enumerate(flat.tolist())}.values()), dtype=torch.int64
            )
            cells.index_put_(tuple(wanted[last].unbind(1)), rows[last])
        else:
            for where, update in zip(wanted.tolist(), rows, strict=True):
                cell = cells[tuple(where)]
                box = Space((0,) * cell.dim(), tuple(cell.shape))
                (new,) = body.evaluate(body.yields, [update, cell], outer, box)
                cell.copy_(new)
        return [result.to(dtype)]

    return step
