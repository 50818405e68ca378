"""Chooses the tile of every kernel of a compile, and says what each choice rests on.

In this order: this kernel measured with these tools (cache), or now (measured), or with other versions (data), a kernel of
the same structure at other sizes (transfer), the cost model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import UnsupportedError
from topo_opt.topology import Device
from topo_opt.tuning import search_space
from topo_opt.tuning.cache import Store, open_store
from topo_opt.tuning.forms import Packed, Tunable, tunable
from topo_opt.tuning.gpu import find_gpu
from topo_opt.tuning.key import Key
from topo_opt.tuning.measure import Case, Measurer
from topo_opt.tuning.records import DEPTHS, Choice, Entry, Tile
from topo_opt.tuning.search import Problem
from topo_opt.tuning.settings import Settings, device_id
from topo_opt.tuning.settle import settle
from topo_opt.tuning.subjects import Subject

_TOLERATED = 1.05
"""How much slower than the best tile of the cost model one from other sizes may be by the model, which is off by twice as much."""
_NEAR = 1.5
"""Ratio of any size up to which a tile carries over where nothing estimates it: those of attention with twice the batch or twice the depth were
a fifth to a third slower than the default (benchmarks/results/kernels-h200.md)."""

FindMeasurer = Callable[[Device], "tuple[Measurer | None, str]"]
"""Something that measures on a device, or None and why there is nothing."""


@dataclass
class Tuned:
    """Choices by symbol; `notes` say what was not possible, and what of the cache could not be used."""

    mode: str
    choices: dict[str, Choice] = field(default_factory=dict)
    sources: dict[str, KernelSource] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """What is worth keeping for another compile: measured times of these very kernels."""
        return [c.entry for c in self.choices.values() if c.entry is not None and c.basis != "transfer"]


@dataclass
class _Open:
    """A kernel on its way to a choice."""

    subject: Subject
    form: Tunable
    guess: Choice
    """What would be chosen without measuring."""

    @cached_property
    def tiles(self) -> list[Tile]:
        """The tile that it has, which is the cost model's, then other candidates."""
        return self.form.candidates()


def tune(
    subjects: list[Subject],
    device: Device,
    settings: Settings,
    *,
    find: FindMeasurer = find_gpu,
    store: Store | None = None,
) -> Tuned:
    """Chooses tiles.

    Args:
        subjects: kernels that have a tile, for which there is code.
        find: where to measure; called only when something has to be.
        store: by default what `settings` name.

    Raises:
        InputError: a file of entries named by the user cannot be read.
    """
    tuned = Tuned(settings.mode)
    if settings.mode == "off":
        return tuned
    store = store or open_store(device_id(device.model), settings.folder, settings.data)
    target = Target.of(device)
    unknown: list[_Open] = []
    for subject in subjects:
        opened = _look_up(subject, target, store)
        tuned.choices[subject.symbol] = opened.guess
        if settings.searches and not _is_settled(opened.guess, settings.mode):
            unknown.append(opened)
    if unknown:
        _search(unknown, device, settings, find, store, tuned)
    _generate(subjects, target, tuned)
    tuned.notes += store.remarks
    return tuned


def _is_settled(choice: Choice, depth: str) -> bool:
    """Whether a search as deep as this was made with these tools."""
    known = choice.basis == "cache" and choice.entry is not None
    return known and DEPTHS.index(choice.entry.depth) >= DEPTHS.index(depth)  # type: ignore[union-attr]


def _look_up(subject: Subject, target: Target, store: Store) -> _Open:
    form = tunable(subject.func, target)
    own, key, symbol = form.own, form.key, subject.symbol
    opened = _Open(subject, form, Choice(symbol, own, "model", note="nothing was measured"))
    if (entry := store.exact(key)) is not None:
        opened.guess = _known(symbol, entry, "cache", "measured earlier with the same versions")
    elif (entry := store.same_kernel(key)) is not None:
        opened.guess = _known(symbol, entry, "data", f"measured with {_tools(entry)}")
    elif (
        (entry := store.nearest(key)) is not None
        and (tile := search_space.fit(entry.best.tile, opened.tiles))
        and _carries_over(form, tile, key.spread(entry.key))
    ):
        note = f"from sizes {_sizes(entry.key)}, measured with {_tools(entry)}"
        opened.guess = Choice(symbol, tile, "transfer", entry.best.us, note=note, entry=entry)
    guess = opened.guess
    if guess.basis != "model" and not _has_code(form, guess.tile):
        note = f"no code for the tile {dict(guess.tile)} of {guess.basis}"
        opened.guess = Choice(symbol, own, "model", note=note)
    return opened


def _carries_over(form: Tunable, tile: Tile, spread: float) -> bool:
    """Whether what is best at other sizes is likely to be here: the cost model finds nothing against it, or the sizes are near."""
    slowdown = form.slowdown(tile)
    return spread <= _NEAR if slowdown is None else slowdown <= _TOLERATED


def _known(symbol: str, entry: Entry, basis: str, note: str) -> Choice:
    return Choice(
        symbol,
        entry.best.tile,
        basis,
        entry.best.us,
        None,
        len(entry.timed) + len(entry.rejected),
        entry.rejected,
        note,
        entry,
    )


def _tools(entry: Entry) -> str:
    return " ".join(
        f"{name} {entry.versions[name]}" for name in ("torch", "triton") if name in entry.versions
    )


def _sizes(key: Key) -> str:
    return "x".join(map(str, key.sizes))


def _has_code(form: Tunable, tile: Tile) -> bool:
    if tile.keys() != form.own.keys() and not any(tile.keys() == t.keys() for t in form.candidates()):
        return False
    try:
        form.lower(tile)
    except UnsupportedError:
        return False
    return True


def _search(
    unknown: list[_Open],
    device: Device,
    settings: Settings,
    find: FindMeasurer,
    store: Store,
    tuned: Tuned,
) -> None:
    measurer, reason = find(device)
    if measurer is None:
        tuned.notes.append(f"nothing was measured: {reason}")
        return
    problems = [_problem(opened, device) for opened in unknown]
    guesses = {opened.subject.symbol: opened.guess for opened in unknown}
    try:
        tuned.choices |= settle(
            problems, guesses, measurer, store, depth=settings.mode, limit_s=settings.limit_s
        )
    finally:
        measurer.close()


def _problem(opened: _Open, device: Device) -> Problem:
    form, subject = opened.form, opened.subject
    own = form.own
    # What other sizes or other versions suggest is tried right after the default.
    tiles = [own, opened.guess.tile, *opened.tiles[1:]]
    once = [t for i, t in enumerate(tiles) if dict(t) not in [dict(u) for u in tiles[:i]]]
    case = Case(subject.symbol, form.signature(device.l2_bytes.value, subject.cold), form.alone(own))
    return Problem(subject.symbol, form.key, case, once, form.alone, subject.weight)


def problem_of(subject: Subject, device: Device) -> Problem:
    """The problem of a kernel of which nothing is known."""
    form = tunable(subject.func, Target.of(device))
    return _problem(_Open(subject, form, Choice(subject.symbol, form.own, "model")), device)


def _generate(subjects: list[Subject], target: Target, tuned: Tuned) -> None:
    """Writes the choices into the kernels, and makes the code of those that get another tile.

    Packs come first: they get their own copies of members that others call, whose tiles may change too.
    """
    forms = {s.symbol: tunable(s.func, target) for s in subjects}
    changed = [s for s, f in forms.items() if dict(f.own) != dict(tuned.choices[s].tile)]
    if not changed:
        return
    packs = [s for s, f in forms.items() if isinstance(f, Packed)]
    for symbol in dict.fromkeys([*packs, *changed]):
        form, tile = forms[symbol], tuned.choices[symbol].tile
        form.apply(tile)
        tuned.sources[symbol] = form.lower(tile)
