"""A backend whose module changes torch for the whole process when it is imported, as some libraries' do."""

import torch.nn.functional as F

from mpcompare.backends.amp import Amp

linear = F.linear


def longer(*arguments):
    return 1.02 * linear(*arguments)


F.linear = longer


class PatchesTorch(Amp):
    """``amp`` whose linear layers are 2 % too large, as its oracle's would be."""
