"""`topo-hw`: machines as data. Lists, reads, shows and calibrates topologies.

This file is the command line only; each subcommand has a module of its own. Exit codes: 0 all went well, 1 an error that was
reported as one line, 2 a command line that does not parse (an unknown option, a value
of another form, options that exclude each other).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from topo_opt.tools import hw_calibrate, hw_import, hw_list, hw_schema, hw_show
from topo_opt.tools.reporting import reported

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
    run = COMMANDS[arguments.command].run
    return reported(lambda: int(run(arguments)), arguments, "topo-hw", getattr(arguments, "output", None))


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
