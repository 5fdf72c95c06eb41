"""Times operations on a device, by CUDA events, or by the host's clock on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

# Cycles of the device, some milliseconds.
HEAD_START = 10_000_000


@dataclass(frozen=True)
class Clock:
    """Medians of so many repeats, after a few that do not count."""

    device: str
    repeats: int
    warm_up: int = 3

    def seconds(
        self,
        run: Callable[[], object],
        prepare: Callable[[], object] = lambda: None,
        *,
        ahead: bool = False,
    ) -> float:
        """Returns the median time of ``run``, each after ``prepare``, off the clock.

        With ``ahead`` the host gets ahead of the device, as it does in training;
        otherwise the device is idle at the start, and the time of launches counts.
        """
        times = []
        for _ in range(self.warm_up + self.repeats):
            prepare()
            times.append(self._once(run, ahead))
        return median(times[self.warm_up :])

    def _once(self, run: Callable[[], object], ahead: bool) -> float:
        if self.device == "cpu":
            begin = perf_counter()
            run()
            return perf_counter() - begin
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def copy_bandwidth(clock: Clock, elements: int) -> float:
    """Returns the bytes a second, read and written, of copying float32 numbers."""
    source = torch.ones(elements, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.seconds(lambda: target.copy_(source), ahead=True)
