"""Programmatic dependent launch: what a kernel may do before the kernel in front of it has finished.

A kernel that is launched dependently starts while the one before it still runs. Its source lets the next one start in turn,
may load arguments that nothing writes (`immutable`), waits, and only then touches anything else:

    x = ...; w = tl.load(in1 + x); a = tl.load(in0 + x)
        -->  gdc_launch_dependents(); x = ...; w = tl.load(in1 + x); gdc_wait(); a = tl.load(in0 + x)

What a kernel two launches back wrote is `settled` when the kernel in between lets others start only after its own wait (its trigger
is late): by then the one before it has finished. Such arguments may be loaded early too (`topo-mark-settled-arguments`).

A kernel may also wait where its own source says, in the first turn of a loop, so that what the compiler requests ahead of that loop
comes early (`attention_early`). Such a wait is a function of the file's own (`WAIT_IN_LOOP`).

`arrange` proves on the source which statements may stand before the wait: assignments of a name that is assigned once, made of
index arithmetic and of loads from immutable parameters alone. It moves the ones that such a load needs, and no others.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

TRIGGER = "gdc_launch_dependents()"
WAIT = "gdc_wait()"
WAIT_IN_LOOP = "wait_in_loop()"
IMPORT = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait"
FUNCTIONS = ("wait_in_loop",)
"""Functions that a file with such a kernel defines (`prelude`)."""
# Triton's own wait is, from 3.9 on, an operation that keeps the pipeliner from requesting ahead in a loop it stands in. "memory" lets
# no load behind the wait move in front of it.
_WAIT_IN_LOOP = """@triton.jit
def wait_in_loop():
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


"""
# Functions of `tl` whose result depends on their arguments and the program alone.
_PURE = frozenset({
    "arange", "broadcast_to", "cdiv", "expand_dims", "full", "max", "maximum", "min", "minimum", "multiple_of", "num_programs",
    "pointer_type", "program_id", "reshape", "where", "zeros",
})  # fmt: skip
_WAITS = (WAIT, WAIT_IN_LOOP)
_PURE_METHODS = frozenset({"to", "reshape"})


@dataclass(frozen=True)
class _Statement:
    """One statement of the function's own block: its lines, the names it reads, and the name it makes when it may move."""

    lines: tuple[str, ...]
    reads: frozenset[str]
    stores: frozenset[str]
    """Names that it assigns."""
    makes: str | None
    loads: bool


def at_start(late: bool) -> tuple[str, ...]:
    """What a kernel begins with; `late`: its trigger comes with the wait."""
    return () if late else (TRIGGER,)


def at_wait(late: bool) -> tuple[str, ...]:
    """What stands where a kernel waits for the one before it."""
    return (WAIT, TRIGGER) if late else (WAIT,)


def prelude(body: str) -> str:
    """Definition of the wait that `body` calls inside of a loop, if it does."""
    return _WAIT_IN_LOOP if WAIT_IN_LOOP in body else ""


def arrange(
    lines: Sequence[str], immutable: Collection[str], free: Collection[str], *, late: bool = False
) -> list[str]:
    """The body of a kernel as it is launched dependently.

    Args:
        lines: the body, indented once.
        immutable: names of pointers and descriptors to memory that no kernel writes, or none that may still run.
        free: other names that are known from the start, the tile sizes.
        late: whether the kernel lets the next one start only after its wait.

    A body that has its own waits, the last of them outside of loops, stays as it is.
    """
    if any(line.strip() in _WAITS for line in lines):
        return _as_it_waits(lines, {*immutable, *free}, late)
    statements = _statements(lines)
    early = _before_wait(statements, frozenset(immutable), frozenset(free))
    before = [line for i, s in enumerate(statements) if i in early for line in s.lines]
    after = [line for i, s in enumerate(statements) if i not in early for line in s.lines]
    first, waiting = ([f"    {line}" for line in lines] for lines in (at_start(late), at_wait(late)))
    return [*first, *before, *waiting, *after]


def _as_it_waits(lines: Sequence[str], known: Collection[str], late: bool) -> list[str]:
    """A body with its own waits. What stands in front of the statement with the first one must be made of what is known alone."""
    made = {"tl", "float", "int", "True", "False", *known}
    for statement in _statements(lines):
        if any(line.strip() in _WAITS for line in statement.lines):
            break
        assert statement.reads <= made | statement.stores, (
            f"{statement.lines} reads what is not complete before the wait"
        )
        made |= statement.stores
    last = max(i for i, line in enumerate(lines) if line.strip() == WAIT)
    waiting = [f"    {line}" for line in at_wait(late)]
    return [*(f"    {line}" for line in at_start(late)), *lines[:last], *waiting, *lines[last + 1 :]]


def _statements(lines: Sequence[str]) -> list[_Statement]:
    tree = ast.parse("\n".join(["def body():", *lines]))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    stored = Counter(
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )
    found = []
    for node in function.body:
        text = tuple(lines[node.lineno - 2 : (node.end_lineno or node.lineno) - 1])
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        makes, loads = None, False
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            calls = [_callee(n) for n in ast.walk(node.value) if isinstance(n, ast.Call)]
            if stored[node.targets[0].id] == 1 and None not in calls:
                makes, loads = node.targets[0].id, "load" in calls
        found.append(_Statement(text, frozenset(names), frozenset(assigned), makes, loads))
    return found


def _callee(call: ast.Call) -> str | None:
    """ "load" for a load of what does not change, "" for a function without memory, None for any other."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return None
    if function.attr == "load":
        # What is read again and again until it changes is no immutable memory, though its address may be known.
        return None if any(k.arg == "volatile" for k in call.keywords) else "load"
    if isinstance(function.value, ast.Name) and function.value.id == "tl":
        return "" if function.attr in _PURE else None
    return "" if function.attr in _PURE_METHODS else None


def _before_wait(
    statements: Sequence[_Statement], immutable: frozenset[str], free: frozenset[str]
) -> set[int]:
    """Numbers of the statements to move: loads of immutable memory and what their addresses are made of."""
    # A name of memory that may be written is never known before the wait, nor is anything made from it.
    known = {"tl", "float", "int", "True", "False", *immutable, *free}
    maker: dict[str, int] = {}
    for i, s in enumerate(statements):
        if s.makes is not None and s.reads <= known:
            known.add(s.makes)
            maker[s.makes] = i
    early: set[int] = set()
    stack = [i for i in maker.values() if statements[i].loads]
    while stack:
        i = stack.pop()
        if i not in early:
            early.add(i)
            stack.extend(maker[name] for name in statements[i].reads if name in maker)
    return early
