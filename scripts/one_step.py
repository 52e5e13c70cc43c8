"""Takes one step of the default task, phase by phase, between cudaProfilerStart and cudaProfilerStop, for ncu and nsys.

ncu --profile-from-start off --clock-control none python scripts/one_step.py [fused] [--precision auto]
"""

import argparse

import torch
from backend_of import make_backend, mnist_mlp

from mpcompare.contract import Stepper, warmup_steps
from mpcompare.instruments import machine
from mpcompare.precision import PRECISIONS, resolve_precision
from mpcompare.tasks.data import batches
from mpcompare.tasks.data.generated import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="fused")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    args = parser.parse_args()
    device = machine.select_device(args.device)
    precision = resolve_precision(args.precision, tuple(PRECISIONS), device.type, args.backend)
    task = mnist_mlp(args.batch, args.hidden)
    backend = make_backend(args.backend, precision, task.new_model(0, device), task, graph=False)
    stepper = Stepper(backend, task.new_rates())
    before = max(3, warmup_steps(backend) + 1)  # compiles, searches algorithms, captures a graph
    stream = batches(digits(0, args.batch * (before + 1)).to(device), args.batch)
    for _ in range(before):
        stepper.step([next(stream)])
    batch = next(stream)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    loss = stepper.step([batch])
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(f"{args.backend} {precision} on {device}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
