"""What can look on as a pipeline runs: IR printing, timing and the reproducer of a crash."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch_mlir import ir

from topo_opt.pipeline.run import Step


class Watcher:
    """An instrument that does nothing; the others override what they need."""

    def before(self, step: Step, module: ir.Module) -> None:
        """Called before a step runs."""

    def after(self, step: Step, module: ir.Module) -> None:
        """Called after a step has run and its result has verified."""

    def failed(self, step: Step, module: ir.Module) -> None:
        """Called instead of `after` when the step has raised."""

    def finish(self) -> None:
        """Called after the last step."""


class PrintIr(Watcher):
    """Prints the module after steps, to a stream or as a tree of files.

    Args:
        wanted: tells by its name whether a pass is printed after.
        only_changes: print only when the text of the module is not the text before the step.
        tree_dir: write `<anchor>_<symbol>/<index>_<pass>.mlir` below this folder instead of printing.
        stream: where to print, standard error by default.
        debug_info: print locations.
    """

    def __init__(
        self,
        wanted: Callable[[str], bool],
        *,
        only_changes: bool = False,
        tree_dir: Path | None = None,
        stream: TextIO | None = None,
        debug_info: bool = False,
    ):
        self.wanted, self.only_changes, self.tree_dir = wanted, only_changes, tree_dir
        self.stream, self.debug_info = stream or sys.stderr, debug_info
        self._text = ""

    def before(self, step: Step, module: ir.Module) -> None:
        if self.only_changes and not self._text:
            self._text = self._print(module)

    def after(self, step: Step, module: ir.Module) -> None:
        if not self.only_changes and not self.wanted(step.name):
            return
        text = self._print(module)
        changed, self._text = text != self._text, text
        if self.wanted(step.name) and (changed or not self.only_changes):
            self._emit(step, module, text, f"IR Dump After {step.leaf}")

    def failed(self, step: Step, module: ir.Module) -> None:
        if self.wanted(step.name):
            self._emit(step, module, self._print(module), f"IR Dump After {step.leaf} Failed")

    def _print(self, module: ir.Module) -> str:
        return module.operation.get_asm(enable_debug_info=self.debug_info, assume_verified=False)

    def _emit(self, step: Step, module: ir.Module, text: str, title: str) -> None:
        if self.tree_dir is None:
            print(f"// -----// {title} //----- //\n{text}", file=self.stream)
            return
        attributes = module.operation.attributes
        symbol = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "no-symbol-name"
        folder = self.tree_dir / f"builtin_module_{symbol}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{step.index}_{step.name}.mlir").write_text(text)


class Timing(Watcher):
    """Wall time per step, printed as MLIR prints it when the pipeline is through."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.seconds: list[tuple[str, float]] = []
        self._start = 0.0

    def before(self, step: Step, module: ir.Module) -> None:
        self._start = time.perf_counter()

    def after(self, step: Step, module: ir.Module) -> None:
        self.seconds.append((step.name, time.perf_counter() - self._start))

    def finish(self) -> None:
        total = sum(seconds for _, seconds in self.seconds)
        bar = f"===-{'-' * 73}-==="
        print(f"{bar}\n{'... Execution time report ...':^81}\n{bar}", file=self.stream)
        print(
            f"  Total Execution Time: {total:.4f} seconds\n\n  ----Wall Time----  ----Name----",
            file=self.stream,
        )
        for name, seconds in [*self.seconds, ("Total", total)]:
            share = 100 * seconds / total if total else 0.0
            print(f"  {seconds:8.4f} ({share:5.1f}%)  {name}", file=self.stream)


class Reproducer(Watcher):
    """Keeps a file that reproduces the step that is running: its input, with a pipeline of just this step inside.

    The file is there before the step starts, so it survives the death of the process; it is removed when all went well.
    `topo-opt --run-reproducer FILE` runs it.
    """

    def __init__(self, path: Path, *, verify_each: bool = True):
        self.path, self.verify_each = path, verify_each

    def before(self, step: Step, module: ir.Module) -> None:
        text = module.operation.get_asm(enable_debug_info=True, assume_verified=True)
        pipeline = step.pipeline.replace("\\", "\\\\").replace('"', '\\"')
        resource = (
            f'{{-#\n  external_resources: {{\n    mlir_reproducer: {{\n      pipeline: "{pipeline}",\n'
            f"      disable_threading: true,\n      verify_each: {str(self.verify_each).lower()}\n    }}\n  }}\n#-}}\n"
        )
        self.path.write_text(f"{text}\n{resource}")

    def finish(self) -> None:
        self.path.unlink(missing_ok=True)
