"""What ranks tell each other apart by: who differs in what, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jitmoe.plan.hybrid import MAX_NODE_RANKS, MAX_NODES
from jitmoe.plan.problem import MAX_RANKS

_MAX_SHOWN = 80  # characters of a value


class RankMismatch(ValueError):
    """Ranks that do not fit together; the text names them, what they have and what the others."""


class RankError(RuntimeError):
    """Something failed on one rank or more, and so for all; the text names them and says why."""


def check_num_ranks(num_ranks: int) -> None:
    """Raise ValueError unless a group may have so many ranks."""
    if not isinstance(num_ranks, int) or not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks must be an int from 1 to {MAX_RANKS}, got {num_ranks!r}")


def check_nodes(num_ranks: int | None, nodes: int, ranks_per_node: int | None) -> None:
    """Raise ValueError unless a group may have so many nodes; one of the other two may be None."""
    if not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"nodes must be an int from 1 to {MAX_NODES}, got {nodes!r}")
    if num_ranks is None and ranks_per_node is None:
        raise ValueError("num_ranks is missing; pass it, or nodes and ranks_per_node")
    if num_ranks is not None:
        check_num_ranks(num_ranks)
    per_node = num_ranks / nodes if ranks_per_node is None else ranks_per_node
    if per_node not in range(1, MAX_NODE_RANKS + 1) and nodes > 1:
        raise ValueError(
            f"a node may have 1 to {MAX_NODE_RANKS} ranks, as many as every other, got {per_node!r}"
        )
    if num_ranks is not None and ranks_per_node not in (None, num_ranks / nodes):
        raise ValueError(
            f"{nodes} nodes of {ranks_per_node} ranks are not {num_ranks} ranks; leave one out"
        )


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 2", "ranks 0 and 2" or "ranks 0, 2 and 5"."""
    *head, last = sorted(ranks)
    return f"ranks {', '.join(map(str, head))} and {last}" if head else f"rank {last}"


def difference(values: Sequence) -> str | None:
    """Which ranks have which of `values`, which are by rank; None if all are equal.

    What more than half of them have is that of "the others".
    """
    kinds: list[tuple[object, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in kinds:
            if known == value:
                ranks.append(rank)
                break
        else:
            kinds.append((value, [rank]))
    if len(kinds) < 2:
        return None
    kinds.sort(key=lambda kind: 2 * len(kind[1]) > len(values))  # stable: the majority goes last
    said = [f"{_show(value)} on {name_ranks(ranks)}" for value, ranks in kinds]
    if 2 * len(kinds[-1][1]) > len(values):
        said[-1] = f"{_show(kinds[-1][0])} on the others"
    return ", ".join(said)


def differences(facts: Sequence[Mapping[str, object]]) -> list[str]:
    """One clause for each name whose values differ between ranks, or that some ranks lack."""
    names = dict.fromkeys(name for mapping in facts for name in mapping)
    found = []
    for name in names:
        text = difference([mapping.get(name, _MISSING) for mapping in facts])
        if text:
            found.append(f"{name} is {text}")
    return found


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
