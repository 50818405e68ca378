"""Watches over the ranks of a program: a rank that fails, dies, stops or never comes ends the waiting of the others.

One thread exchanges signs (`rank_signs`) through the store of torch.distributed, over a connection of its own. Another one judges
them, and never touches the store, which may have gone together with the rank that holds it. What waits in Python is woken with the reason. What waits
in a library that nothing can wake (a GPU whose collective has lost its partner) ends with the process, after one line that says why.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from topo_opt.runtime.process_work import ProcessWork
from topo_opt.runtime.rank_signs import Fault, Seen, Sign, absent, ended, silent
from topo_opt.runtime.rank_store import note, own_connection

BEAT_S = 0.5
"""Between two signs of up to `MANY` ranks; more ranks write less often, since each reads all of them."""
MANY = 64
CLOSE_S = 0.05
"""At least, between two signs."""
SOON_S = 0.01
"""Between two looks at the others while this rank waits for their reports."""
LOOK_S = 0.25
SUSPENDED_S = 2.0
"""A longer pause between two looks was one of this process, not of the others."""
GRACE_S = 3.0
"""What is left to a call that nothing can wake, after it is clear that it waits in vain."""
ENDED_S = 1.5
"""A rank whose connection has broken and that is silent for so long has ended."""
TOLD_S = 2.0
"""How long a rank that ends stays so that the others can read why."""
LONGEST_S = 1800.0
"""How long ranks are waited for that work all the time, at most."""


class RankWatch:
    """This rank's view of the others.

    Args:
        store: of the process group; `clone` makes the connection of the watch.
        limit_s: after which a rank that is silent, missing or stuck is given up.
    """

    joined: ClassVar[int] = 0
    """Number of the last attempt to load a program that this process had a part in. Rank 0 numbers them."""

    def __init__(self, store: Any, rank: int, count: int, limit_s: float):
        self.rank, self.count, self.limit_s = rank, count, limit_s
        self._last_call: weakref.ref[Any] | None = None
        self._store = own_connection(store)
        self._attempt, self._met = 0, False
        now = time.monotonic()
        self._seen = {r: Seen.nothing(now) for r in range(count) if r != rank}
        self._mine = Sign()
        self._changed = threading.Condition()
        self._wake, self._hurry, self._closing = threading.Event(), False, False
        self._heard_at = self._looked_at = now
        self._inside_since: float | None = None
        self._pending_since: float | None = None
        self._doomed_since: float | None = None
        self._lost_store, self._lost_at = "", 0.0
        self._published, self._hearings = -1, 0
        self._work = ProcessWork(0.8 * BEAT_S)
        self._wakers: list[Callable[[Fault], None]] = []
        self._beat_s = BEAT_S * max(1.0, count / MANY)
        self._threads = [
            threading.Thread(target=run, args=(self,), name=f"topo-opt {what}", daemon=True)
            for run, what in ((_talk, "signs of ranks"), (_guard, "watch over ranks"))
        ]
        for thread in self._threads:
            thread.start()
        _open.add(self)

    # What the program tells of itself.

    def progress(self, doing: str) -> None:
        """This rank got on with its work; `doing` says with what, as in "loading the bundle"."""
        with self._changed:
            self._mine = replace(self._mine, moved=self._mine.moved + 1, doing=doing)
        self._wake.set()

    def look_at(self, done: Any) -> None:
        """An event of a GPU that stands behind the last call: what runs there is waited for, too."""
        self._last_call = weakref.ref(done)

    def wake_by(self, wake: Callable[[Fault], None]) -> None:
        """`wake` ends a wait of this rank that Python alone cannot end; called, from another thread, once it waits in vain."""
        self._wakers.append(wake)

    def _pending(self) -> bool:
        event = None if self._last_call is None else self._last_call()
        return event is not None and not event.query()

    def tell(self, doing: str) -> None:
        """What this rank is doing, for the others to know when it gets no further."""
        with self._changed:
            self._mine = replace(self._mine, doing=doing)
        self._wake.set()

    @contextmanager
    def stage(self, doing: str) -> Iterator[None]:
        """A load or a call, to which all ranks come."""
        with self._changed:
            before = self._mine
            self._mine = replace(before, stage=before.stage + 1, doing=doing, busy=True)
        self._wake.set()
        try:
            yield
        finally:
            with self._changed:
                after = before.doing if before.busy else f"done {doing}"
                self._mine = replace(self._mine, busy=before.busy, doing=after)
            self._wake.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others, and the process ends if nothing can wake it."""
        with self._changed:
            outer, self._inside_since = self._inside_since, self._inside_since or time.monotonic()
            self._mine = replace(self._mine, waiting=True)
        try:
            yield
        finally:
            with self._changed:
                self._inside_since = outer
                if outer is None:
                    self._mine = replace(self._mine, waiting=False)
                    self._doomed_since = None

    def fail(self, reason: str, hint: str | None = None, *, first: bool = True) -> None:
        """Tells the others why this rank cannot go on.

        Args:
            first: comes back when they have read it, or after two seconds. What follows from the failure of another rank is told, but
                nobody has to hear it.
        """
        with self._changed:
            self._mine = replace(self._mine, failed=reason, hint=hint)
        if first:
            self._tell()
        else:
            self._wake.set()

    def close(self) -> None:
        """Tells the others that this rank needs them no more, and ends the threads."""
        if self._closing:
            return
        if not self._mine.failed:
            with self._changed:
                self._mine = replace(self._mine, left=True)
            self._tell()
        self.dismiss()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def dismiss(self) -> None:
        """As `close`, without waiting: the last sign is on its way."""
        with self._changed:
            self._mine = replace(self._mine, left=True)
        self._closing = True
        self._wake.set()

    def _tell(self) -> None:
        """Waits until this rank's sign is published, and read: whoever holds the store may be about to end."""
        until = time.monotonic() + TOLD_S
        self._hurry = True
        self._wake.set()
        with self._changed:
            sign = self._mine.beat + 1
            heard: dict[int, int] = {}
            while time.monotonic() < until and not self._lost_store:
                if self._published >= sign:
                    here = {
                        r: a.sign for r, a in self._seen.items() if a.sign is not None and not a.sign.left
                    }
                    heard = {r: heard.get(r, s.beat) for r, s in here.items()}
                    # The first sign after this one may have been under way already.
                    if all(s.beat >= heard[r] + 2 for r, s in here.items()):
                        break
                self._changed.wait(0.05)
        self._hurry = False

    # What the program asks about the others.

    def fault(self) -> Fault | None:
        """Why waiting is, or would be, in vain; None as long as it is not."""
        now = time.monotonic()
        with self._changed:
            found = ended(self._seen, self._mine.stage)
            if found is None and now - self._looked_at > SUSPENDED_S:
                return None  # this process has stood still, and has heard nothing since
            if found is None and self._lost_store and now - self._lost_at > ENDED_S:
                found = Fault(f"{self._holder()} has ended: {self._lost_store}", "start all ranks again")
            if found is None and now - self._heard_at > self.limit_s:
                found = Fault(
                    f"{self._holder()} has not answered for {now - self._heard_at:.0f} s: it was stopped, or its machine is gone",
                    "end it and start all ranks again",
                )
            if found is None:
                found = silent(self._seen, now, self.limit_s)
            since = self._inside_since or self._pending_since
            if found is None and since is not None:
                found = absent(self._seen, now, since, self._mine.stage, self.limit_s)
            return found

    def ended_rank(self, seconds: float = 3.0) -> Fault | None:
        """Which rank has failed, left or died, after a connection to it broke: looked for so long."""
        until = time.monotonic() + seconds
        while (found := self.fault()) is None and time.monotonic() < until:
            with self._changed:
                if time.monotonic() - self._heard_at < ENDED_S:
                    found = silent(self._seen, time.monotonic(), max(ENDED_S, 3 * self._beat_s))
            if found is not None:
                break
            time.sleep(0.1)
        return found

    def exchange(self, number: int, report: str, doing: str) -> dict[int, str] | Fault:
        """What every rank reports in this agreement, by rank; or why one of them will not come.

        Args:
            doing: what the others are told that this rank is doing while it waits.
        """
        until = time.monotonic() + LONGEST_S
        with self._changed:
            self._mine = self._mine.reporting(number, report)
        self._hurry = True
        before = self._hearings
        try:
            with self.stage(doing), self.waiting():
                while True:
                    with self._changed:
                        failed = ended(self._seen, 0)
                    if failed is not None:
                        return failed
                    found = self._reports(number)
                    # A rank may have failed since it was last heard.
                    if len(found) == len(self._seen) and self._hearings > before:
                        self._met = True
                        return found | {self.rank: report}
                    fault = self.fault()
                    if fault is not None:
                        return fault
                    if time.monotonic() > until:
                        late = sorted(self._seen.keys() - found.keys())
                        return Fault(f"rank {late[0]} has worked for {LONGEST_S:g} s without an end")
                    with self._changed:
                        self._changed.wait(0.25)
        finally:
            self._hurry = False

    def _reports(self, number: int) -> dict[int, str]:
        with self._changed:
            known = {r: about.sign.reports for r, about in self._seen.items() if about.sign is not None}
        return {r: reports[str(number)] for r, reports in known.items() if str(number) in reports}

    def _holder(self) -> str:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "torchrun, which holds the store of the ranks,"
        return "rank 0, which holds the store of the ranks,"

    # The threads.

    def talk(self) -> bool:
        """Publishes and reads once; whether to go on."""
        self._wake.wait(SOON_S if self._hurry else self._beat_s)
        self._wake.clear()
        # Calls that follow each other closely do not each make a sign.
        time.sleep(SOON_S if self._hurry else CLOSE_S)
        last = self._closing
        with self._changed:
            if self._work.got_on():
                self._mine = replace(self._mine, moved=self._mine.moved + 1)
            mine = self._mine = replace(self._mine, beat=self._mine.beat + 1)
        try:
            if not self._met and not self._join():
                with self._changed:
                    self._heard_at, self._published = time.monotonic(), mine.beat
                return not last
            self._store.set(self._key(self.rank), mine.to_bytes())
            came = {rank for rank, about in self._seen.items() if about.sign is not None}
            known = [r for r in self._seen if r in came or self._store.check([self._key(r)])]
            signs = self._store.multi_get([self._key(r) for r in known]) if known else []
            notes = {r: note(self._store, r) for r in self._seen if r not in came}
        except Exception as error:
            # Every kind of error that a store has: whoever held it has gone.
            with self._changed:
                self._lost_store = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                self._lost_at = time.monotonic()
                self._changed.notify_all()
            return False
        now = time.monotonic()
        with self._changed:
            for rank, data in zip(known, signs, strict=True):
                self._seen[rank].update(Sign.of_bytes(data), now)
            for rank, text in notes.items():
                self._seen[rank].note = text or self._seen[rank].note
            self._heard_at, self._published = now, mine.beat
            self._hearings += 1
            self._changed.notify_all()
        return not last

    def _join(self) -> bool:
        """Takes part in the attempt that rank 0 has announced last; whether there is a new one.

        Ranks may have tried to load different numbers of programs: one that does not come, or cannot even open what it should
        load, has no part in an attempt of the others.
        """
        key = "topo-opt/attempt"
        if self.rank == 0:
            if self._attempt == 0:
                RankWatch.joined = self._attempt = RankWatch.joined + 1
                self._store.set(key, str(self._attempt))
            return True
        latest = int(self._store.get(key)) if self._store.check([key]) else 0
        if latest > RankWatch.joined:
            RankWatch.joined = self._attempt = latest
            now = time.monotonic()
            with self._changed:
                self._seen = {
                    r: replace(a, sign=None, stale=None, beat_at=now) for r, a in self._seen.items()
                }
        return self._attempt != 0

    def _key(self, rank: int) -> str:
        return f"topo-opt/{self._attempt}/{rank}"

    def look(self, pause_s: float) -> bool:
        """Judges the others once, `pause_s` after the last time; whether to go on."""
        now = time.monotonic()
        with self._changed:
            self._looked_at = now
            if pause_s > SUSPENDED_S:
                self._heard_at += pause_s
                for about in self._seen.values():
                    about.shift(pause_s)
        if self._closing:
            return False
        if not self._pending():
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = now
        if self._inside_since is None and self._pending_since is None:
            self._doomed_since = None
            return True
        fault = self.fault()
        if fault is None:
            return True
        with self._changed:
            self._changed.notify_all()
        if self._doomed_since is None:
            self._doomed_since = now
            for wake in self._wakers:
                wake(fault)
        elif now - self._doomed_since > GRACE_S:
            hint = f" ({fault.hint})" if fault.hint else ""
            told = f"error: rank {self.rank} ends, it waits in vain: {fault.message}{hint}"
            print(told, file=sys.stderr, flush=True)
            os._exit(1)
        return True


_open: weakref.WeakSet[RankWatch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A process that ends in order does not let the others believe that it has died."""
    for watch in list(_open):
        watch.close()


def _talk(watch: RankWatch) -> None:
    while watch.talk():
        pass


def _guard(watch: RankWatch) -> None:
    last = time.monotonic()
    while True:
        time.sleep(LOOK_S)
        now = time.monotonic()
        if not watch.look(now - last):
            return
        last = now
