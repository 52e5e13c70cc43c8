"""deepspeed's FP16_Optimizer divides the gradients of a step by the loss scale of the next one.

``step`` calls ``_update_scale`` before ``unscale_and_clip_grads``. In a step after which the scale grows, gradients
that were computed with the old scale are divided by the new one, twice as large, so that the update is half of what it
should be. See https://github.com/deepspeedai/DeepSpeed/issues/8588.
"""

import deepspeed
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
scaling = {"init_scale": 4.0, "scale_window": 2, "min_scale": 1.0, "delayed_shift": 1}
sgd = torch.optim.SGD([weight], lr=1.0)
optimizer = FP16_Optimizer(sgd, dynamic_loss_scale=True, dynamic_loss_args=scaling, verbose=False)
print(f"deepspeed {deepspeed.__version__}: every gradient is 1, lr is 1, so every step moves the weight by 1")
for step in range(6):
    before, scale = weight.tolist()[0], optimizer.loss_scale
    optimizer.backward(weight.sum())
    optimizer.step()
    print(f"step {step}: loss scale {scale:g}, the weight moved by {before - weight.tolist()[0]:g}")
