"""The memory of a training step before it is taken: ``python -m mpcompare.footprint gpt2``.

A recipe's steps are taken on tensors that have shapes and no data. Every storage is counted from the operator that
makes it until nothing refers to it any more. So no model of a network is needed: the backends themselves take forward,
backward and update, and autograd, autocast and the optimizer keep what they keep.
"""
