"""What ranks conclude from each other's signs, without processes and clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from topo_opt.runtime.collective_call import StagedCall
from topo_opt.runtime.plan import CollectiveStep
from topo_opt.runtime.rank_signs import Seen, Sign, absent, ended, silent

HERE = Sign(beat=5, stage=3, doing="in call 3 of main", busy=True)


def seen(*signs: tuple[float, Sign]) -> Seen:
    """A rank that had these signs at these times."""
    about = Seen.nothing(0.0)
    for now, sign in signs:
        about.update(sign, now)
    return about


def alive(sign: Sign, since: float, until: float) -> Seen:
    """A rank that stays as it is, but for its beat."""
    return seen(*((since + t, replace(sign, beat=sign.beat + t)) for t in range(-1, int(until - since) + 1)))


def test_a_sign_is_what_it_was_after_the_store() -> None:
    sign = replace(HERE.reporting(1, "a").reporting(2, "b").reporting(3, "c"), failed="x", hint="y")
    assert Sign.of_bytes(sign.to_bytes()) == sign
    assert sign.reports == {"2": "b", "3": "c"}, "nobody can still ask for the first"


def test_one_sign_may_be_of_an_earlier_program() -> None:
    stale = seen((1.0, replace(HERE, failed="reading", left=True)), (9.0, replace(HERE, failed="reading")))
    assert stale.sign is None and stale.note == "reading"
    assert ended({1: stale}, 0) is None
    stale.update(replace(HERE, beat=6), 10.0)
    assert stale.sign is not None and stale.beat_at == 10.0


def test_failures_come_before_those_that_left() -> None:
    left, failed = alive(replace(HERE, left=True), 0, 3), alive(replace(HERE, failed="in call 3"), 0, 3)
    assert ended({1: left, 2: failed}, 4).message == "rank 2 failed in call 3"
    assert "rank 1 has left" in ended({1: left}, 4).message
    assert ended({1: left}, 3) is None, "it had a part in what this rank is at"


@pytest.mark.parametrize(
    ("sign", "stage", "expected"),
    [
        (replace(HERE, stage=2, busy=False, doing="done in call 2"), 3, "rank 1 has not come within 25 s; it was last done in call 2"),
        (replace(HERE, stage=2), 3, "rank 1 has got nowhere for 25 s; it is in call 3 of main"),
        (HERE, 3, "rank 1 has got nowhere"),
        (replace(HERE, waiting=True), 3, "all ranks wait for each other for 25 s: rank 1 in call 3 of main"),
        (replace(HERE, busy=False), 3, None),
    ],
)  # fmt: skip
def test_who_is_blamed_after_the_limit(sign: Sign, stage: int, expected: str | None) -> None:
    about = {1: alive(sign, 0, 40)}
    assert absent(about, 39.0, 20.0, stage, 25.0) is None, "this rank has not waited for so long"
    found = absent(about, 40.0, 10.0, stage, 25.0)
    assert found is None if expected is None else found.message.startswith(expected)


def test_who_gets_on_is_waited_for() -> None:
    signs = [(float(t), replace(HERE, beat=t, moved=t // 20)) for t in range(60)]
    assert absent({1: seen(*signs)}, 59.0, 0.0, 3, 25.0) is None


def test_silence_is_not_idleness() -> None:
    about = {1: alive(HERE, 0, 10)}
    assert absent(about, 40.0, 0.0, 3, 25.0) is None and silent(about, 30.0, 25.0) is None
    assert "no sign of life for 30 s" in silent(about, 40.0, 25.0).message
    about[1].shift(10.0)
    assert "no sign of life for 26 s" in silent(about, 46.0, 25.0).message


def test_a_staged_collective_copies_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a GPU; the group has one rank, so that nothing has to be connected."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source, target = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
        step = CollectiveStep("all_reduce", ("x",), 0, 1)
        call = StagedCall(lambda work: work.wait(), dist.group.WORLD, [0], step, source, target)
        call()
        assert torch.equal(target, source)
        source += 1
        call()
        assert torch.equal(target, source) and call.given.data_ptr() != source.data_ptr()
    finally:
        dist.destroy_process_group()
