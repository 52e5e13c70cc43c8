"""The memory models of the backends: for each way to compute a step, the allocations and frees that it makes."""
