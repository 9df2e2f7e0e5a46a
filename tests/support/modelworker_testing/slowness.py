"""How much slower a machine is because others compute on it, for tests that bound a time."""

import time


def slowness() -> float:
    """How much longer than its CPU time a computation takes now: at least 1."""
    begun, cpu_begun = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_begun < 0.02:
        pass
    return max(1.0, (time.perf_counter() - begun) / (time.thread_time() - cpu_begun))
