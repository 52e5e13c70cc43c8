"""torch.optim.SGD(fused=True, momentum=...) uses uninitialised memory if the first step with a GradScaler overflows.

``torch.optim.sgd._fused_sgd`` makes the momentum buffers of the first step by ``torch.empty_like`` and expects the
kernel to write them. The kernel returns early where ``found_inf`` is set and writes nothing. For the next step the
buffers exist, and so it multiplies whatever the memory held by the momentum. Deterministic mode fills new memory with
NaN, so that it shows every time. A later step that overflows is harmless.
"""

import torch

torch.use_deterministic_algorithms(True)
for fused in (False, True):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for slope in (4.0, 0.125, 0.125):  # the first gradient, times the scale, is inf
        scaler.scale((slope * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(f"torch {torch.__version__}, fused={fused}: {weight.tolist()}")
