"""What the command line says about a run, and what of it can be refused before the bundle and torch are loaded."""

from __future__ import annotations

import argparse
import re

from topo_opt.errors import OptionError

MOST_SECONDS = 1e6
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check(arguments: argparse.Namespace) -> None:
    """Raises OptionError for a value of another form, and for an option without the one that it belongs to."""
    bucket_of(arguments.bucket)
    if arguments.device is not None and not _DEVICE.fullmatch(arguments.device):
        raise OptionError(f"{arguments.device!r} is not a device", hint="use cuda, cuda:N or cpu")
    if not 0 < arguments.timeout <= MOST_SECONDS:
        raise OptionError(
            f"--timeout is {arguments.timeout:g}, expected seconds above 0, up to {MOST_SECONDS:g}"
        )
    if arguments.compare:
        if not arguments.bench:
            raise OptionError("--compare says what --bench times beside the program", hint="add --bench")
        peers_of(arguments.compare)
    if arguments.page is not None:
        if not arguments.bench:
            raise OptionError("--page shows what --bench measures", hint="add --bench")
        if arguments.page in ("", "-"):
            raise OptionError(
                f"--page is {arguments.page!r}, expected a file: tables go to standard output",
                hint="give a name such as times.html",
            )


def bucket_of(text: str | None) -> dict[str, int]:
    """`"batch=8,seq=128"` -> `{"batch": 8, "seq": 128}`.

    Raises:
        OptionError: text of another form.
    """
    out = {}
    for part in (text or "").split(","):
        if not part:
            continue
        name, _, size = part.partition("=")
        if not name or not size.isdecimal():
            raise OptionError(f"--bucket takes DIM=SIZE, not {part!r}")
        out[name] = int(size)
    return out


def peers_of(text: str) -> list[str]:
    """What `--compare` names.

    Raises:
        OptionError: a name that is none.
    """
    from topo_opt.tools.run_bench import MODES

    peers = [part for part in text.split(",") if part]
    if unknown := [peer for peer in peers if peer not in MODES]:
        raise OptionError(f"--compare does not know {unknown[0]!r}", hint="choose from " + ", ".join(MODES))
    return peers
