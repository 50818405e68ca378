"""How much tuning is wanted, as the command line and the API say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topo_opt.errors import OptionError
from topo_opt.tuning.cache import default_folder

MODES = ("off", "cache", "short", "full")
"""No tuning at all, what is known already, and the two searches."""
BY_LEVEL = ("off", "cache", "short", "full")
LIMIT_S = {"short": 30.0, "full": 600.0}
"""Seconds that a search may take, for all kernels together."""


@dataclass(frozen=True)
class Settings:
    """`mode`: one of MODES. `folder`: the cache. `data`: more files of entries, or bundles. `limit_s`: seconds of a search."""

    mode: str = "off"
    folder: Path | None = None
    data: tuple[Path, ...] = ()
    limit_s: float = 0.0

    @property
    def searches(self) -> bool:
        """Whether kernels are measured when there is a GPU."""
        return self.mode in LIMIT_S

    @classmethod
    def of(
        cls,
        level: int,
        mode: str | None = None,
        folder: str | Path | None = None,
        data: Sequence[str | Path] = (),
        limit_s: float | None = None,
    ) -> Settings:
        """Settings from options; what is not given follows from the optimization level.

        Raises:
            OptionError: an unknown level or mode, or a limit that is not a positive number.
        """
        if not isinstance(level, int) or not 0 <= level < len(BY_LEVEL):
            raise OptionError(
                f"optimization level {level!r} does not exist", hint="there are 0, 1, 2 and 3 (-O0 to -O3)"
            )
        if isinstance(data, str | Path):
            raise OptionError(
                f"tuning data is {str(data)!r}, expected a list of files", hint=f"give [{str(data)!r}]"
            )
        chosen = BY_LEVEL[level] if mode is None else mode
        if chosen not in MODES:
            raise OptionError(f"there is no tuning mode {chosen!r}", hint=f"there are {', '.join(MODES)}")
        if limit_s is not None and not 0 < limit_s < 1e6:
            raise OptionError(
                f"a time limit of {limit_s} s for tuning", hint="give a positive number of seconds"
            )
        if chosen == "off":
            return cls()
        place = Path(folder) if folder is not None else default_folder()
        limit = LIMIT_S.get(chosen, 0.0) if limit_s is None else float(limit_s)
        return cls(chosen, place, tuple(Path(d) for d in data), limit)


def device_id(model: str) -> str:
    """The name of a device in keys and file names: `NVIDIA H200 SXM`  -->  `nvidia-h200-sxm`."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
