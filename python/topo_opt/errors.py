"""Every error a user can see. A message says what was given, what was expected and what to do."""

from dataclasses import dataclass


class TopoError(Exception):
    """Base of all errors that are reported as one diagnostic and never as a traceback.

    Args:
        message: what was given and what was expected.
        hint: what to do about it, or None.
        where: `file:line` or `file:line:col` in the user's model, recipe or IR, or None.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, where: str | None = None):
        super().__init__(message)
        self.message, self.hint, self.where = message, hint, where

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def render(self) -> str:
        """The diagnostic as the command line prints it, without a trailing newline."""
        head = f"{self.where}: " if self.where else ""
        tail = f" ({self.hint})" if self.hint else ""
        return f"{head}error: {self.message}{tail}"


class InputError(TopoError):
    """A file or argument that cannot be used as it is."""


class OptionError(InputError):
    """An option whose value has not the form that it takes, or options that exclude each other: seen without any file."""

    exit_code = 2


class UntrustedError(InputError):
    """A model file or bundle with content that is not on the list of what is safe to load."""


class PipelineError(OptionError):
    """A textual pass pipeline that does not parse or names something unknown."""


class UnsupportedError(TopoError):
    """A program that cannot be compiled; names the op and the source line."""


class StrictError(TopoError):
    """Something was left to the slow path and `--strict` was given."""


class CompilerCrash(TopoError):
    """A native library died; the child process was contained and a reproducer written."""


@dataclass(frozen=True)
class Remark:
    """Something that did not take effect, or was done another way than asked.

    `kind` is a stable identifier such as "left-to-aten" that reports group by.
    """

    kind: str
    subject: str
    reason: str
    where: str | None = None
