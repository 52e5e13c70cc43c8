from mpcompare.cost import memory


def test_ledger_keeps_the_fullest_moment_by_kind():
    ledger = memory.Ledger()
    ledger.alloc("gradients", "dW", 3, 4)
    ledger.alloc("inputs", "x", 10, 2)
    ledger.alloc("gradients", "db", 1, 4)
    ledger.free("dW", "db")
    ledger.alloc("activations", "z", 2, 4)
    assert ledger.peak == {"inputs": {"x": 20}, "gradients": {"dW": 12, "db": 4}}
    assert list(ledger.peak) == ["inputs", "gradients"]  # in the order of TENSOR_KINDS
    assert memory.allocated_bytes(ledger.peak) == 36
