"""Index expressions: simplification never changes a value, and proves the identities the code generator relies on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from topo_opt.structured.index import Expr, const, delinearize, linearize, symbol


@st.composite
def expressions(draw, depth=3):
    """An expression over a, b, c with an evaluator."""
    sizes = {n: draw(st.integers(1, 9)) for n in "abc"}

    def build(level):
        kind = draw(
            st.sampled_from(
                ["sym", "const", "add", "mul", "div", "mod", "sub"] if level else ["sym", "const"]
            )
        )
        if kind == "sym":
            name = draw(st.sampled_from("abc"))
            return symbol(name, sizes[name]), lambda env: env[name]
        if kind == "const":
            value = draw(st.integers(-12, 12))
            return const(value), lambda env: value
        left, le = build(level - 1)
        if kind in ("add", "sub"):
            right, re = build(level - 1)
            return (
                (left + right, lambda env: le(env) + re(env))
                if kind == "add"
                else (left - right, lambda env: le(env) - re(env))
            )
        number = draw(st.integers(1, 12))
        table = {
            "mul": (left * number, lambda env: le(env) * number),
            "div": (left // number, lambda env: le(env) // number),
            "mod": (left % number, lambda env: le(env) % number),
        }
        return table[kind]

    expr, evaluate = build(depth)
    return expr, evaluate, sizes


@given(expressions())
@settings(max_examples=400, deadline=None)
def test_simplification_keeps_values_and_bounds(case):
    expr, evaluate, sizes = case
    low, high = expr.bounds
    for a in range(sizes["a"]):
        for b in range(sizes["b"]):
            for c in range(sizes["c"]):
                env = {"a": a, "b": b, "c": c}
                expected = evaluate(env)
                assert eval(expr.source(), {}, env) == expected
                assert low <= expected <= high


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4), st.lists(st.integers(1, 7), min_size=1, max_size=4)
)
@settings(max_examples=100, deadline=None)
def test_linearize_inverts_delinearize(shape, _):
    numel = 1
    for size in shape:
        numel *= size
    x = symbol("x", numel)
    assert linearize(delinearize(x, shape), shape) == x


def test_reshape_there_and_back_is_identity():
    x = symbol("x", 4 * 8 * 16)
    inner = delinearize(linearize(delinearize(x, [4, 128]), [4, 128]), [4, 8, 16])
    assert linearize(inner, [4, 8, 16]) == x


def test_split_head_dimension_is_exact():
    m, n = symbol("m", 32), symbol("n", 512)
    head, lane = n // 64, n % 64
    assert head * 64 + lane == n
    assert (head * 64 + lane) // 64 == head
    assert (m * 512 + n) // 512 == m
    assert (m * 512 + n) % 512 == n


def test_symbols_of_size_one_vanish():
    assert symbol("x", 1) == const(0)
    assert isinstance(symbol("x", 2), Expr)


def _truncating(source: str, env: dict) -> int:
    """Evaluates the source with `//` and `%` as Triton has them: towards zero, the remainder with the dividend's sign."""
    import ast

    def value(node):
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=number):
                return number
            case ast.Name(id=name):
                return env[name]
            case ast.UnaryOp(operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = value(left), value(right)
                quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
                table = {
                    ast.Add: a + b,
                    ast.Sub: a - b,
                    ast.Mult: a * b,
                    ast.FloorDiv: quotient,
                    ast.Mod: a - quotient * b,
                }
                return table[type(op)]
        raise AssertionError(ast.dump(node))

    return value(ast.parse(source, mode="eval"))


@given(expressions())
@settings(max_examples=200, deadline=None)
def test_source_is_right_where_division_truncates(case):
    expr, evaluate, sizes = case
    for a in range(sizes["a"]):
        for b in range(sizes["b"]):
            for c in range(sizes["c"]):
                env = {"a": a, "b": b, "c": c}
                assert _truncating(expr.source(), env) == evaluate(env)
