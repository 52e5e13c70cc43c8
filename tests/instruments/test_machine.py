import torch

from mpcompare.instruments import machine


def test_the_commit_can_be_said_where_there_is_no_history(monkeypatch):
    monkeypatch.setenv("MPCOMPARE_COMMIT", "0123abc")
    assert machine._commit() == "0123abc"


def test_no_folder_is_among_the_variables_of_a_record(monkeypatch):
    monkeypatch.setenv("MPCOMPARE_COMMIT", "0123abc")  # no program starts with these variables
    monkeypatch.setenv("CUDA_HOME", "/home/somebody/cuda-13")
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2:/home/somebody/more.so own.so")
    known = machine.provenance(torch.device("cpu")).environment
    assert known["LD_PRELOAD"] == "libjemalloc.so.2:more.so own.so"
    assert known["TORCH_LOGS"] == "+dynamo"
    assert "CUDA_HOME" not in known
