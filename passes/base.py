"""What a pass is: a frozen dataclass whose fields are its options and whose docstring is its documentation.

    @dataclass(frozen=True)
    class FormKernels(Pass):
        '''Outlines compute ops into kernels. ...'''

        name = "topo-form-kernels"
        fuse: Literal["none", "cheap", "full"] = "full"
        max_inputs: int = 16

        def apply(self, module): ...

`topo-form-kernels{fuse=cheap max-inputs=8}` in a textual pipeline makes `FormKernels(fuse="cheap", max_inputs=8)`, and
`str()` of it gives the text back. Every field has a default; its type is one of bool, int, float, str, a `Literal` of
strings, `tuple[int, ...]`, `tuple[str, ...]`, or one of these `| None`.
"""

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NoReturn, Self, Union, get_args, get_origin, get_type_hints

from topo_opt.errors import PipelineError, TopoError


class PassFailure(TopoError):
    """A pass that cannot go on. The runner turns it into an MLIR error diagnostic at `location`.

    Args:
        message: what was given and what was expected.
        location: `ir.Location` of the op at fault; None when the pass has already emitted its diagnostics.
        hint: what to do about it, or None.
    """

    def __init__(self, message: str, *, location: Any = None, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.location = location


def fail(op: Any, message: str, *, hint: str | None = None) -> NoReturn:
    """Raises `PassFailure` at the location of `op` (an operation or op view)."""
    raise PassFailure(message, location=op.operation.location, hint=hint)


@dataclass(frozen=True)
class Pass:
    """Base of all passes."""

    name: ClassVar[str] = ""

    def apply(self, module: Any) -> None:
        """Rewrites `module` in place.

        Args:
            module: the op the pass is anchored on: an `ir.Module` or the op view of a `builtin.module`, or the op view of
                a `func.func` in a `func.func(...)` group. All have `.operation`, `.context` and `.regions`.

        Raises:
            PassFailure: the input is not what the pass accepts (use `fail(op, message)`).
        """
        raise NotImplementedError(f"{type(self).__name__}.apply")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """The pass with options given as text, keyed by their name in pipelines (`max-inputs`).

        Raises:
            PipelineError: an unknown option, or a value that is not of the option's type.
        """
        values, known = {}, option_types(cls)
        for key, text in options.items():
            field_name = key.replace("-", "_")
            if field_name not in known:
                names = ", ".join(n.replace("_", "-") for n in known) or "no options"
                raise PipelineError(f"pass '{cls.name}' has no option '{key}'", hint=f"it has {names}")
            values[field_name] = _parse(text, known[field_name], f"option '{key}' of '{cls.name}'")
        return cls(**values)

    def options(self) -> dict[str, str]:
        """The options that differ from their defaults, as text, in the order of the fields."""
        return {
            f.name.replace("_", "-"): _print(getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    def __str__(self) -> str:
        options = " ".join(f"{key}={quote(value)}" for key, value in self.options().items())
        return f"{self.name}{{{options}}}" if options else self.name


def option_types(cls: type[Pass]) -> dict[str, Any]:
    """Field name -> type of every option of a pass, in the order of the fields."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def quote(value: str) -> str:
    """An option's value as it stands in a pipeline: bare where that reads back as itself, quoted otherwise."""
    if re.fullmatch(r"[^\s\"'{}()\\]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _parse(text: str, kind: Any, subject: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if text == "none" and type(None) in args else _parse(text, inner, subject)
    if origin is tuple:
        return tuple(_parse(part, args[0], subject) for part in text.split(",")) if text else ()
    if origin is Literal:
        if text in args:
            return text
        raise PipelineError(f"{subject} is '{text}'", hint="expected one of " + ", ".join(map(str, args)))
    try:
        return _PARSERS[kind](text)
    except (ValueError, KeyError):
        raise PipelineError(f"{subject} is '{text}'", hint=f"expected {_EXPECTED[kind]}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: lambda t: _TRUTH[t.lower()],
    int: int,
    float: _finite,
    str: str,
}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


def _print(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(_print, value))
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)
