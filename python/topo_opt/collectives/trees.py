"""Trees over ranks 0 to n-1, as lists of parents (-1 for the root)."""

from __future__ import annotations


def binomial(n: int) -> list[tuple[tuple[int, int], ...]]:
    """Rounds of a broadcast from rank 0: (from, to) pairs. In round k every rank below 2^k that has the data sends it on."""
    rounds = []
    span = 1
    while span < n:
        rounds.append(tuple((i, i + span) for i in range(min(span, n - span))))
        span *= 2
    return rounds


def balanced(n: int) -> list[int]:
    """Parents of a binary tree in which odd positions (counted from one) are leaves, the search order of the ranks.

    Rank 0 is the root above it, as in Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast" (2009).
    """
    parents = [-1] * n

    def build(low: int, high: int, parent: int) -> None:
        if low > high:
            return
        size = high - low + 1
        # The root of 1..size in a tree whose leaves are odd: the largest power of two that leaves a right side to fill.
        root = 1 << (size.bit_length() - 1)
        middle = low + root - 1
        parents[middle] = parent
        build(low, middle - 1, middle)
        build(middle + 1, high, middle)

    build(1, n - 1, 0)
    return parents


def double(n: int) -> tuple[list[int], list[int]]:
    """Two trees in which every rank but one is a leaf of one of them: the second is the first with ranks moved by one (odd n)
    or mirrored (even n).
    """
    first = balanced(n)
    place = [(n - 1 - rank) if n % 2 == 0 else (rank + 1) % n for rank in range(n)]
    second = [-1] * n
    for rank, parent in enumerate(first):
        second[place[rank]] = place[parent] if parent >= 0 else -1
    return first, second


def depths(parents: list[int]) -> list[int]:
    """Distance of each rank from the root."""
    out = [-1] * len(parents)

    def depth(rank: int) -> int:
        if out[rank] < 0:
            out[rank] = 0 if parents[rank] < 0 else depth(parents[rank]) + 1
        return out[rank]

    for rank in range(len(parents)):
        depth(rank)
    return out
