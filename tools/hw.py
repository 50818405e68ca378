"""`topo-hw`: machines as data. Lists, reads, shows and calibrates topologies.

This file is the command line only; each subcommand has a module of its own. Exit codes: 0 all went well, 1 an error that was
reported as one line, 2 a command line that does not parse.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from topo_opt.errors import TopoError
from topo_opt.tools import hw_calibrate, hw_import, hw_list, hw_schema, hw_show

COMMANDS: dict[str, ModuleType] = {
    "list": hw_list,
    "show": hw_show,
    "import": hw_import,
    "calibrate": hw_calibrate,
    "schema": hw_schema,
}
"""Modules with `add_arguments(parser)`, `run(arguments) -> exit code`, and the help in their docstring."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return code
    except TopoError as error:
        if arguments.traceback:
            raise
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if arguments.traceback:
            raise
        print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 1


def _drop_output() -> None:
    # The interpreter must not complain about what could not be written once more when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topo-hw", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--traceback", action="store_true", help="show where in topo-hw an error comes from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary, _, rest = (module.__doc__ or "").partition("\n")
        said = summary.partition(": ")[2]
        sub = commands.add_parser(
            name,
            help=said,
            description=f"{said}\n{rest}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
    return parser


if __name__ == "__main__":
    sys.exit(main())
