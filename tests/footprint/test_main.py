"""The command: its table and figure, and one clear line for each mistake."""

import subprocess
import sys

import pytest
import torch

from mpcompare.command.nodes import composed, instantiate
from mpcompare.footprint.__main__ import main
from mpcompare.footprint.fake import Fake, make_module, without_data
from mpcompare.footprint.subject import Wish, subject_of


@pytest.mark.slow
def test_table_and_figure(tmp_path):
    figure = tmp_path / "footprint.png"
    command = [sys.executable, "-m", "mpcompare.footprint", "char_gpt", "--batch", "2", "--optimizer", "adamw"]
    done = subprocess.run([*command, "--out", str(figure)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("char_gpt: 627,936 parameters, batch 2x64, adamw", "master_weights", "optimizer state", "peak"):
        assert word in done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp2"], "the path of a module, as my_package.Net (did you mean gpt2?)"),
        (["gpt3"], "NAME=gpt3: expected one of gpt2, gpt2-medium, gpt2-large, gpt2-xl, char_gpt"),
        (["gpt2", "--length", "2000"], "--length=2000: gpt2 has 1024 positions"),
        (["gpt2", "width=3"], "NAME=gpt2: takes --batch, --length and --optimizer, and no width=3"),
        (["gpt2", "--optimizer", "torch"], "--optimizer=torch: expected one of adam, adamw, momentum, nesterov, sgd"),
        (["gpt2", "--batch", "0"], "--batch=0: expected a whole number of at least 1"),
        (["mnist_cnn", "--length", "5"], "--length=5: mnist_cnn has no ids"),
        (["mnist_cnn", "--shape", "1,x"], "--shape=1,x: expected whole numbers"),
        (["torch.nn.Linear", "in_features=3", "out_features=2"], "needs --shape of a sample (3,224,224), or --length"),
        (
            ["torch.nn.ReLU", "--shape", "4", "--length", "3"],
            "--length=3: expected either --length, for ids, or",
        ),
        (["torch.nn.Nothing", "--shape", "3"], "torch.nn.Nothing"),
        (["torch.nn.Linear", "in_features=3", "out_features=2", "--shape", "4"], "cannot take a step"),
        (["gpt3", "--out", "/nowhere/x.png"], "--out=/nowhere/x.png: cannot write there (there is no folder /nowhere)"),
        (["gpt3", "--out", "x.jpeg"], "--out=x.jpeg: expected a name that ends in one of .png, .svg, .pdf"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["mpcompare.footprint", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    stderr = capfd.readouterr().err
    assert ended.value.code == 2
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char_gpt", "text_lstm", "recipe_mlp"])
def test_samples_have_the_shapes_of_the_data(name):
    subject = subject_of(Wish(name))
    dataset = instantiate(composed([f"task={name}", "task.samples=600"] if "mlp" in name else [f"task={name}"]).data)(0)
    assert subject.batch.shape == dataset.x_train.shape[1:]
    assert subject.batch.dtype == dataset.x_train.dtype


@pytest.mark.parametrize(("name", "data"), [("mnist_cnn", "digits"), ("cifar10_cnn", "synthetic_images")])
def test_images_have_the_shapes_of_their_stand_ins(name, data):
    from mpcompare.tasks.data import generated

    x = getattr(generated, data)(0, 20).x_train
    batch = subject_of(Wish(name)).batch
    assert (batch.shape, batch.dtype) == (x.shape[1:], x.dtype)


def test_complex_weights_are_counted_as_in_training_as_pairs_of_real_ones():
    subject = subject_of(Wish("tasks.test_complex_weights.Filters", shape=(5,)))
    assert subject.title.startswith("tasks.test_complex_weights.Filters: 96 parameters")
    assert {p.dtype for p in subject.model.parameters()} == {torch.float32}


def test_tied_parameters_stay_tied_without_data():
    model = make_module(subject_of(Wish("char_gpt", ["tied=true"])).task.model)
    model = without_data(model, Fake())
    assert model.output.weight is model.embedding.weight
