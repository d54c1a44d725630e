"""Fair timing of calls that do the same work: in turns, so that they share every disturbance."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

Call = Callable[[], object]

SECONDS = 2.0  # for each comparison
ROUNDS = (9, 300)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over the rounds.

    The fastest round is what a busy machine disturbs least, the median what a user sees.
    """

    fastest: float
    median: float
    lower_quartile: float
    upper_quartile: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        """Summarize the seconds of every round."""
        lower, median, upper = quantiles(seconds, n=4)
        return cls(min(seconds), median, lower, upper, len(seconds))


def in_turns(calls: dict[str, Call], seconds: float = SECONDS) -> dict[str, Timing]:
    """Time the calls, each once a round, for about `seconds` in all; the first round is dropped."""
    measured: dict[str, list[float]] = {name: [] for name in calls}
    first_round = sum(_seconds(call) for call in calls.values())
    fewest, most = ROUNDS
    for _ in range(max(fewest, min(most, round(seconds / first_round)))):
        for name, call in calls.items():
            measured[name].append(_seconds(call))
    return {name: Timing.of(times) for name, times in measured.items()}


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
