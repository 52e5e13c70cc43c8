"""Real bugs of gradients that are accumulated over micro-batches."""

from planted.real.registry import Theme
from planted.real.settings import MLP_ACCUMULATE, MLP_ACCUMULATE_2, MLP_ACCUMULATE_32

from mpcompare.backends.master_weights import MasterWeights
from mpcompare.backends.real_bugs import SumsTheLosses, UpdatesEachMicroBatch

ACCUMULATION = Theme("accumulation")

ACCUMULATION.plants(
    "huggingface/transformers/pull/35438",
    MLP_ACCUMULATE_2,
    "bf16",
    fair="accumulation",
    also="transformers#35207, transformers#37766",
)(SumsTheLosses)
ACCUMULATION.plants("paiml/entrenar/issues/123", MLP_ACCUMULATE, "bf16", fair="accumulation")(UpdatesEachMicroBatch)


@ACCUMULATION.plants(
    "deepspeedai/DeepSpeed/issues/1800",
    MLP_ACCUMULATE_32,
    "bf16",
    fair="accumulation, products",
    also="DeepSpeed#2352, DeepSpeed#2768",
)
class SumsInBf16(MasterWeights):
    """ZeRO adds the gradients of micro-batches in bf16."""

    def backward(self) -> None:
        super().backward()
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.copy_(master.grad.to(self.compute_dtype))


@ACCUMULATION.plants(
    "deepspeedai/Megatron-DeepSpeed/pull/42", MLP_ACCUMULATE, "bf16", fair="accumulation", read="title"
)
class DividesTwice(MasterWeights):
    """The loss is divided by the number of micro-batches twice, by the training script and by the engine."""

    def backward(self) -> None:
        self.loss = self.loss / self.task.accumulate
        super().backward()
