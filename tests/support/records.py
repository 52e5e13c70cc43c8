"""Records of runs that were never taken, as an entrant writes them."""

from mpcompare.records import Recorder


def write_run(folder, backend, precision="bf16", losses=(2.0, 1.5, 1.0), step_ms=10.0, status="ok", **more):
    folder.mkdir(parents=True)
    identity = {
        "backend": backend, "precision": precision, "task": "t", "batch_size": 8, "seed": 0, "sweep": None,
        "config": {
            "task": {
                "_target_": "Task", "model": {"_target_": "Net", "hidden": more.get("hidden", [32])},
                "optimizer": {"_target_": "Sgd", "lr": more.get("lr", 0.1)}, "batch_size": more.get("batch_size", 8),
            },
            "data": {"_target_": more.get("data", "auto")},
            "backend": more.pop("options", {}),
            "train": {"steps": len(losses), "warmup_steps": 0},
            "report": {"baseline": "amp", "allow": more.get("allow", [])},
        },
    }  # fmt: skip
    recorder = Recorder(folder, {**identity, **{k: v for k, v in more.items() if k in identity}})
    rows = [
        {
            "step": i, "warmup": i == 1, "loss": loss, "loss_scale": 1.0, "skipped": i == 2, "clipped": False,
            "step_ms": step_ms,
        }
        for i, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    if rows:
        recorder.steps(rows)
    for step, loss, accuracy in more.pop("evals", []):
        recorder.evaluation({"step": step, "test_loss": loss, "test_accuracy": accuracy})
    if status == "ok":
        blocks = more.get("blocks", [step_ms] * 10)
        for round_, ms in enumerate(blocks, start=1):
            recorder.block(
                {
                    "round": round_,
                    "steps": 1,
                    "step_ms": ms,
                    "wall_ms": ms,
                    "settled": True,
                    "other_cores": more.get("other_cores", 0.0),
                    "cores_between_turns": more.get("out_of_turn", 0.0),
                }
            )
        recorder.add(
            timing={"rounds": len(blocks), "stopped": "rel_ci", "half_width": 0.0, "seconds": 1.0,
                    "race": more.get("race", "r")},
            phase_ms={"forward": 4.0, "backward": 5.0, "unscale": None, "step": 1.0, "update": 0.0},
            phase_overhead=0.01, first_step_ms=50.0, construct_s=0.5,
            engine="torch", loss_scale="NoLossScale", dataset="synthetic", dataset_reason="asked for",
            dataset_fingerprint=more.get("dataset_fingerprint", "d"), initial_weights=more.get("initial_weights", "w"),
            device_name=more.get("device_name", "cpu"), threads=more.get("threads", 2),
            versions={"torch": more.get("torch", "2.15.0")}, **{k: more[k] for k in ("host",) if k in more},
            step_ms_p20=step_ms - 1, step_ms_p50=step_ms, step_ms_p80=step_ms + 1, peak_memory_bytes=2_000_000,
            peak_memory_bytes_analytic=1_900_000, final_loss=losses[-1], test_accuracy=0.5, skipped_steps=1,
        )  # fmt: skip
        recorder.add(**{key: value for key, value in more.items() if key not in identity}, status="ok")
    elif status == "failed":
        recorder.add(status=status, error="precision=fp16: no")
