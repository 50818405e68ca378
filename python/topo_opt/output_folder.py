"""Whether a bundle can be put where it is asked for: seen before the compile, not after it."""

import os
import tempfile
from pathlib import Path

from topo_opt.errors import InputError
from topo_opt.runtime.bundle import is_bundle


def check_bundle_folder(out: str | Path) -> None:
    """Tries to make a folder beside the bundle and removes it again.

    Raises:
        InputError: the place cannot be written, or something that is not a bundle is in the way.
    """
    out = Path(os.path.abspath(out))
    refuse_strangers(out)
    check_writable(out.parent, f"the bundle {out}")


def refuse_strangers(out: Path) -> None:
    """Raises InputError when `out` is something else than a free name, an empty folder or an older bundle."""
    if out.is_symlink():
        raise InputError(f"{out} is a link, a bundle is not written through it")
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not is_bundle(out)):
        raise InputError(
            f"{out} exists and is not a bundle, it is left alone",
            hint="give another name, or remove it first",
        )


def check_writable(folder: Path, subject: str) -> None:
    """Checks that files can be made in `folder`, which is made itself later if it is not there.

    Raises:
        InputError: it cannot be written; the message starts with `subject`.
    """
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    try:
        # Permissions alone do not tell: a file system may be read-only, or take no files at all.
        os.rmdir(tempfile.mkdtemp(prefix=".topo-opt.", dir=there))
    except OSError as error:
        reason = f"{there}: {error.strerror}"
        raise InputError(f"{subject} can't be written: {reason}", hint="give another place with -o") from None
