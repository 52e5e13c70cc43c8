"""torch's FSDP2 with its own mixed precision: ``fully_shard(model, mp_policy=MixedPrecisionPolicy(...))``.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html

Parameters are fp32 shards. Before a module computes, its shards are gathered and cast; norms are cast, too, where
autocast keeps them in fp32. Here is one process, so that a shard is the whole tensor. As in the documentation,
gradients are reduced in fp32 (``reduce_dtype``), and fp16 takes a ``GradScaler``. The loss is computed in fp32.

Changed here: batch norms are sharded by themselves and not cast, as FSDP1 did without being asked. torch has no batch
norm on a CPU whose weights are bf16 and whose statistics are fp32 ("expected scalar type BFloat16 but found Float").
"""

import torch
from torch import Tensor, nn

from mpcompare.backends.amp import Amp
from mpcompare.backends.peers.library import join_alone
from mpcompare.contract import State
from mpcompare.loss_scale import LossScale
from mpcompare.tasks.task import Params, Task

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Fsdp2(Amp):
    """``fully_shard`` with a ``MixedPrecisionPolicy``, in one process, in the place of autocast."""

    name = "fsdp2"
    peak_of = None

    def __init__(self, model: nn.Module, task: Task, precision: str, loss_scale: LossScale) -> None:
        device = next(model.parameters()).device
        join_alone(device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(model, task, precision, loss_scale)
        mesh = init_device_mesh(device.type, (1,))
        for module in self.model.modules():
            if isinstance(module, BATCH_NORMS):
                fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy())  # casts nothing
        policy = MixedPrecisionPolicy(self.compute_dtype, torch.float32)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = task.optimizer.make(self.model.named_parameters())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x)
        return self.observe(output, self.task.loss_fn(output.float(), y))

    def clip(self) -> None:
        super().clip()
        self.grad_norm = None if self.grad_norm is None else _whole(self.grad_norm)

    # The harness is shown whole tensors: in one process a shard is one, and shares its memory.

    def own_params(self) -> Params:
        return self.as_shown(super().own_params())

    def as_shown(self, tensors: Params) -> Params:
        return {name: _whole(t) for name, t in tensors.items()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        from torch.distributed.tensor import DTensor

        for p, moments in self.optimizer.state.items():
            assert isinstance(p, DTensor)
            for kind, value in moments.items():
                if value.dim():
                    moments[kind] = DTensor.from_local(value, p.device_mesh, p.placements)


def _whole(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
