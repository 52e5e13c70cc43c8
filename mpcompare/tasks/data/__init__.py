"""The data sets. Each is a function of the seed, whose other arguments stand in ``conf/data``.

Every data set carries why it was taken and a fingerprint of what is trained on; where one stands in for another, the
log says so loudly.
"""

from mpcompare.tasks.data.dataset import Dataset, batches

__all__ = ["Dataset", "batches"]
