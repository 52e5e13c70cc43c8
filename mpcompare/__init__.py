"""mpcompare: the referee for mixed precision training. Start reading at :mod:`mpcompare.contract`."""
