"""Hugging Face's Trainer, and the loop of Accelerate's example."""

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_callback import PrinterCallback
from watch.loops.base import Loop, published


class Tokens(Dataset):  # type: ignore[type-arg]
    """Rows of tokens of a small vocabulary. The first tokens of a row have no label: as many as the row's number."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self.rows[number]
        labels = row.clone()
        labels[: number % 7 * 2] = -100
        return {"input_ids": row, "labels": labels}


@published
class HuggingFaceTrainer(Loop):
    """``Trainer`` with a GPT-2, accumulation over unequal numbers of labels, and evaluation in between."""

    name = "Hugging Face Trainer"
    where = "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py"
    precisions = ("bf16",)
    micro_batches = 3
    clip_norm = 1.0
    words, length, rows = 64, 16, 4
    trainer = Trainer

    def make_model(self) -> nn.Module:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.words, n_positions=self.length, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
                eos_token_id=0,
            )
        )  # fmt: skip

    def make_optimizer(self) -> Optimizer:
        return AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)

    def schedule(self, updates: int) -> Any:
        return get_linear_schedule_with_warmup(self.optimizer, 2, updates + 4)

    def settings(self) -> dict[str, Any]:
        return {"bf16": self.precision == "bf16", "fp16": self.precision == "fp16"}

    def train(self, updates: int) -> None:
        data = Tokens(self.integers(self.words, 96, self.length) ** 2 // self.words)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, use_cpu=True, max_steps=updates, per_device_train_batch_size=self.rows,
                gradient_accumulation_steps=self.micro_batches, max_grad_norm=self.clip_norm, eval_strategy="steps",
                eval_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1,
                **self.settings(),
            )  # fmt: skip
            trainer = self.trainer(
                model=self.model, args=arguments, train_dataset=data, eval_dataset=Tokens(data.rows[:8]),
                optimizers=(self.optimizer, self.schedule(updates)),
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
            trainer.train()


@published
class HuggingFaceTrainerRecomputes(HuggingFaceTrainer):
    """``Trainer`` that recomputes activations."""

    name = "Hugging Face Trainer, recomputing"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "gradient_checkpointing": True}


@published
class HuggingFaceTrainerFp16(HuggingFaceTrainer):
    """``Trainer`` that is asked for fp16 on a CPU, where it computes in fp32."""

    name = "Hugging Face Trainer, fp16 on a CPU"
    precisions = ("fp16",)
    computes = "fp32"


@published
class AccelerateLoop(Loop):
    """The example of Accelerate for text, with a BERT: accumulate, clip where gradients are synchronized."""

    name = "Accelerate"
    where = "https://github.com/huggingface/accelerate/blob/main/examples/nlp_example.py"
    precisions = ("bf16",)
    micro_batches = 2
    clip_norm = 1.0
    words, length, rows = 64, 16, 4

    def __init__(self, precision: str, seed: int = 0) -> None:
        super().__init__(precision, seed)
        AcceleratorState._reset_state(True)  # the state belongs to the process, and keeps the first precision
        self.accelerator = Accelerator(
            mixed_precision=precision, cpu=True, gradient_accumulation_steps=self.micro_batches
        )
        text = self.integers(self.words, 96, self.length)
        data = [{"input_ids": row, "labels": (row.sum() % 2)} for row in text]
        loader = DataLoader(data, batch_size=self.rows)  # type: ignore[arg-type]
        schedule = get_linear_schedule_with_warmup(self.optimizer, 2, 30)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, self.optimizer, loader, schedule
        )

    def make_model(self) -> nn.Module:
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=self.words, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                max_position_embeddings=self.length,
            )
        )  # fmt: skip

    def make_optimizer(self) -> Optimizer:
        return AdamW(self.model.parameters(), lr=1e-3)

    def clip(self) -> None:
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip_norm)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)
        self.clip()

    def train(self, updates: int) -> None:
        taken = 0
        while taken < updates:
            self.model.train()
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                taken += self.accelerator.sync_gradients
                if taken == updates:
                    break
            self.evaluate()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            batch = next(iter(self.loader))
            self.accelerator.gather_for_metrics(self.model(**batch).logits.argmax(-1))

    @property
    def trained(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return model
