"""The memory of a training step before it is taken: ``python -m mpcompare.footprint gpt2``.

A recipe's steps are taken on tensors that have shapes and no data, and every storage is counted from the operator that
makes it to the moment at which nothing refers to it any more. So no model of a network is needed: forward, backward and
update are those of the backends themselves, and autograd, autocast and the optimizer keep what they keep.
"""
