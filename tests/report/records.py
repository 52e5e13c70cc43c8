"""Parts of records that several tests of the report write."""

MEASURED = {
    "device": "cpu", "memory_model": {"inputs": {"x": 200_000}, "activations": {"z0": 900_000, "z1": 800_000}},
    "workspace_bytes": 14_000_000, "batch_bytes": 200_000, "rss_before_bytes": 9_000_000, "peak_rss_bytes": 25_000_000,
    "memory_by_op": {"aten::mm": 1_200_000, "aten::add": 300_000},
}  # fmt: skip


WHOLE = {"phase_ms": {"whole step": 7.5}, "phase_overhead": 0.0}
