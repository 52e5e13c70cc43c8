"""Runs mpcompare with the arguments given, and prints the page faults a step of each block that it timed, as JSON."""

import json
import resource
from typing import Any

from mpcompare.__main__ import main
from mpcompare.entrant import blocks, phases, timing

faults: list[float] = []
time_block = timing.time_block


def counted(stepper: Any, stream: Any, steps: int, *others: Any) -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    result = time_block(stepper, stream, steps, *others)
    if steps:
        faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps)
    return result


if __name__ == "__main__":
    timing.time_block = blocks.time_block = phases.time_block = counted
    main()
    print(json.dumps(faults))
