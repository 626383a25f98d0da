"""What a kernel costs: `time_ms = a * depth + b * ctas + c`, and the depth of a list schedule.

The hardware hands thread blocks out in launch order, each to the first multiprocessor that is free: a list schedule.
Its depth, in chunks walked one after the other on the busiest multiprocessor, is what a walk over chunks takes time
for. The three coefficients of each kernel come from `coefs/<arch>.csv`; nothing else here knows a GPU.
"""

from __future__ import annotations

from heapq import heappush, heapreplace
from typing import NamedTuple

from .coefs import Table


class Launch(NamedTuple):
    """One launch.

    Attributes:
        kernel: its row in the CSV.
        runs: (chunks of one CTA, how many such CTAs) in launch order.
        ctas: all of them, also those that find nothing to do.
    """

    kernel: str
    runs: tuple[tuple[int, int], ...]
    ctas: int


def schedule_depth(runs, num_sms: int) -> int:
    """Returns the most chunks that one multiprocessor gets, one CTA at a time on each.

    Args:
        runs: (chunks of one CTA, how many such CTAs) in launch order.
        num_sms: multiprocessors.

    Multiprocessors with the same load are one entry `(load, how many)` of a heap, and where loads differ by no more
    than one CTA's chunks a whole round adds the same to all, so the cost does not grow with the number of CTAs.
    """
    ctas = most = 0
    for chunks, count in runs:
        ctas += count
        if chunks > most and count:
            most = chunks
    if ctas <= num_sms:
        return most
    if len(runs) == 1:
        return most * -(-ctas // num_sms)
    loads, most = [(0, num_sms)], 0
    for chunks, count in runs:
        if not chunks or not count:
            continue
        if count >= num_sms and most - loads[0][0] <= chunks:
            rounds, count = divmod(count, num_sms)
            loads = [(load + rounds * chunks, machines) for load, machines in loads]  # a heap still: equal shifts
            most += rounds * chunks
        while count > 0:
            load, machines = loads[0]
            if count < machines:
                loads[0] = load, machines - count  # the least still
                heappush(loads, (load + chunks, count))
            else:
                heapreplace(loads, (load + chunks, machines))
            count -= machines
            if load + chunks > most:
                most = load + chunks
    return most


def launch_ms(launch: Launch, table: Table, num_sms: int) -> float:
    """Returns a launch's predicted time. Raises KeyError for a kernel that the table lacks."""
    a_ms, b_ms, c_ms = table.kernels[launch.kernel]
    return a_ms * schedule_depth(launch.runs, num_sms) + b_ms * launch.ctas + c_ms
