"""The part of the page about time: what is predicted and, in the page that `topo-run --page` writes, what was measured.

Made of report.json alone, without the compiler: where a bundle is measured there may be none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from topo_opt.errors import InputError
from topo_opt.prediction import Prediction
from topo_opt.runtime import strict_json
from topo_opt.runtime.strict_json import Json

BEGIN, END = "<!-- times -->", "<!-- end of times -->"
"""What stands around this part. Text of a model is escaped and cannot hold them."""
OLD = "the bundle is of a version that predicted nothing; compile the model again"

Key = tuple[str, tuple[tuple[str, int], ...]]
"""A function and its bucket, in the order of names."""


@dataclass(frozen=True)
class Timing:
    """Median, 10th and 90th percentile of a call in milliseconds; None, with the reason in `error`, where there was no call."""

    what: str
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    error: str = ""


@dataclass(frozen=True)
class Measurement:
    """What was measured, where and with what.

    Args:
        machine: the devices, in words.
        versions: of the software, by name.
        date: of the measurement, as in ISO 8601.
        how: what holds of all of the times, in sentences.
        interpreted: kernels ran in Triton's interpreter, which is no measure of speed.
        ours: for each variant that was measured, the ways in which the program was timed, a whole call first.
        others: the same for other ways to run the same function.
        unmeasured: for other functions the reason; what is in none of them was not asked for.
    """

    machine: str
    versions: Mapping[str, str]
    date: str
    how: Sequence[str]
    interpreted: bool
    ours: Mapping[Key, Sequence[Timing]]
    others: Mapping[Key, Sequence[Timing]]
    unmeasured: Mapping[str, str]


@dataclass(frozen=True)
class _Function:
    """The row of a function in report.json, as far as it is needed here."""

    function: str
    bucket: dict[str, int]
    predicted: Prediction | None = None
    unpredicted: str | None = None
    whole: bool = False
    aten: int = 0

    @property
    def key(self) -> Key:
        return key(self.function, self.bucket)

    def as_row(self) -> dict[str, Any]:
        bucket = ", ".join(f"{name} = {size}" for name, size in self.bucket.items())
        return {
            "function": self.function,
            "bucket": bucket or "one size",
            "predicted": self.predicted,
            "unpredicted": self.unpredicted or OLD,
        }


def key(function: str, bucket: Mapping[str, int]) -> Key:
    """How a variant is named in a `Measurement`."""
    return function, tuple(sorted(bucket.items()))


def section(report: Json, measurement: Measurement | None = None) -> str:
    """This part of the page as HTML.

    Args:
        report: report.json.

    Raises:
        UntrustedError: it has another form.
    """
    functions = list(_functions(report))
    rows = [row for f in functions for row in _rows(f, measurement)]
    alone = [f.as_row() for f in functions]
    return _environment().get_template("times.html.jinja").render(
        measurement=measurement,
        about=list(_about(report, functions, measurement)),
        warnings=list(_warnings(measurement)),
        rows=rows,
        parts=[row for row in alone if row["predicted"]],
        unpredicted=[row for row in alone if not row["predicted"]],
        others=[row for f in functions for row in _others(f, measurement)],
    )  # fmt: skip


def with_measured(page: str, report: Json, measurement: Measurement) -> str:
    """The page of a bundle, what was measured beside what it predicts.

    Raises:
        InputError: the page has no place for it.
        UntrustedError: report.json has another form.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(
            "the bundle's report.html has no place for measured times", hint="compile the model again"
        )
    return f"{before}{BEGIN}\n{section(report, measurement)}{END}{after}"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("topo_opt.report_page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Four digits, and no more places than that takes: from a microsecond to minutes.
    environment.filters["time"] = lambda seconds: f"{float(f'{seconds * 1e3:.4g}'):.10g}"
    environment.filters["ratio"] = lambda number: f"{number:.3g}"
    return environment


def _functions(report: Json) -> Iterator[_Function]:
    rows = report.get("functions") if isinstance(report, dict) else None
    names = _Function.__dataclass_fields__
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        known = {n: v for n, v in row.items() if n in names} if isinstance(row, dict) else row
        yield strict_json.decode(_Function, known, f"report.functions[{i}]")


def _rows(function: _Function, measurement: Measurement | None) -> Iterator[dict[str, Any]]:
    row = function.as_row()
    timings = measurement.ours.get(function.key, ()) if measurement else ()
    for timing in timings:
        ratio = None
        if function.predicted and timing.median_ms:
            ratio = function.predicted.seconds * 1e3 / timing.median_ms
        yield row | {"timing": timing, "ratio": ratio}
    if not timings:
        reasons = measurement.unmeasured if measurement else {}
        otherwise = "left to ATen as a whole" if function.whole else "it was not asked for"
        yield row | {"timing": None, "unmeasured": reasons.get(function.function, otherwise)}


def _others(function: _Function, measurement: Measurement | None) -> Iterator[dict[str, Any]]:
    if measurement is None or not measurement.ours.get(function.key):
        return
    mine = measurement.ours[function.key][0].median_ms
    for timing in measurement.others.get(function.key, ()):
        ratio = timing.median_ms / mine if timing.median_ms is not None and mine else None
        yield function.as_row() | {"timing": timing, "ratio": ratio}


def _about(report: Json, functions: Sequence[_Function], measurement: Measurement | None) -> Iterator[str]:
    found = next((f.predicted for f in functions if f.predicted), None)
    if found is not None:
        ranks = f"{found.devices} ranks on " if found.devices > 1 else ""
        yield f"Predicted by the planner's cost model for {ranks}{found.model}."
        if isinstance(level := report.get("level"), int) and level < 2:
            yield f"It describes kernels as -O2 forms them; these are of -O{level}."
        if any(f.aten for f in functions):
            yield "Of calls that are left to ATen it knows the bytes and not the operations."
    if measurement is None:
        yield "topo-run BUNDLE --bench --page FILE.html makes this page with measured times beside these."
        return
    versions = ", ".join(f"{name} {version}" for name, version in measurement.versions.items())
    yield f"Measured {measurement.date} on {measurement.machine}, with {versions}."
    yield from measurement.how


def _warnings(measurement: Measurement | None) -> Iterator[str]:
    if measurement is not None and measurement.interpreted:
        yield (
            "Measured in Triton's interpreter on a CPU, which shows whether results are right and not how fast kernels are: "
            "the ratio says nothing about the prediction."
        )
