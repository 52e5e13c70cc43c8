"""One step of the default task, phase by phase, between cudaProfilerStart and cudaProfilerStop: for ncu and nsys.

ncu --profile-from-start off --clock-control none python scripts/one_step.py [fused] [--precision auto]
"""

import argparse

import torch
from bench_steps import make_backend

from mpcompare.contract import resolve_precision
from mpcompare.entrant import entrant as train
from mpcompare.measure import machine
from mpcompare.native.graph import WARMUP
from mpcompare.tasks import data, mlp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="fused")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    args = parser.parse_args()
    device = machine.select_device(args.device)
    precision = resolve_precision(args.precision, ("fp16", "bf16", "fp32", "tf32"), device, args.backend)
    task = mlp.Task(784, [args.hidden], 10, "cross_entropy", args.batch, args.batch * (WARMUP + 2), lr=0.01)
    params = {name: p.to(device) for name, p in mlp.init_params(task.sizes, 0).items()}
    backend = make_backend(args.backend, precision, task, params, graph=False)
    stream = data.batches(data.digits(task, 0).to(device), task.batch_size)
    for _ in range(WARMUP + 1):  # the last captures a graph
        train.step(backend, *next(stream))
    batch = next(stream)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    loss = train.step(backend, *batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(f"{args.backend} {precision} on {device}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
