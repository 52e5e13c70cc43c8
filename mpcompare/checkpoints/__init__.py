"""Checkpoints on disk: training continues from one bit for bit, or one line says what is wrong with it.

    checkpoints/
        step-000120/            the last two that were saved
        step-000123/
            state.safetensors   all tensors; any program that knows safetensors can read them
            checkpoint.json     everything else, with a SHA-256 of each of the two files

checkpoint.py defines the content of a checkpoint, files.py writes and verifies its two files, and folder.py keeps
several. Nothing is pickled.
"""

from mpcompare.checkpoints.checkpoint import Checkpoint as Checkpoint
from mpcompare.checkpoints.folder import load as load
from mpcompare.checkpoints.folder import newest as newest
from mpcompare.checkpoints.folder import save as save
from mpcompare.records import CHECKPOINTS as CHECKPOINTS
