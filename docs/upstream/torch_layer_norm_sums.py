"""torch's LayerNorm on a CPU sums the gradients of its weight and bias in bf16, if its input is bf16.

Each row adds 1 to the gradient of the bias, which then is the number of rows: a power of two, so a number of bf16. A
sum in bf16 stays at 256, because 257 has more digits than bf16 holds. Each thread keeps one such sum. The same happens
where weight and bias are fp32, and to the gradient of the weight. GroupNorm sums in fp32.
"""

import torch

print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
for rows in (256, 4096):
    x = torch.randn(rows, 32, dtype=torch.bfloat16)
    for norm in (torch.nn.LayerNorm(32), torch.nn.LayerNorm(32).bfloat16(), torch.nn.GroupNorm(4, 32).bfloat16()):
        norm(x).sum().backward()
        kind = f"{type(norm).__name__} with weights in {str(norm.weight.dtype).removeprefix('torch.')}"
        print(f"{rows} rows, {kind}: the gradient of the bias is {norm.bias.grad[0].item():g}")
