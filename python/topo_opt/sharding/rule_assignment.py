"""Assignments: which mesh axes split which factors of an op, and what that makes of its tensors.

`{factor: (axis, ...)}`, the major axis first; factors that are whole are not listed. A factor that does not divide may be split where it is
all of every dimension that carries it: parts of a dimension that was merged from several would not be whole numbers of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from topo_opt.sharding.rule import DimFactors, Rule
from topo_opt.sharding.spec import Combiner, Mesh, Sharding

Axes = tuple[str, ...]
Assignment = Mapping[int, Axes]


def axes_of(dims: DimFactors, assignment: Assignment) -> tuple[Axes, ...]:
    """The axes of every dimension of a tensor whose dimensions carry these factors."""
    return tuple(tuple(axis for f in carried for axis in assignment.get(f, ())) for carried in dims)


def terms_of(rule: Rule, assignment: Assignment) -> tuple[Axes, Combiner]:
    """The axes over which an op leaves partial results, in the order of its factors, and how they join."""
    split = [f for f in sorted(assignment) if rule.factors[f].kind == "reduction"]
    axes = tuple(axis for f in split for axis in assignment[f])
    return axes, (rule.factors[split[0]].combiner if split else "add")


def result_sharding(rule: Rule, position: int, assignment: Assignment) -> Sharding:
    """How an op leaves a result, before anything is communicated."""
    axes, combiner = terms_of(rule, assignment)
    return Sharding(axes_of(rule.results[position], assignment), axes, combiner)


def fault(rule: Rule, assignment: Assignment, mesh: Mesh) -> str | None:
    """Why an op cannot be split so, None when it can."""
    used = [axis for axes in assignment.values() for axis in axes]
    if len(set(used)) != len(used):
        return f"splits two factors over one axis: {dict(assignment)}"
    for f, axes in assignment.items():
        factor, parts = rule.factors[f], mesh.size(axes)
        if parts > 1 and factor.kind == "replicated":
            return (
                f"a loop of size {factor.size} may not be split, {'x'.join(axes)} would split it in {parts}"
            )
        if factor.size % parts and not _may_pad(rule, f, parts):
            return f"{factor.size} does not divide into {parts} parts ({'x'.join(axes)})"
    combiners = {rule.factors[f].combiner for f in assignment if rule.factors[f].kind == "reduction"}
    if len(combiners) > 1:
        return f"leaves results that join by {' and '.join(sorted(combiners))}"
    for dims in (*rule.operands, *rule.results):
        for carried in dims:
            if sentence := _gap(rule, carried, assignment, mesh):
                return sentence
    return None


def _may_pad(rule: Rule, factor: int, parts: int) -> bool:
    """Whether a factor may be split into parts of unequal size."""
    carrying = [c for dims in (*rule.operands, *rule.results) for c in dims if factor in c]
    return rule.factors[factor].size >= parts and all(len(carried) == 1 for carried in carrying)


def _gap(rule: Rule, carried: Sequence[int], assignment: Assignment, mesh: Mesh) -> str | None:
    """A dimension is cut into contiguous parts: a minor factor is split only where every major one is split to the end."""
    for major, minor in pairwise(carried):
        if assignment.get(minor) and mesh.size(assignment.get(major, ())) != rule.factors[major].size:
            return f"splits the inner {rule.factors[minor].size} of a dimension whose outer {rule.factors[major].size} stay together"
    return None


def factor_axes(rule: Rule, carried: Sequence[int], axes: Axes, mesh: Mesh) -> dict[int, Axes]:
    """The factors that a dimension split over `axes` splits; as many of the axes as can be given to factors."""
    found: dict[int, Axes] = {}
    rest = list(axes)
    if len(carried) == 1 and axes and rule.factors[carried[0]].size % mesh.size(axes):
        # All or nothing: parts of unequal size are no parts of larger ones.
        return {carried[0]: tuple(axes)} if _may_pad(rule, carried[0], mesh.size(axes)) else {}
    for f in carried:
        taken: list[str] = []
        while rest and rule.factors[f].size % mesh.size([*taken, rest[0]]) == 0:
            taken.append(rest.pop(0))
        if taken:
            found[f] = tuple(taken)
        if mesh.size(taken) != rule.factors[f].size:
            break
    return found


def assign(
    rule: Rule,
    tensors: Iterable[tuple[DimFactors, Sequence[Axes]]],
    mesh: Mesh,
    terms: Sequence[str] = (),
) -> dict[int, Axes]:
    """The assignment that agrees with the tensors given, the first ones before the others, as far as it is possible.

    Args:
        tensors: factors of the dimensions of an operand or result, and the axes over which it is split.
        terms: axes over which operands are terms of a sum, which split nothing but what leaves terms too.
    """
    found: dict[int, Axes] = {}
    for dims, sharding in tensors:
        for carried, axes in zip(dims, sharding, strict=True):
            for f, wanted in factor_axes(rule, carried, axes, mesh).items():
                known = found.get(f, ())
                if wanted[: len(known)] != known or wanted == known:
                    continue
                if rule.factors[f].kind != "reduction" and set(wanted) & set(terms):
                    continue
                trial = {**found, f: wanted}
                if fault(rule, trial, mesh) is None:
                    found = trial
    return found
