"""Textual pipelines: the tree, options and their types, the round trip, and where errors point."""

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_opt.errors import PipelineError
from topo_opt.passes import PASSES, pass_class
from topo_opt.passes.base import Pass, quote
from topo_opt.pipeline import levels
from topo_opt.pipeline.spec import Group, Leaf, UpstreamPass, parse


@dataclass(frozen=True)
class Example(Pass):
    """Has an option of every type."""

    name = "test-example"
    fuse: Literal["none", "cheap", "full"] = "full"
    max_inputs: int = 16
    ratio: float = 0.5
    exact: bool = False
    file: str | None = None
    sizes: tuple[int, ...] = ()


@pytest.fixture(autouse=True)
def example_is_a_pass(monkeypatch):
    monkeypatch.setitem(PASSES, Example.name, f"{__name__}:Example")


def only_pass(text):
    return parse(text).items[0].content


def test_options_become_typed_fields():
    text = 'test-example{fuse=cheap max-inputs=-3 ratio=1e-3 exact=true file="a b.json" sizes=1,2,3}'
    assert only_pass(text) == Example("cheap", -3, 1e-3, True, "a b.json", (1, 2, 3))


def test_only_options_that_differ_are_printed():
    assert str(Example()) == "test-example"
    assert str(Example(fuse="none", sizes=(4, 5))) == "test-example{fuse=none sizes=4,5}"


def test_nesting_and_upstream_passes_keep_their_text():
    text = "builtin.module(cse, func.func(canonicalize{max-iterations=2 test-convergence=1}, test-example{exact=1}),any(cse))"
    tree = parse(text)
    inner = Group(
        "func.func",
        (
            Leaf(UpstreamPass("canonicalize", "max-iterations=2 test-convergence=1")),
            Leaf(Example(exact=True)),
        ),
    )
    assert tree == Group(
        "builtin.module", (Leaf(UpstreamPass("cse")), inner, Group("any", (Leaf(UpstreamPass("cse")),)))
    )
    assert [path for path, _ in tree.leaves()] == [(), ("func.func",), ("func.func",), ("any",)]


def test_the_anchor_may_be_left_out():
    assert parse("cse,test-example") == parse("builtin.module(cse,test-example)")
    assert parse("") == parse("builtin.module()") == Group("builtin.module")


passes = st.builds(
    Example,
    st.sampled_from(["none", "cheap", "full"]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none()
    | st.text(st.characters(codec="ascii", exclude_characters="\x00")).filter(lambda t: t != "none"),
    st.lists(st.integers(), min_size=1, max_size=3).map(tuple),
)
names = st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True).filter(lambda n: n not in PASSES)
leaves = st.builds(
    Leaf, passes | st.builds(UpstreamPass, names, st.sampled_from(["", "a=1", "x={y=2} z='}'"]))
)
trees = st.recursive(
    leaves, lambda inner: st.builds(Group, names, st.lists(inner, max_size=3).map(tuple)), max_leaves=6
)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees, max_size=4).map(tuple))
def test_round_trip(items):
    tree = Group("builtin.module", items)
    assert parse(str(tree)) == tree
    assert str(parse(str(tree))) == str(tree)


@given(st.text(min_size=1))
def test_quoted_values_read_back(value):
    PASSES.setdefault(Example.name, f"{__name__}:Example")
    assert only_pass(f"test-example{{file={quote(value)}}}").file == (None if value == "none" else value)


ERRORS = {
    "a b": (1, 3, "expected ','"),
    "cse,": (1, 5, "expected the name of a pass"),
    "func.func(cse": (1, 14, "missing '\\)'"),
    "cse)": (1, 4, "expected ','"),
    "cse{a": (1, 4, "missing '}'"),
    "cse,\n  test-example{fuse=most}": (2, 3, "option 'fuse' of 'test-example' is 'most'"),
    "test-example{max-inputs=1.5}": (1, 1, "'1.5'"),
    "test-example{ratio=nan}": (1, 1, "'nan'"),
    "test-example{no-such=1}": (1, 1, "has no option 'no-such'"),
    "test-example{fuse}": (1, 14, "expected an option as key=value"),
    "test-example{exact=1 exact=0}": (1, 22, "given twice"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_point_at_the_place(text):
    line, col, message = ERRORS[text]
    with pytest.raises(PipelineError, match=message) as caught:
        parse(text)
    rendered = caught.value.render().split("\n")
    assert rendered[0].startswith(f"pipeline:{line}:{col}: error: ")
    assert rendered[1] == text.split("\n")[line - 1]
    assert rendered[2] == " " * (col - 1) + "^"


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab-,(){}='\" \n\\1"), max_size=30))
def test_any_text_parses_or_is_diagnosed(text):
    try:
        tree = parse(text)
    except PipelineError:
        return
    assert parse(str(tree)) == tree


def test_a_name_that_is_not_ours_is_an_error():
    with pytest.raises(PipelineError, match="not a pass of topo-opt"):
        pass_class("topo-no-such")


@pytest.mark.parametrize("level", range(4))
def test_levels_are_pipelines_that_round_trip(level, monkeypatch):
    pipeline = levels.pipeline(level)
    assert parse(str(pipeline)) == pipeline
    ours = [leaf.content.name for _, leaf in pipeline.leaves() if isinstance(leaf.content, Pass)]
    assert ours[:3] == ["topo-raise-named-ops", "topo-lower-torch", "topo-verify-structured"]
    phases = [str(levels.pipeline(level, (phase,)))[len("builtin.module(") : -1] for phase in levels.PHASES]
    assert f"builtin.module({','.join(phases)})" == str(pipeline)
