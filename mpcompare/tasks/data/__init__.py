"""The data sets. Each is a function of the seed; its other arguments stand in ``conf/data``.

Every data set carries the reason why it was taken and a fingerprint of its samples. If one stands in for another,
the log says so loudly.
"""

from mpcompare.tasks.data.dataset import Dataset, batches, drawn_batches

__all__ = ["Dataset", "batches", "drawn_batches"]
