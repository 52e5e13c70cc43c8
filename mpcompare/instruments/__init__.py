"""Instruments: clock, memory meter, heap, machine, bystanders. They know no backend, no task and no verdict."""
