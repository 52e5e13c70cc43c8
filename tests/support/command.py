"""Overrides of the command line that many tests give."""

# A run of this shape takes milliseconds and needs no internet.
SMALL = ("data=digits", "task.model.hidden=[32]", "task.batch_size=64", "task.samples=640", "train.steps=4",
         "train.warmup_steps=1", "measure.budget_s=0.2", "measure.block_s=0.01", "inference.budget_s=0.01")  # fmt: skip
