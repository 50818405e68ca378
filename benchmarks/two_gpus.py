"""Models split over two GPUs beside one GPU and PyTorch's tensor parallelism, in one run.

    benchmarks/two_gpus.sh                                                  # all of it
    python benchmarks/two_gpus.py --prepare DIR [case ...]                  # compiles; needs no GPU
    torchrun --nproc-per-node=2 benchmarks/two_gpus.py --measure DIR [--out FOLDER] [case ...]

A row is one way to split one case: the median of a replayed graph, the slower rank's; what the plan predicted; the largest difference from the
one-GPU program's result. Each is written to `two_gpus.json` as soon as it is measured. A row that fails or takes longer than
`--row-seconds` ends the processes, since it may have left GPUs in any state, and is recorded when new ones start. What is
recorded is not measured again. `--table` prints what there is.
`--device cpu --small` runs the same with gloo, Triton's interpreter and small sizes: a test of this program, not of speed.
`--device cuda:0` puts both ranks on one GPU: right or wrong, not how fast.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from two_gpus_cases import Case, cases, options_of

AGAIN = 3
"""Exit code: something is left to be measured, by new processes."""


def prepare(folder: Path, names: list[str], topology: str, small: bool) -> int:
    """Writes the bundles of every case, and what the plans predict; the number of those that failed. What is there is kept."""
    from topo_opt.errors import TopoError

    known, failed = cases(small), 0
    for name in names or list(known):
        case = known[name]
        work = case.build("meta")
        with torch.no_grad():
            program = torch.export.export(work.module, work.inputs, strict=False)
        for way in ("one", *case.ways):
            about = folder / name / f"{way}.json"
            if about.exists():
                continue
            start = time.time()
            try:
                found = _prepare_way(folder / name / way, case, way, program, work, topology)
            except (TopoError, ValueError) as error:
                failed += 1
                found = {"failed": str(error)[:500]}
            about.parent.mkdir(parents=True, exist_ok=True)
            about.write_text(json.dumps(found))
            print(f"{name} {way}: {json.dumps(found)}, {time.time() - start:.1f} s", flush=True)
    return failed


def _prepare_way(out: Path, case: Case, way: str, program: Any, work: Any, topology: str) -> dict[str, Any]:
    from topo_opt import driver

    options = options_of(case, way, program, work, topology)
    done = driver.compile({"main": program}, options, out)
    (row,) = done.report.functions
    plan = done.plans[0] if done.plans else None
    return {
        "predicted_ms": plan.seconds * 1e3 if plan else None,
        "mesh": dict(plan.mesh.axes) if plan else {},
        "launches": row.kernels,
        "collectives": row.collectives,
        "digest": hashlib.sha256((out / "plan.json").read_bytes()).hexdigest()[:16],
    }


class Log:
    """The rows measured so far, in a file that is complete at all times. Only the first rank writes it.

    A file beside it names the row that is being measured: what finds it there at the start comes after processes that have died.
    """

    def __init__(self, folder: Path, about: dict[str, Any], rank: int):
        self.path, self.about, self.rank = folder / "two_gpus.json", about, rank
        self.current = folder / "current.json"
        self.rows: list[dict[str, Any]] = []
        self.again: tuple[str, str] | None = None
        """A row that processes have died in without a word, once: it is measured again."""
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if all(found.get(k) == v for k, v in about.items() if k != "date"):
                self.rows = found["rows"]
                self.about |= {k: found[k] for k in ("died",) if k in found}
        if rank == 0 and self.current.exists():
            self._bury()

    def _bury(self) -> None:
        row = json.loads(self.current.read_text())
        reasons = {p.name: p.read_text() for p in sorted(self.path.parent.glob("failed.*.txt"))}
        if not reasons and not row.pop("again", False):
            self.again = (row["case"], row["who"])
            self.about["died"] = self.about.get("died", 0) + 1
            return self.end()
        told = "; ".join(reasons.values()) or "the processes died without a word, twice"
        if self.row(row["case"], row["who"]) is None:
            self.add({**row, "failed": told})
        self.end()

    def begin(self, row: dict[str, Any]) -> None:
        """A row is about to be measured."""
        if self.rank == 0:
            again = {"again": True} if self.again == (row["case"], row["who"]) else {}
            self.current.write_text(json.dumps({**row, **again}))

    def fail(self, reason: str) -> None:
        """This rank cannot go on; told when new processes start."""
        (self.path.parent / f"failed.{self.rank}.txt").write_text(f"rank {self.rank}: {reason}")

    def end(self) -> None:
        """The row is recorded."""
        if self.rank == 0:
            self.current.unlink(missing_ok=True)
            for left in self.path.parent.glob("failed.*.txt"):
                left.unlink()

    def row(self, case: str, who: str) -> dict[str, Any] | None:
        """What is recorded of this, or None."""
        return next((r for r in self.rows if (r["case"], r["who"]) == (case, who)), None)

    def add(self, row: dict[str, Any]) -> None:
        """Records a row and writes everything."""
        self.rows.append(row)
        if self.rank != 0:
            return
        print(json.dumps(row, default=str), flush=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1, default=str))
        beside.replace(self.path)


def measure(arguments: argparse.Namespace) -> int:
    """Measures, as one rank of two, what is not recorded yet; returns the exit code."""
    from two_gpus_rows import Limit, Machine, measured_row

    start = time.time()
    torch.set_grad_enabled(False)
    machine = Machine(arguments.device)
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if machine.device.type == "cuda" else "cpu",
        "shared": machine.shares_gpu,
        "small": arguments.small,
        "date": time.strftime("%Y-%m-%d"),
    }
    if machine.rank == 0:
        log = Log(arguments.out, about, 0)
    machine.together()
    if machine.rank != 0:
        log = Log(arguments.out, about, machine.rank)
    machine.together()
    known = cases(arguments.small)
    limit = Limit(arguments.row_seconds, log)
    for name in arguments.cases or list(known):
        case = known[name]
        peers = ["torch tensor parallel"] if arguments.peers and case.peer else []
        for who in ("one", *case.ways, *peers):
            if log.row(name, who) is not None:
                continue
            if machine.slower(time.time() - start) > arguments.seconds:
                return machine.end(AGAIN)
            row: dict[str, Any] = {"case": name, "who": who}
            log.begin(row)
            limit.begin(f"took longer than {arguments.row_seconds:g} s")
            try:
                row |= measured_row(arguments.measure / name, name, case, who, machine, log)
            except Exception as error:
                traceback.print_exc()
                log.fail(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
                return machine.leave(AGAIN)
            limit.end()
            log.add(row)
            log.end()
    return machine.end(0)


def table(path: Path) -> int:
    """Prints what is recorded, with ratios; returns 1 when a row failed."""
    found = json.loads(path.read_text())
    rows = found["rows"]
    single = {row["case"]: row.get("ms") for row in rows if row["who"] == "one"}
    out = Table(
        "case", "who", "ms", "of one GPU", "predicted ms", "of measured", "collectives", "differs", "note",
        title=f"two of {found['device']}, torch {found['torch']}, {found['date']}",
    )  # fmt: skip

    def cell(value: Any, text: str) -> str:
        return text.format(value) if value is not None else ""

    for row in rows:
        ms, predicted, one = row.get("ms"), row.get("predicted_ms"), single.get(row["case"])
        out.add_row(
            row["case"],
            row["who"],
            cell(ms, "{:.4f}"),
            cell(ms / one if ms and one and row["who"] != "one" else None, "{:.3f}"),
            cell(predicted, "{:.4f}"),
            cell(predicted / ms if ms and predicted else None, "{:.2f}"),
            cell(row.get("collectives"), "{}"),
            cell(row.get("differs"), "{:.4f}"),
            row.get("failed", row.get("note", "")),
        )
    Console(width=180).print(out)
    _print_choices(rows)
    return int(any(row.get("failed") for row in rows))


def _print_choices(rows: list[dict[str, Any]]) -> None:
    """Whether the planner's choice was the fastest of what was measured."""
    for case in dict.fromkeys(row["case"] for row in rows):
        ours = {
            r["who"]: r["ms"] for r in rows if r["case"] == case and r.get("ms") and "torch" not in r["who"]
        }
        if "planned" in ours and len(ours) > 1:
            best = min(ours, key=ours.__getitem__)
            print(f"{case}: planned takes {ours['planned'] / ours[best]:.3f} of the fastest, {best}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--measure", type=Path, metavar="DIR")
    parser.add_argument("--table", type=Path, metavar="FILE", help="prints a two_gpus.json")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--topology", default="h200-x2", help="of two devices, for --prepare")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or cuda:0 for both ranks on one GPU")
    parser.add_argument("--peers", action="store_true", help="PyTorch's tensor parallelism too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after so long")
    parser.add_argument("--row-seconds", type=float, default=90.0, help="for one row (default: 90)")
    parser.add_argument("--small", action="store_true", help="small sizes, for a try without GPUs")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - cases(arguments.small).keys():
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(cases(arguments.small))}")
    warnings.filterwarnings("ignore")
    if arguments.prepare:
        return int(bool(prepare(arguments.prepare, arguments.cases, arguments.topology, arguments.small)))
    if arguments.measure:
        arguments.out.mkdir(parents=True, exist_ok=True)
        return measure(arguments)
    return table(arguments.table or arguments.out / "two_gpus.json")


if __name__ == "__main__":
    sys.exit(main())
