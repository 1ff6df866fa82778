"""How many tokens a network reads, against networks that are run until they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mdmi_fast.models.huggingface import HuggingFaceModel
from mdmi_fast.models.limits import length_limit

ROWS = 16
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": ROWS,
}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 40, "vocab_size": 40, "max_position_embeddings": ROWS}
SMALL_TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    # A row a token.
    "bert": (SIZES, 16),
    "albert": ({**SIZES, "embedding_size": 16}, 16),
    "big_bird": (SIZES, 16),
    "convbert": ({**SIZES, "embedding_size": 32}, 16),
    "distilbert": (
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 40, "max_position_embeddings": ROWS},
        16,
    ),
    "electra": ({**SIZES, "embedding_size": 16}, 16),
    "ernie": (SIZES, 16),
    "flaubert": (XLM, 16),
    "fnet": (SIZES, 16),
    "megatron-bert": (SIZES, 16),
    "mobilebert": ({**SIZES, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}, 16),
    "rembert": ({**SIZES, "input_embedding_size": 16, "output_embedding_size": 16}, 16),
    "squeezebert": (
        {
            **SIZES,
            "embedding_size": 32,
            **{f"{part}_groups": 2 for part in ("q", "k", "v", "post_attention", "intermediate", "output")},
        },
        16,
    ),
    "xlm": (XLM, 16),
    # Sines, in a table that ends all the same.
    "roformer": ({**SIZES, "embedding_size": 32}, 16),
    # Two rows more than the configuration says, which no token is read from.
    "mra": (SIZES, 16),
    "yoso": (SIZES, 16),
    # The rows up to that of the pad token, 1, are no token's.
    "camembert": (SIZES, 14),
    "data2vec-text": (SIZES, 14),
    "esm": ({**SIZES, "position_embedding_type": "absolute", "mask_token_id": 4, "pad_token_id": 1}, 14),
    "ibert": (SIZES, 14),
    "longformer": ({**SIZES, "attention_window": 4}, 14),
    "luke": ({**SIZES, "entity_vocab_size": 10, "entity_emb_size": 16}, 14),
    "mpnet": (SIZES, 14),
    "roberta": (SIZES, 14),
    "xmod": ({**SIZES, "languages": ["en_XX"], "default_language": "en_XX"}, 14),
    # Rotary positions, distances that are cut off, positions that are.
    "deberta-v2": (
        {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        None,
    ),
    "modernbert": ({**SIZES, **SMALL_TOKENS}, None),
    "tapas": (SIZES, None),
}


def tiny(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {**KINDS[kind][0], **more} if kind in KINDS else more
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**options)
    network: nn.Module = transformers.AutoModelForMaskedLM.from_config(config)
    return network.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_is_the_last_length_that_the_network_can_read(kind: str) -> None:
    network, limit = tiny(kind), KINDS[kind][1]
    model = HuggingFaceModel(network, mask_token_id=4)
    assert model.max_length == limit
    tokens = torch.full((1, 2 * ROWS if limit is None else limit), 4)
    assert model(tokens).logits.shape == (*tokens.shape, 40)
    if limit is not None:
        with pytest.raises((IndexError, RuntimeError)):
            network(input_ids=torch.full((1, limit + 1), 4))
        with pytest.raises(ValueError, match=f"a sequence may have at most {limit} tokens, got {limit + 1}"):
            model(torch.full((1, limit + 1), 4))


def test_no_layer_reads_a_long_sequence_for_it() -> None:
    network: Any = tiny("bert", max_position_embeddings=4096)
    lengths: list[int] = []
    network.bert.encoder.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    assert HuggingFaceModel(network, mask_token_id=4).max_length == 4096
    assert max(lengths) <= 5


def test_networks_of_one_length_are_refused_when_they_are_loaded() -> None:
    sizes = {"d_model": 32, "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1, "vocab_size": 40}
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32, "v_channels": 32}
    network = tiny("perceiver", **sizes, **heads, max_position_embeddings=ROWS)
    with pytest.raises(ValueError, match=r"logits must be of every position, .* got shape \(1, 16, 40\)"):
        HuggingFaceModel(network, mask_token_id=4)
    network = tiny("nystromformer", **{**SIZES, "num_landmarks": 4, "segment_means_seq_len": 8})
    with pytest.raises(ValueError, match="NystromformerForMaskedLM: cannot read a sequence of three tokens: shape"):
        HuggingFaceModel(network, mask_token_id=4)


def test_a_network_that_answers_for_other_positions_is_refused_where_it_does() -> None:
    sizes = {
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
    }
    options = {**SIZES, **sizes, "attn_layers": ["local", "local"], "is_decoder": False, "local_attn_chunk_length": 4}
    model = HuggingFaceModel(tiny("reformer", **options), mask_token_id=4)  # pads to whole chunks, and answers so
    with pytest.raises(ValueError, match=r"must answer for every position of tokens \(1, 6\), got shape \(1, 8, 32\)"):
        model(torch.full((1, 6), 4))


class Table(nn.Module):
    """Reads one of its tables in a way of its own."""

    def __init__(self, read: Callable[[Table, int], Tensor]) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(9, 2))
        self.fixed: Tensor
        self.register_buffer("fixed", torch.zeros(1, 12, 2))
        self.read = read

    def run(self, length: int) -> Tensor:
        return torch.zeros(1, length, 2) + self.read(self, length)


def regrown(table: Table, length: int) -> Tensor:
    """A cache, computed again where it is too short."""
    if table.fixed.shape[1] < length:
        table.fixed = torch.zeros(1, 2 * length, 2)
    return table.fixed[:, :length]


def buckets(table: Table, length: int) -> Tensor:
    """Positions beyond the seventh share a row."""
    return table.learned[torch.arange(length).clamp(max=7)]


READS: dict[str, tuple[Callable[[Table, int], Tensor], int | None]] = {
    "a slice of a parameter": (lambda table, length: table.learned[:length], 9),
    "a slice of a buffer": (lambda table, length: table.fixed[:, :length], 12),
    "rows by their numbers": (lambda table, length: table.learned[torch.arange(length) + 2], 7),
    "rows from the end": (lambda table, length: table.learned.index_select(0, 8 - torch.arange(length)), 9),
    "distances": (
        lambda table, length: nn.functional.embedding(
            torch.arange(length).unsqueeze(0) - torch.arange(length).unsqueeze(1) + 4, table.learned
        ).sum(0),
        5,
    ),
    "gathered": (
        lambda table, length: table.fixed.expand(1, 12, 2).gather(
            1, torch.arange(length).view(1, -1, 1).expand(1, -1, 2)
        ),
        12,
    ),
    "a part that stays": (lambda table, length: table.learned[:100].sum(0), None),
    "a cache": (regrown, None),
    "buckets": (buckets, None),
    "the smaller of two": (lambda table, length: table.fixed[:, :length] + table.learned[:length], 9),
}


@pytest.mark.parametrize("name", READS)
def test_every_way_to_read_a_table_is_seen(name: str) -> None:
    read, limit = READS[name]
    table = Table(read)
    assert length_limit(table, table.run) == limit
    assert table.run(20 if limit is None else limit).shape[1] == (limit or 20)
    if limit is not None:
        with pytest.raises((IndexError, RuntimeError)):
            table.run(limit + 1)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 6])
def test_a_table_of_a_few_rows_has_an_end(rows: int) -> None:
    table = Table(lambda table, length: nn.functional.embedding(torch.arange(length), table.learned[:rows]))
    assert length_limit(table, table.run) == rows


@pytest.mark.parametrize("error", [AssertionError, ValueError])
@pytest.mark.parametrize("most", [2, 5, 6, 9, 12, 20])
def test_a_network_may_refuse_what_its_tables_still_hold(most: int, error: type[Exception]) -> None:
    def read(table: Table, length: int) -> Tensor:
        if length > most:
            raise error(f"at most {most}, got {length}")
        return nn.functional.embedding(torch.arange(length), table.learned)

    table = Table(read)
    assert length_limit(table, table.run) == min(most, len(table.learned))


def test_memory_that_runs_out_is_no_limit() -> None:
    def run(length: int) -> Tensor:
        if length > 5:
            raise torch.OutOfMemoryError
        return table.learned[:length]

    table = Table(lambda table, length: table.learned[:length])
    with pytest.raises(torch.OutOfMemoryError):
        length_limit(table, run)
