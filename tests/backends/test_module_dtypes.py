from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.backends import make_backend, take_step
from support.marks import CUDA
from support.networks import DroppingGpt
from support.records import result_of
from support.tasks import make_batch, make_task
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcompare.backends.amp import Amp
from mpcompare.backends.amp_compile import AmpCompile
from mpcompare.backends.fp32 import Fp32
from mpcompare.backends.master_weights import MasterWeights
from mpcompare.loss_scale import NoLossScale
from mpcompare.report import dtypes as report
from mpcompare.report.comparison import Comparison, Entry
from mpcompare.report.contents import Report
from mpcompare.report.figures import dtypes as figure
from mpcompare.report.outputs import data
from mpcompare.report.runs import Run
from mpcompare.tasks.images import MnistCnn
from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.task import Task
from mpcompare.tasks.text import CharGpt

GPT = Task(lambda: CharGpt(11, 6, width=8, heads=2, blocks=2), "cross_entropy", Sgd(0.1), 4)
CNN = Task(lambda: MnistCnn(2), "cross_entropy", Sgd(0.1), 4)


def batch_of(task, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    if task is CNN:
        x, y = torch.randn(4, 1, 28, 28, generator=generator), torch.arange(4)
    else:
        x, y = torch.randint(11, (2, 4, 6), generator=generator)
    return x.to(device), y.to(device)


def seen(backend_class, task, precision="bf16", device="cpu"):
    backend = backend_class(task.new_model(0, torch.device(device)), task, precision, NoLossScale())
    return backend.module_dtypes(*batch_of(task, device))


def row(dtypes, layer):
    """Returns a layer's dtypes of weight, input, computes, output, gradient and backward."""
    return " ".join(dtypes[layer][role] for role in tuple(report.ROLES)[1:])


# On a GPU cross_entropy takes log_softmax in the dtype of the logits: autocast makes it fp32 unless a dtype is named,
# and cross_entropy names the one of the logits. The sum of the loss is fp32.
LOSS = {"cpu": "- bf16 fp32 fp32 - fp32", "cuda": "- bf16 fp32+bf16 fp32 - fp32+bf16"}


# As torch's lists have it: linear, conv2d and attention run in 16 bits, layer_norm and the losses in fp32. Operators on
# no list run in the dtype of their inputs.  https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_autocast_casts_what_its_lists_say(device):
    found = seen(Amp, GPT, device=device)
    assert list(found)[:4] == ["", "embedding", "positions", "blocks.0"]
    assert row(found, "embedding") == "fp32 int64 fp32 fp32 fp32 fp32"
    assert row(found, "blocks.1.norm1") == "fp32 fp32 fp32 fp32 fp32 fp32"
    assert row(found, "blocks.1.up") == "fp32 fp32 bf16 bf16 bf16 bf16"
    assert row(found, "blocks.1.down") == "fp32 bf16 bf16 bf16 bf16 bf16"
    assert row(found, "blocks.1") == "- fp32 fp32 fp32 fp32 -"  # the residual additions promote
    assert found["blocks.1.attention"]["computes"] == "bf16"
    assert row(found, "(loss)") == LOSS[device]
    assert found["output"]["master"] == "fp32"
    found = seen(Amp, CNN, device=device)
    assert row(found, "conv1") == "fp32 fp32 bf16 bf16 bf16 bf16"
    assert row(found, "norm1") == "fp32 bf16 fp32+bf16 bf16 bf16 fp32+bf16"


@pytest.mark.parametrize("task", [GPT, CNN])
def test_fp32_is_fp32_everywhere(task):
    cells = {row[what] for row in seen(Fp32, task, "fp32").values() for what in report.ROLES}
    assert cells <= {"fp32", "int64", "-"}


def test_master_weights_keep_16_bits_but_in_norms_and_embeddings():
    found = seen(MasterWeights, GPT)
    assert row(found, "embedding") == "fp32 int64 fp32 bf16 bf16 fp32"
    assert row(found, "blocks.0.norm1") == "fp32 bf16 fp32 bf16 bf16 fp32"
    assert row(found, "blocks.0.up") == "bf16 bf16 bf16 bf16 bf16 bf16"
    assert row(found, "blocks.0") == "- bf16 bf16 bf16 bf16 -"
    assert row(found, "(loss)") == "- bf16 fp32 fp32 - fp32"
    assert found["blocks.0.up"]["master"] == "fp32"
    assert row(seen(MasterWeights, CNN), "norm1") == "fp32 bf16 fp32 bf16 bf16 fp32"


def test_what_a_backend_says_of_itself_is_not_asked():
    class NormsIn16Bits(Amp):
        def __init__(self, *args):
            super().__init__(*args)
            for module in self.model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.forward = self.in_16_bits(module)

        @staticmethod
        def in_16_bits(norm):
            def forward(x):
                with torch.autocast("cpu", enabled=False):
                    low = x.bfloat16(), norm.normalized_shape, norm.weight.bfloat16(), norm.bias.bfloat16()
                    return nn.functional.layer_norm(*low).float()

            return forward

        def dtypes(self):
            return dict.fromkeys(("params", "activations", "gradients", "loss", "optimizer"), "fp32")

    found = seen(NormsIn16Bits, GPT)
    assert row(found, "norm") == "fp32 fp32 bf16 fp32 fp32 bf16"
    assert row(found, "output") == row(seen(Amp, GPT), "output")


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("name", "computes"), [("scratch", "fp32"), ("fused", "-")])
def test_backends_without_a_module_read_their_own_tensors(name, computes, device):
    task = make_task()
    device = torch.device(device)
    found = make_backend(name, task, "bf16", device).module_dtypes(*make_batch(task, device))
    assert list(found) == ["layer1", "layer2", "layer3", "(loss)"]
    assert {row(found, f"layer{n}") for n in (1, 2, 3)} == {"bf16 bf16 bf16 bf16 bf16 bf16"}
    assert {found[f"layer{n}"]["master"] for n in (1, 2, 3)} == {"fp32"}
    assert found["(loss)"]["computes"] == computes


def test_a_graph_is_seen_before_it_is_captured(device):
    task = make_task()
    batch = make_batch(task, device)
    eager, graph = (make_backend(name, task, "bf16", device).module_dtypes(*batch) for name in ("amp", "amp_graph"))
    assert graph == eager
    assert row(graph, "layer2") == "fp32 bf16 bf16 bf16 bf16 bf16"


def test_showing_dtypes_changes_no_bit():
    """Neither the step nor what stays behind on the modules is changed."""
    shown, other = (Amp(GPT.new_model(0, torch.device("cpu")), GPT, "bf16", NoLossScale()) for _ in range(2))
    shown.module_dtypes(*batch_of(GPT))
    take_step(other, *batch_of(GPT))
    for name, p in shown.master_params().items():
        assert torch.equal(p, other.master_params()[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in shown.model.modules())


class Shared(nn.Module):
    """A layer that is called twice, a relu that overwrites its input, and a layer in which no gradient arrives."""

    def __init__(self):
        super().__init__()
        self.layer, self.relu, self.unused = nn.Linear(20, 20), nn.ReLU(inplace=True), nn.Linear(20, 5)

    def forward(self, x):
        x = self.relu(self.layer(self.relu(self.layer(x))))
        return x[:, :5] + 0 * self.unused(x).detach()


def test_layers_that_are_shared_in_place_or_unused():
    task = Task(Shared, "cross_entropy", Sgd(0.1), 32)
    found = Amp(task.new_model(0, torch.device("cpu")), task, "bf16", NoLossScale()).module_dtypes(
        *make_batch(make_task(), torch.device("cpu"))
    )
    assert row(found, "layer") == "fp32 fp32+bf16 bf16 bf16 bf16 bf16"  # fp32 in the first call, bf16 in the second
    assert row(found, "relu") == "- bf16 bf16 bf16 bf16 bf16"
    assert row(found, "unused") == "fp32 bf16 bf16 bf16 - -"


def in_parts(output, y):
    """The loss of two parts of the tokens. Backward puts zeros around the gradient of each, and adds them up."""
    parts = ((output[:, each], y[:, each]) for each in (slice(0, 2), slice(2, None)))
    return sum(nn.functional.cross_entropy(o.flatten(0, 1), each.flatten()) for o, each in parts) / 2


def test_a_loss_in_parts_computes_in_the_dtype_of_each_part():
    assert row(seen(Amp, replace(GPT, loss=in_parts)), "(loss)") == "- bf16 fp32 fp32 - fp32"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_dtype(reentrant):
    generator, tables = torch.Generator().manual_seed(0), []
    x, y = (torch.randint(20, (4, 8), generator=generator) for _ in "xy")
    for way in (None, reentrant):
        model = DroppingGpt((20, 8, 16, 2, 2), 0.1, reentrant=way)
        task = Task(lambda model=model: model, "cross_entropy", Sgd(0.1), 4)
        tables.append(Amp(model, task, "bf16", NoLossScale()).module_dtypes(x, y))
    assert tables[0] == tables[1]
    assert tables[0]["blocks.0.up"]["computes"] == tables[0]["blocks.0.up"]["backward"] == "bf16"


def test_what_a_checkpoint_computes_again_is_forward():
    class Checkpointed(CharGpt):
        def forward(self, x):
            h = checkpoint(self.blocks[0], self.embedding(x), use_reentrant=False)
            return self.output(self.norm(self.blocks[1](h)))

    task = Task(lambda: Checkpointed(11, 6, width=8, heads=2, blocks=2), "cross_entropy", Sgd(0.1), 4)
    found = seen(Amp, task)
    for layer in ("attention", "norm1", "norm2", "down", "gelu"):
        assert row(found, f"blocks.0.{layer}") == row(found, f"blocks.1.{layer}")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_compiled_step_is_seen_in_the_graphs_that_inductor_gets(device):
    eager, found = (seen(backend, GPT, device=device) for backend in (Amp, AmpCompile))
    assert set(found) == set(eager)
    different = {
        name.rpartition(".")[2]: [what for what in tuple(report.ROLES)[:6] if found[name][what] != eager[name][what]]
        for name in eager
    }
    # Its decompositions compute GELU and log_softmax in fp32, where the eager kernels are given 16 bits.
    of_loss = {"(loss)": ["computes"]} if device == "cuda" else {}
    assert {name: what for name, what in different.items() if what} == {"gelu": ["computes"], **of_loss}
    assert found["blocks.0.gelu"]["computes"] == "fp32"
    found = seen(AmpCompile, CNN, device=device)
    assert row(found, "norm1") == "fp32 bf16 fp32 bf16 bf16 fp32"
    assert row(found, "conv2") == "fp32 bf16 bf16 bf16 bf16 bf16"


@pytest.fixture(scope="module")
def comparison():
    entries = []
    runs = [("amp", Amp), ("master_weights", MasterWeights), ("amp", Amp), ("fp32", Fp32), ("outside", None)]
    for name, backend in runs:
        precision = "fp32" if name == "fp32" else "bf16"
        layers = {} if backend is None else seen(backend, GPT, precision)
        result = result_of(backend=name, precision=precision, module_dtypes=layers)
        run = Run(None, str(len(entries)), result, pd.DataFrame(), pd.DataFrame())
        entries.append(Entry(run, f"{name} {precision}", "", entries[0].run if entries else run))
    return Comparison("title", "data", entries=entries)


def test_the_console_names_what_differs_in_forward_from_a_baseline_in_the_same_precision(comparison):
    (line,) = report.lines(comparison)
    assert line.startswith(
        "master_weights bf16 compared with amp bf16: weight bf16 instead of fp32 in 9 Linear; input bf16 "
    )
    assert "computes bf16 instead of fp32 in CharGpt, 2 Block;" in line


def test_the_table_holds_a_row_for_each_layer_and_run(comparison, tmp_path):
    data.dtypes_csv(Report([comparison], "amp"), tmp_path)
    table = pd.read_csv(tmp_path / "dtypes.csv")
    assert len(table) == 4 * len(comparison.entries[0].run.result.module_dtypes)
    found = table[(table["run"] == 1) & (table["layer"] == "blocks.0.up")].iloc[0]
    assert (found["label"], found["kind"], found["weight"]) == ("master_weights bf16", "Linear", "bf16")


def test_the_figure_says_every_dtype_and_pales_what_is_the_baselines(comparison):
    runs = figure.alike(report.observed(comparison))
    assert list(runs) == ["amp bf16 (baseline) + 1 alike", "master_weights bf16", "fp32 fp32"]
    rows = figure.grouped(list(runs.values()))
    assert (["blocks.0.up", "blocks.1.up"], "Linear") in rows
    assert len(rows) == 15
    (axes,) = figure.dtypes(Report([comparison], "amp")).axes
    texts = [text.get_text() for text in axes.texts]
    cells = [report.layers_of(e)[layers[0]][what] for e in runs.values() for layers, _ in rows for what in figure.SHOWN]
    assert [t for t in texts if t in ("fp32", "bf16", "int64", "-")] == cells
    strong = sum(patch.get_alpha() == 1 for patch in axes.patches)
    different = sum(
        what in figure.SHOWN
        for entry in runs.values()
        for layers, _ in rows
        for what in report.differing(entry, layers[0])
    )
    own = sum(cell != "-" for cell in cells[: len(rows) * len(figure.SHOWN)])
    assert strong == own + different


def test_records_without_dtypes_draw_nothing(tmp_path):
    run = Run(None, "old", result_of(), pd.DataFrame(), pd.DataFrame())
    comparison = Comparison("title", "data", entries=[Entry(run, "amp", "", run)])
    contents = Report([comparison], "amp")
    data.dtypes_csv(contents, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert figure.dtypes(contents) is None
