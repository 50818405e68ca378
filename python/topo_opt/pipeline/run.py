"""Runs a pipeline over a module, pass by pass.

Every pass is a step of its own, C++ or Python, so that verifying, timing, printing, checking and reproducing work the same
for both. In a nested group a pass visits all matching ops before the next pass starts; for passes that are local to their op
this is what MLIR's own order gives too.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch_mlir import ir
from torch_mlir.passmanager import PassManager

from topo_opt.errors import CompilerCrash, TopoError
from topo_opt.passes.base import Pass, PassFailure
from topo_opt.pipeline import diagnostics
from topo_opt.pipeline.diagnostics import DiagnosedError, Diagnostic
from topo_opt.pipeline.spec import ROOT, Group, Leaf, PipelineSyntaxError, parse
from topo_opt.pipeline.upstream import nearest


@dataclass(frozen=True)
class Step:
    """One pass to run: the `index`-th of its pipeline (from 1), on the ops found along `path` below the root."""

    index: int
    path: tuple[str, ...]
    leaf: Leaf
    manager: PassManager | None  # None for a Python pass

    @property
    def name(self) -> str:
        return self.leaf.content.name

    @property
    def pipeline(self) -> str:
        """The text of a pipeline that runs just this step."""
        return _nest(self.path, str(self.leaf))


class Instrument(Protocol):
    """Looks on as a pipeline runs. Nothing may keep a reference to an op: passes erase them."""

    def before(self, step: Step, module: ir.Module) -> None: ...

    def after(self, step: Step, module: ir.Module) -> None: ...

    def failed(self, step: Step, module: ir.Module) -> None: ...

    def finish(self) -> None: ...


def build(pipeline: Group | str, context: ir.Context) -> list[Step]:
    """The steps of a pipeline.

    Raises:
        PipelineSyntaxError: text that does not parse, a pass that is not known (with its nearest neighbours), an option that the
            pass does not have, or a pass that cannot run on the op it is nested in.
    """
    text = pipeline if isinstance(pipeline, str) else str(pipeline)
    root = parse(text) if isinstance(pipeline, str) else pipeline
    with context:
        return [
            Step(index, path, leaf, None if isinstance(leaf.content, Pass) else _manager(path, leaf, text))
            for index, (path, leaf) in enumerate(root.leaves(), start=1)
        ]


def run(
    pipeline: Group | str | Sequence[Step],
    module: ir.Module,
    *,
    verify_each: bool = True,
    instruments: Sequence[Instrument] = (),
) -> None:
    """Runs the passes over `module` in place.

    Raises:
        DiagnosedError: a pass or the verifier refused the IR; has all diagnostics.
        CompilerCrash: a pass of ours raised something that is not a diagnosis.
        TopoError: what a pass or an instrument raised.
    """
    steps = build(pipeline, module.context) if isinstance(pipeline, (str, Group)) else pipeline
    with diagnostics.collect(module.context) as collected, module.context, ir.Location.unknown():
        for step in steps:
            for instrument in instruments:
                instrument.before(step, module)
            try:
                _run_step(step, module, verify_each, collected)
            except BaseException:
                for instrument in instruments:
                    instrument.failed(step, module)
                raise
            for instrument in instruments:
                instrument.after(step, module)
    for instrument in instruments:
        instrument.finish()


def _run_step(step: Step, module: ir.Module, verify_each: bool, collected: list[Diagnostic]) -> None:
    try:
        if step.manager:
            step.manager.enable_verifier(verify_each)
            step.manager.run(module.operation)
        else:
            for op in _anchored(module, step.path):
                step.leaf.content.apply(op)  # type: ignore[union-attr]
            if verify_each:
                module.operation.verify()
    except PassFailure as failure:
        if failure.location is not None:
            hint = f" ({failure.hint})" if failure.hint else ""
            failure.location.emit_error(failure.message + hint)
        raise DiagnosedError(_errors(collected, step)) from None
    except ir.MLIRError:
        raise DiagnosedError(_errors(collected, step)) from None
    except (TopoError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise CompilerCrash(
            f"pass '{step.leaf}' broke: {_last_line(error)}",
            hint="this is a fault of topo-opt; --mlir-pass-pipeline-crash-reproducer=FILE writes the input that shows it",
        ) from error


def _last_line(error: Exception) -> str:
    """The line that names an exception; one raised inside `walk` arrives as a RuntimeError with a whole traceback as its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    inside = len(lines) > 1 and isinstance(error, RuntimeError)
    return lines[-1] if inside else f"{type(error).__name__}: {lines[0] if lines else ''}"


def _errors(collected: list[Diagnostic], step: Step) -> tuple[Diagnostic, ...]:
    if any(d.severity == "error" for d in collected):
        return tuple(collected)
    return (*collected, Diagnostic("error", f"pass '{step.leaf}' failed without saying why"))


def _anchored(module: ir.Module, path: tuple[str, ...]) -> Iterator[Any]:
    """Op views of the ops that a pass nested along `path` visits, collected before the first of them is changed."""
    ops = [module.operation]
    for anchor in path:
        children = [o.operation for op in ops for region in op.regions for block in region for o in block]
        ops = [op for op in children if anchor in ("any", op.name)]
    return (op.opview for op in ops)


def _nest(path: tuple[str, ...], text: str) -> str:
    for anchor in (*reversed(path), ROOT):
        text = f"{anchor}({text})"
    return text


def _manager(path: tuple[str, ...], leaf: Leaf, text: str) -> PassManager:
    try:
        return PassManager.parse(_nest(path, str(leaf)))
    except ValueError as error:
        message, hint = _explain(leaf, str(error), path)
        raise PipelineSyntaxError(message, text, leaf.at, hint=hint) from None


def _explain(leaf: Leaf, error: str, path: tuple[str, ...]) -> tuple[str, str | None]:
    """MLIR's complaint about one pass, in one line, and what to do about it."""
    name = leaf.content.name
    if "does not refer to a registered pass" in error:
        candidates = nearest(name)
        hint = "did you mean " + " or ".join(f"'{c}'" for c in candidates) + "?" if candidates else None
        return f"'{name}' is not a known pass", hint or "--list-passes names them all"
    if "no such option" in error:
        option = error.split("no such option", 1)[1].split()[0]
        return f"pass '{name}' has no option '{option}'", None
    if restricted := re.search(r"restricted to '([\w.]+)'", error):
        anchor = restricted.group(1)
        return (
            f"pass '{name}' runs on '{anchor}', not on '{path[-1] if path else ROOT}'",
            f"write {anchor}({leaf})",
        )
    return f"pass '{leaf}' is refused: " + " ".join(error.split()), None
