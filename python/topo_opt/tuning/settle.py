"""From problems to choices by measuring: one search, its results into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from topo_opt.tuning.cache import Store
from topo_opt.tuning.measure import Measurer
from topo_opt.tuning.records import Choice, Entry
from topo_opt.tuning.search import Found, Problem, Search


def settle(
    problems: Sequence[Problem],
    guesses: dict[str, Choice],
    measurer: Measurer,
    store: Store,
    *,
    depth: str,
    limit_s: float,
    climbs: bool = True,
) -> dict[str, Choice]:
    """The choice for every problem.

    Args:
        guesses: by symbol what is chosen where nothing could be measured.
        climbs: whether tiles may be asked for that no problem lists.
    """
    found = Search(measurer, depth, limit_s, climbs).run(problems)
    choices = {}
    for problem in problems:
        own = found[problem.symbol]
        choice = _choice(problem, own, guesses[problem.symbol], store, depth)
        if choice.basis == "measured" and choice.entry is not None and not own.skipped:
            store.put(choice.entry)
        choices[problem.symbol] = choice
    return choices


def _choice(problem: Problem, found: Found, guess: Choice, store: Store, depth: str) -> Choice:
    timed, rejected = found.ordered(problem.candidates[0]), tuple(found.rejected.values())
    if not timed:
        reason = rejected[0].reason if rejected else "time ran out before its first candidate"
        note = f"nothing could be measured: {reason}"
        return replace(guess, tried=len(rejected), rejected=rejected, note=note)
    entry = Entry(problem.key, store.device, store.versions, depth, timed, rejected, problem.symbol)
    skipped = f"; {found.skipped} not tried, time ran out" if found.skipped else ""
    return Choice(
        problem.symbol,
        timed[0].tile,
        "measured",
        timed[0].us,
        found.default_us,
        len(timed) + len(rejected),
        rejected,
        f"{depth} search{skipped}",
        entry,
    )
