"""deepspeed's FP16_UnfusedOptimizer has counted one update of AdamW before the first one is taken.

``initialize_optimizer_states`` lets the optimizer make its state by a step with gradients of 0, which counts. So the
first update has the bias correction of the second, and the update is 0.74 times what it should be.
"""

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
deepspeed.init_distributed("gloo")
print(f"deepspeed {deepspeed.__version__}: Adam's first update is lr, whatever the gradient")
for name in ("torch alone", "deepspeed"):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32 if name == "torch alone" else torch.float16))
    optimizer = torch.optim.AdamW([weight], lr=0.125, weight_decay=0.0)
    if name == "deepspeed":
        optimizer = FP16_UnfusedOptimizer(optimizer, static_loss_scale=1.0, verbose=False)
        optimizer.backward(weight.sum())
    else:
        weight.sum().backward()
    optimizer.step()
    print(f"{name}: lr 0.125, and the weight moved by {-weight.tolist()[0]:.4f}")
