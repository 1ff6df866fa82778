"""A small masked model of characters: 3 layers of 128 with rotary positions, which a model this small learns sooner."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from mdmi_fast.models.huggingface import HuggingFaceModel, LoadOptions
from mdmi_fast.models.huggingface import load_model as load_huggingface
from mdmi_fast.tasks.protein.letters import LetterTokenizer
from mdmi_fast.tasks.text.corpus import LETTERS, windows

TOKENIZER = LetterTokenizer(LETTERS, first=2, pad=0, mask=1)

_RATE = 2e-3


def train_model(
    text: str,
    folder: Path,
    *,
    seconds: float,
    seed: int = 0,
    batch_size: int = 32,
    on_report: Callable[[int, float], object] | None = None,
) -> None:
    """Train for some time of the processor and save, for `load_model("text:FOLDER")`.

    The loss is cross-entropy at masked letters; how many are masked is uniform in every window, as for a masked
    diffusion model.

    Args:
        text: of LETTERS.
        folder: where to save.
        seconds: CPU time of training, one thread or several together; the rate falls to 0 along a line.
        seed: of weights and windows.
        batch_size: windows a step.
        on_report: called with the number of steps and the mean loss (nats a letter) of the last hundred.
    """
    import transformers

    torch.manual_seed(seed)
    configuration = transformers.EsmConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        position_embedding_type="rotary",
        token_dropout=False,
        emb_layer_norm_before=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=TOKENIZER.pad_token_id,
        mask_token_id=TOKENIZER.mask_token_id,
    )
    network: Any = transformers.EsmForMaskedLM(configuration)
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.01)
    started, step = time.process_time(), 0
    losses: list[float] = []
    while (done := (time.process_time() - started) / seconds) < 1:
        rate = _RATE * min(1, (step + 1) / 100) * (1 - done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = TOKENIZER.encode(windows(text, batch_size, seed=seed * 1_000_003 + step))
        hidden = torch.rand(tokens.shape) < torch.rand(len(tokens), 1)
        hidden[:, 0] |= ~hidden.any(dim=1)
        logits = network(input_ids=tokens.masked_fill(hidden, TOKENIZER.mask_token_id)).logits
        loss = torch.nn.functional.cross_entropy(logits[hidden], tokens[hidden])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if step % 100 == 0 and on_report is not None:
            on_report(step, sum(losses[-100:]) / 100)
    network.save_pretrained(folder)


def load_model(folder: str, **options: Unpack[LoadOptions]) -> HuggingFaceModel:
    """The model that `train_model` saved: `load_model("text:FOLDER")`.

    Args:
        folder: where.
        **options: see `mdmi_fast.models.huggingface.load_model`.
    """
    return load_huggingface(folder, tokenizer=TOKENIZER, **options)
