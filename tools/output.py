"""Where a tool's result goes: standard output, or a file that is either complete or not there."""

import os
import sys
import tempfile
from pathlib import Path

from topo_opt.errors import InputError
from topo_opt.output_folder import check_writable


def check_destination(destination: str | None) -> None:
    """Raises InputError when `write_output` could not write there: a folder, or a file where none can be made."""
    if destination in (None, "-"):
        return
    path = Path(str(destination))
    if path.is_dir():
        raise InputError(f"{destination} is a folder, the result is one file", hint="give a file name")
    if not path.parent.is_dir():
        raise InputError(f"{destination} can't be written: there is no folder {path.parent}")
    if not path.exists() or path.is_file():
        check_writable(path.parent, str(destination))


def write_output(data: bytes, destination: str | None) -> None:
    """Writes to standard output when `destination` is None or "-", else to the file, by way of a new one beside it.

    Raises:
        InputError: the file cannot be written.
    """
    if destination in (None, "-"):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path = Path(str(destination))
    if path.exists() and not path.is_file():
        # A device or pipe is written straight: there is nothing to replace.
        path.write_bytes(data)
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"{destination}: {error.strerror}") from None
