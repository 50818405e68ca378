"""`linalg.generic` and `linalg.contract`: any loop nest over tensors, evaluated a whole space at a time.

Memory stays bounded: operands are views, products that are summed become contractions, and a large elementwise space is
cut along one loop. What no rule in `reductions` covers runs step by step over the reduction loops, still vectorised over
the others.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import UnsupportedError
from topo_opt.reference.affine_access import from_space, is_strided, projected_dims, space_view
from topo_opt.reference.body import Body, Space
from topo_opt.reference.element_types import element_dtype, static_shape, wide
from topo_opt.reference.folding import contract, extremum, fold
from topo_opt.reference.program import Program, Step, evaluates, location_text
from topo_opt.reference.reductions import Contract, Extremum, Fold, Map, Reduction, recognise

CHUNK_ELEMENTS = 1 << 24
"""Iterations evaluated at a time; 64 MiB for each f32 value of the body."""


class LoopNest:
    """A prepared loop nest. Operands: inputs, initial values of the results, captured values."""

    def __init__(self, op: ir.Operation):
        self.body = Body(op)
        self.maps = [ir.AffineMapAttr(a).value for a in op.attributes["indexing_maps"]]
        self.results = [r.type for r in op.results]
        self.inputs = len(self.maps) - len(self.results)
        self.rank = self.maps[0].n_dims
        self.dtypes = [element_dtype(ir.RankedTensorType(t).element_type) for t in self.results]
        self.extents = self._extents([v.type for v in op.operands][: len(self.maps)])
        self.layouts = [projected_dims(m) for m in self.maps[self.inputs :]]
        self.rules: list[Reduction] | None = None
        if all(layout is not None for layout in self.layouts):
            reduced = [len([d for d in lay or [] if d is not None]) < self.rank for lay in self.layouts]
            self.rules = recognise(self.body, self.inputs, reduced, self.dtypes)
        self.writable = all(is_strided(m) for m in self.maps[self.inputs :])
        self.where = location_text(op)

    def _extents(self, types: Sequence[ir.Type]) -> tuple[int, ...]:
        """The number of iterations of each loop, from the operand dimensions that a loop indexes alone."""
        extents: dict[int, int] = {}
        for amap, type_ in zip(self.maps, types):
            shape = static_shape(type_) if isinstance(type_, ir.RankedTensorType) else []
            for expr, size in zip(amap.results, shape, strict=True):
                if isinstance(expr, ir.AffineDimExpr):
                    extents.setdefault(expr.position, size)
        if len(extents) < self.rank:
            missing = sorted(set(range(self.rank)) - set(extents))
            raise UnsupportedError(f"no operand gives the extent of loops {missing}")
        return tuple(extents[d] for d in range(self.rank))

    def __call__(self, operands: list[Tensor]) -> list[Tensor]:
        tensors, outer = operands[: len(self.maps)], operands[len(self.maps) :]
        inits = tensors[self.inputs :]
        if 0 in self.extents:
            return list(inits)
        views = [space_view(t, m, self.extents) for t, m in zip(tensors[: self.inputs], self.maps)]
        if self.rules is not None and not self._has_nan(views, outer):
            return self._vectorised(views, inits, outer)
        return self._step_by_step(views, inits, outer)

    def _has_nan(self, views: list[Tensor], outer: list[Tensor]) -> bool:
        """Whether a running extremum would meet a NaN, whose order matters."""
        slots = sorted({rule.value for rule in self.rules or () if isinstance(rule, Extremum)})
        values = (
            self.body.evaluate(slots, [*views, *self._no_accumulators()], outer, self._whole())
            if slots
            else []
        )
        return any(bool(v.isnan().any()) for v in values)

    def _no_accumulators(self) -> list[None]:
        return [None] * len(self.results)

    def _whole(self) -> Space:
        return Space((0,) * self.rank, self.extents)

    def _vectorised(self, views: list[Tensor], inits: list[Tensor], outer: list[Tensor]) -> list[Tensor]:
        assert self.rules is not None
        carried = [space_view(t, m, self.extents) for t, m in zip(inits, self.maps[self.inputs :])]
        pieces = [self._piece(s, views, carried, outer) for s in self._boxes()]
        dim = self._split_dim()
        finished = []
        for k, layout in enumerate(self.layouts):
            parts = [p[k] for p in pieces]
            value = parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim)
            assert layout is not None
            finished.append(from_space(value, layout, self.extents).to(self.dtypes[k]))
        return finished

    def _split_dim(self) -> int | None:
        """The longest loop that every result keeps."""
        shared = [d for d in range(self.rank) if all(d in (layout or []) for layout in self.layouts)]
        return max(shared, key=lambda d: (self.extents[d], -d), default=None)

    def _boxes(self) -> list[Space]:
        iterations, dim = math.prod(self.extents), self._split_dim()
        if (
            iterations <= CHUNK_ELEMENTS
            or dim is None
            or all(isinstance(r, Contract) for r in self.rules or ())
        ):
            return [self._whole()]
        step = max(1, CHUNK_ELEMENTS * self.extents[dim] // iterations)
        boxes = []
        for start in range(0, self.extents[dim], step):
            count = min(step, self.extents[dim] - start)
            starts = tuple(start if d == dim else 0 for d in range(self.rank))
            boxes.append(Space(starts, tuple(count if d == dim else n for d, n in enumerate(self.extents))))
        return boxes

    def _piece(
        self, box: Space, views: list[Tensor], carried: list[Tensor], outer: list[Tensor]
    ) -> list[Tensor]:
        """Every result over one box, as space views of size 1 along the loops the result does not keep."""
        assert self.rules is not None
        targets: list[int] = []
        for rule in self.rules:
            targets += _wanted(rule)
        local = [box.narrow(v) for v in views]
        accumulators = [box.narrow(c) for c in carried]
        offered = [
            a if isinstance(rule, Map) else None for a, rule in zip(accumulators, self.rules, strict=True)
        ]
        slots = sorted(set(targets))
        value = dict(zip(slots, self.body.evaluate(slots, [*local, *offered], outer, box), strict=True))
        inits = [a.to(wide(a.dtype)) for a in accumulators]
        finished = []
        for k, rule in enumerate(self.rules):
            kept = self.layouts[k] or []
            dims = [d for d in range(self.rank) if d not in kept]
            result = self._reduce(rule, value, k, inits, dims, box.counts)
            size = [box.counts[d] if d in kept else 1 for d in range(self.rank)]
            finished.append(_full_rank(result, self.rank).expand(size))
        return finished

    def _reduce(
        self,
        rule: Reduction,
        value: dict[int, Tensor],
        k: int,
        inits: list[Tensor],
        dims: list[int],
        counts: tuple[int, ...],
    ) -> Tensor:
        ranked = {slot: _full_rank(v, self.rank) for slot, v in value.items()}
        match rule:
            case Map(slot):
                last = ranked[slot]
                for d in dims:
                    last = last.narrow(d, last.shape[d] - 1, 1)
                return last
            case Contract(lhs, rhs):
                return inits[k] + contract(ranked[lhs], ranked[rhs], dims, counts)
            case Fold(combine, slot):
                return combine(inits[k], fold(combine, ranked[slot], dims, counts))
            case Extremum(best=best, value=slot, payload=payload):
                chosen = ranked[payload] if payload is not None else None
                return extremum(rule, ranked[slot], chosen, inits[best], inits[k], dims, counts)

    def _step_by_step(self, views: list[Tensor], inits: list[Tensor], outer: list[Tensor]) -> list[Tensor]:
        """One iteration of the loops that some result does not keep after the other; always right."""
        held = [t.to(wide(t.dtype)).clone(memory_format=torch.contiguous_format) for t in inits]
        cells = [space_view(t, m, self.extents) for t, m in zip(held, self.maps[self.inputs :])]
        if not self.writable:
            raise UnsupportedError(
                "a result of a loop nest is written through a map that is not linear", where=self.where
            )
        walked = [d for d in range(self.rank) if any(lay is None or d not in lay for lay in self.layouts)]
        for point in itertools.product(*(range(self.extents[d]) for d in walked)):
            at = dict(zip(walked, point, strict=True))
            box = Space(
                tuple(at.get(d, 0) for d in range(self.rank)),
                tuple(1 if d in at else n for d, n in enumerate(self.extents)),
            )
            local = [box.narrow(c) for c in cells]
            new = self.body.evaluate(self.body.yields, [*(box.narrow(v) for v in views), *local], outer, box)
            copies = [v.clone() for v in new]  # all results are computed before any accumulator changes
            for cell, result in zip(local, copies, strict=True):
                cell.copy_(_full_rank(result, self.rank))
        return [t.to(dtype) for t, dtype in zip(held, self.dtypes, strict=True)]


def _wanted(rule: Reduction) -> list[int]:
    match rule:
        case Contract(lhs, rhs):
            return [lhs, rhs]
        case Extremum(value=value, payload=payload):
            return [value] if payload is None else [value, payload]
        case Map(value) | Fold(_, value):
            return [value]


def _full_rank(value: Tensor, rank: int) -> Tensor:
    return value.reshape((1,) * (rank - value.dim()) + tuple(value.shape)) if value.dim() < rank else value


@evaluates("linalg.generic", "linalg.contract")
def loop_nest(op: ir.Operation, program: Program) -> Step:
    """Both carry their maps and a body; contract's body is the multiply and add in the accumulator's type."""
    return LoopNest(op)
