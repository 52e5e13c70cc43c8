"""The settings of the fourth draw of real bugs that the first three draws do not have, and their networks."""

from functools import partial

import torch
from planted.real.networks import VOCABULARY
from planted.real.registry import Setting
from planted.real.settings import ADAMW_DEFAULT, MLP, on_tokens
from planted.real.third_draw_settings import SHAPE

from mpcompare.tasks.optimizers import Sgd
from mpcompare.tasks.schedules import Cosine
from mpcompare.tasks.text import CharGpt, CharLstm


def padded_gpt() -> CharGpt:
    """Returns a small GPT in which id 0 stands for padding: its row of the embedding is 0, and has no gradient."""
    model = CharGpt(*SHAPE)
    model.embedding.padding_idx = 0
    with torch.no_grad():
        model.embedding.weight[0].zero_()
    return model


MLP_ADAMW_CLIP = MLP.changed("AdamW, clip 0.5", optimizer=ADAMW_DEFAULT, clip_norm=0.5)
MLP_MOMENTUM_COSINE = MLP.changed("momentum, cosine", optimizer=Sgd(0.05, 0.9), schedule=Cosine())
GPT_PADDED = Setting("GPT, id 0 is padding", partial(on_tokens, padded_gpt))
LSTM = Setting("LSTM", partial(on_tokens, partial(CharLstm, VOCABULARY, 32)))
