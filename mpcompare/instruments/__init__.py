"""Instruments: clock, memory meter, numerics. They know no backend and no task by name."""
