"""lit configuration: `lit test` runs every .mlir and .test file below this folder.

Tools are taken from the environment that lit itself runs in, so no build tree is needed.
"""

import os
import sys
from pathlib import Path

import lit.formats

config.name = "topo-opt"
config.test_format = lit.formats.ShTest()
config.suffixes = [".mlir", ".test"]
config.excludes = ["Inputs", "unit", "lit.cfg.py"]
config.test_source_root = str(Path(__file__).parent)
config.test_exec_root = os.environ.get("TOPO_LIT_OUTPUT", str(Path(__file__).parent.parent / "build" / "lit"))

config.environment["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), config.environment.get("PATH", "")]
)
config.environment["OMP_NUM_THREADS"] = "1"
# What was measured on this machine must not decide a test.
config.environment["TOPO_OPT_TUNING_CACHE"] = os.path.join(config.test_exec_root, "tuning")
config.substitutions += [
    ("%inputs", str(Path(__file__).parent / "Inputs")),
    ("%python", sys.executable),
]
