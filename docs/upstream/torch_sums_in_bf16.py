"""torch's LayerNorm and Embedding on a CPU sum the gradients of their weights in bf16, where they compute in bf16.

Each of n rows adds 1 to the gradient, which then is n: a power of two, so a number of bf16. A sum in bf16 stays at 256,
because 257 has more digits than bf16 holds; each thread keeps one such sum. LayerNorm does the same with fp32 weights,
if its input is bf16. GroupNorm and Linear sum in fp32.
"""

import torch
from torch import nn

print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
for n in (256, 4096):
    x = torch.randn(n, 32, dtype=torch.bfloat16)
    for layer in (nn.LayerNorm(32), nn.GroupNorm(4, 32), nn.Linear(32, 1)):
        layer.bfloat16()(x).sum().backward()
        print(f"{n} rows, {type(layer).__name__}: the gradient of the bias is {layer.bias.grad[0].item():g}")
    layer = nn.Embedding(2, 32).bfloat16()
    layer(torch.zeros(n, dtype=torch.int64)).sum().backward()
    print(f"{n} rows, Embedding: the gradient of the weight is {layer.weight.grad[0, 0].item():g}")
