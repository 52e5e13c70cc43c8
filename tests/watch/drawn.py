"""The draw of the real bugs that are put into training loops.

    python tests/watch/drawn.py       writes docs/watch/drawn.csv

The bugs come from the kept tables in ``docs/real_bugs``. A bug is left out only if a plain training loop cannot have
it, whether a watcher would see it or not:

* *checkpoint*: it is made when a run is resumed, and no checkpoint is loaded within watched steps.
* *layer*: it is in the formula or the kernel of one layer of the network. A loop only calls the layer.
* *twice*: the same rule has another entry.
* *right*: the entrant is no bug.

The other bugs are sorted by the SHA-256 of ``SALT`` and their id, and the first 30 are drawn.
"""

import csv
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = ("first", "second_draw", "third_draw", "fourth_draw", "fifth_draw")
DRAWN = ROOT / "docs" / "watch" / "drawn.csv"
SALT = "watch: "
NUMBER = 30
FIELDS = ("place", "hash", "id", "link", "theme", "setting", "precision", "what")

THEMES_LEFT_OUT = {
    "correct": "right",
    "resume": "checkpoint",
    "norms": "layer",
    "activations": "layer",
    "attention": "layer",
    "embeddings": "layer",
    "convolutions": "layer",
}
BUGS_LEFT_OUT = {
    "DeepSpeed#8588, its defaults": "twice",
    "tt-metal#55438": "layer",  # the variance that batch norm keeps
    "nntrainer#677": "layer",
    "pytorch-tools#97": "layer",
    "transformers#29285": "layer",  # rotary angles
    "aiter#5151": "layer",  # a norm that cuts off
    "torch-xpu-ops#3043": "layer",  # tanh
    "tinygrad#12280": "layer",  # the softmax of attention
    "maxtext#3138": "layer",
    "cs249r_book#1399": "layer",  # GELU
    "pytorch#68048": "layer",  # the bias of a convolution
    "tt-metal#53386": "layer",  # an embedding's gradient
    "transformers#26451": "layer",  # attention
    "kaldi#2814": "layer",  # dropout
    "apex#816": "layer",
    "vit-pytorch#65": "layer",
    "pytorch#26302": "layer",  # the row of padding
    "FlagGems#5014": "layer",  # an LSTM
    "pytorch#87979": "layer",  # linear layers under custom_bwd
    "AstrAI#57": "layer",  # experts
}

Row = dict[str, str]


def kept() -> list[Row]:
    """Returns the rows of all draws of real bugs, with the entrants that are right."""
    rows = []
    for table in TABLES:
        with (ROOT / "docs" / "real_bugs" / f"{table}.csv").open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


def why_left_out(row: Row) -> str:
    """Returns the reason why a loop cannot have the bug, and an empty text if it can."""
    return BUGS_LEFT_OUT.get(row["id"], THEMES_LEFT_OUT.get(row["theme"], ""))


def hash_of(row: Row) -> str:
    """Returns the hexadecimal digits by which a bug is sorted."""
    return hashlib.sha256((SALT + row["id"]).encode()).hexdigest()


def draw(number: int = NUMBER) -> list[Row]:
    """Returns the bugs that are drawn, in the order of their hashes."""
    return sorted((row for row in kept() if not why_left_out(row)), key=hash_of)[:number]


def write() -> None:
    """Writes the table of drawn bugs."""
    DRAWN.parent.mkdir(exist_ok=True)
    with DRAWN.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for place, row in enumerate(draw(), 1):
            writer.writerow({"place": place, "hash": hash_of(row)[:12], **row})


if __name__ == "__main__":
    write()
