"""What ranks that are processes tell each other, through any all-gather of objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from jitmoe.run.ranks import (
    RankError,
    RankMismatch,
    check_num_ranks,
    difference,
    differences,
    name_ranks,
)

# What ranks of any group must have alike, and what to do where they have not.
_REMEDIES = {
    "jitmoe": "install the same version for all",
    "num_ranks": "pass the same to all",
}


class Meeting:
    """One rank's place among those of a group; methods are collective.

    rank        of this process, from 0 on
    all_gather  all_gather(obj) -> the objects of all ranks, by rank
    group       what the group is called in texts
    """

    def __init__(
        self, rank: int, num_ranks: int, all_gather: Callable[[object], Sequence], group: str
    ):
        if not callable(all_gather):
            raise TypeError(
                f"all_gather of a {group} must be a function of an object, got {all_gather!r}; "
                f"pass one, or take {group}.from_torch() or .from_mpi()"
            )
        self.rank, self.num_ranks = rank, num_ranks
        self._all_gather, self._group = all_gather, group

    def gather(self, what: str, value) -> list:
        """Everybody's value, by rank. Raises RankMismatch where ranks are at different places."""
        answers = list(self._all_gather((what, value)))
        if len(answers) != self.num_ranks:
            raise RankMismatch(
                f"all_gather gave {len(answers)} objects to rank {self.rank} of {self.num_ranks}; "
                "it must give one of each rank, and num_ranks be the same on all"
            )
        if any(not isinstance(answer, tuple) or len(answer) != 2 for answer in answers):
            raise RankMismatch(
                f"all_gather gave rank {self.rank} objects that no {self._group} sent; have all "
                "ranks make the same calls in the same order"
            )
        places = difference([what for what, _ in answers])
        if places:
            raise RankMismatch(
                f"the call is {places}; have all ranks make the same calls in the same order"
            )
        return [value for _, value in answers]

    def together(self, what: str, function: Callable[[], object]) -> list:
        """Everybody's function(), by rank. Raises RankError on all ranks if one failed."""
        error = result = None
        try:
            result = function()
        except Exception as caught:  # of whatever kind: the others wait
            error = caught
        failure = None if error is None else f"{type(error).__name__}: {error}"
        answers = self.gather(what, (result, failure))
        failed: dict[str, list[int]] = {}
        for rank, (_, text) in enumerate(answers):
            if text:
                failed.setdefault(text, []).append(rank)
        if failed:
            texts = [f"{name_ranks(ranks)}: {text}" for text, ranks in failed.items()]
            raise RankError(f"could not {what}: {'; '.join(texts)}") from error
        return [result for result, _ in answers]

    def agree(self, what: str, facts: Mapping[str, object]) -> None:
        """Raise RankMismatch on all ranks unless every rank gives the same facts."""
        found = differences(self.gather(f"agree on {what}", facts))
        if found:
            raise RankMismatch(
                f"ranks differ in {what}: {'; '.join(found)}; pass the same on all ranks"
            )

    def introduce(
        self, describe: Callable[[], dict[str, object]], remedies: Mapping[str, str]
    ) -> list[dict]:
        """What every rank says of itself: describe(), of builtins alone as versions may differ,
        and its "rank". Facts that have remedies must be alike.

        Raises RankMismatch on all ranks where they can form no group.
        """
        facts = self.together("join the group", lambda: self._basics() | describe())
        ranks = [fact["rank"] for fact in facts]
        for rank in sorted(set(ranks)):
            places = [place for place, other in enumerate(ranks) if other == rank]
            if len(places) > 1:
                raise RankMismatch(
                    f"rank {rank} occurs {len(places)} times among {len(ranks)} ranks "
                    f"(at the places of {name_ranks(places)}); number them from 0 on"
                )
        if ranks != sorted(ranks):
            raise RankMismatch(
                "all_gather must give the objects of all ranks by rank, gave those of ranks "
                f"{ranks}"
            )
        for name, remedy in (_REMEDIES | dict(remedies)).items():
            found = difference([fact[name] for fact in facts])
            if found:
                raise RankMismatch(f"{name} is {found}; {remedy}")
        return facts

    def _basics(self) -> dict[str, object]:
        check_num_ranks(self.num_ranks)
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"rank must be an int from 0 to {self.num_ranks - 1}, got {self.rank!r}"
            )
        return {"rank": self.rank, "num_ranks": self.num_ranks, "jitmoe": _version()}


def _version() -> str:
    try:
        return metadata.version("jitmoe")
    except metadata.PackageNotFoundError:
        return "a checkout"
