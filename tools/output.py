"""Where a tool's result goes: standard output, or a file that is either complete or not there."""

import os
import sys
import tempfile
from pathlib import Path

from topo_opt.errors import InputError


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
