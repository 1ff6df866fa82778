"""Masked LMs of transformers behind one interface: tiny random networks of six architectures, and diffusion models."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mdmi_fast import (
    EntropyBound,
    MaskedModel,
    MIBudget,
    MIThreshold,
    PairwiseMIEstimator,
    Probing,
    Random,
    Sequential,
    TopK,
    decode,
    label_mi,
    load_model,
    ops,
)
from mdmi_fast.decoding import AttentionGraph, Policy, Stability
from mdmi_fast.models.huggingface import HuggingFaceModel
from mdmi_fast.models.identity import identity
from mdmi_fast.tasks.protein.letters import LetterTokenizer

V, MASK, PAD, START, END = 30, 4, 0, 2, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": V}
SPECIAL = {"pad_token_id": PAD, "mask_token_id": MASK, "cls_token_id": START, "sep_token_id": END}
CONFIGURATIONS = {
    "bert": lambda: transformers.BertConfig(**SIZES, **SPECIAL),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, **SPECIAL, bos_token_id=START, eos_token_id=END),
    "esm": lambda: transformers.EsmConfig(**SIZES, **SPECIAL, position_embedding_type="rotary", token_dropout=True),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SIZES, **SPECIAL, bos_token_id=START, eos_token_id=END, local_attention=4
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=V, dim=32, n_layers=3, n_heads=4, hidden_dim=48, **SPECIAL
    ),
    "esmc": lambda: transformers.EsmcConfig(**SIZES, **SPECIAL, bos_token_id=START, eos_token_id=END),
}


def tiny(architecture: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForMaskedLM.from_config(CONFIGURATIONS[architecture]()).eval()


@pytest.fixture(params=list(CONFIGURATIONS))
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(architecture: str) -> HuggingFaceModel:
    return HuggingFaceModel(tiny(architecture))


def sentences(count: int, length: int) -> Tensor:
    """Sequences between their two special tokens, about half of it masked."""
    tokens = torch.randint(5, V, (count, length))
    tokens[torch.rand(count, length) < 0.5] = MASK
    tokens[:, 0], tokens[:, -1] = START, END
    return tokens


def test_is_a_masked_model_whose_shapes_and_never_decoded_tokens_are_right(model: HuggingFaceModel) -> None:
    assert isinstance(model, MaskedModel)
    assert (model.vocab_size, model.hidden_size, model.mask_token_id) == (V, 32, MASK)
    logits, hidden = model(sentences(3, 9))
    assert logits.shape == (3, 9, V)
    assert hidden.shape == (3, 9, 32)
    impossible = logits == -torch.inf
    assert impossible[..., [PAD, START, END, MASK]].all()
    assert impossible.sum() == 3 * 9 * 4
    assert hidden.isfinite().all()


def test_logits_are_those_of_the_network(model: HuggingFaceModel) -> None:
    tokens = sentences(3, 12)
    with torch.no_grad():
        expected = model.network(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    # The mask of ones may choose another attention kernel, which adds in another order.
    assert torch.allclose(model(tokens).logits[..., 5:], expected[..., 5:], atol=1e-5)


def test_hidden_and_logits_agree_through_the_head(model: HuggingFaceModel) -> None:
    """The last hidden state is what the network's own head reads."""
    logits, hidden = model(sentences(2, 8))
    heads = [getattr(model.network, name, None) for name in ("cls", "lm_head", "vocab_transform", "head")]
    head = next(head for head in heads if head is not None)
    with torch.no_grad():
        read = head(hidden)
        if head is getattr(model.network, "vocab_transform", None):
            network: Any = model.network
            read = network.vocab_projector(network.vocab_layer_norm(network.activation(read)))
        elif head is getattr(model.network, "head", None):
            read = model.network.decoder(read)  # type: ignore[operator]
    assert torch.allclose(read[..., 5:], logits[..., 5:], atol=1e-5)


def test_a_sequence_alone_in_any_batch_and_padded_on_either_side_gives_the_same_bits(model: HuggingFaceModel) -> None:
    for length in (2, 9):
        tokens = torch.randint(5, V, (4, length))
        tokens[:, 1] = MASK
        alone = [model(row[None]) for row in tokens]
        for field in (0, 1):
            expected = torch.cat([output[field] for output in alone])
            for size in (2, 4):
                together = torch.cat([model(part)[field] for part in tokens.split(size)])
                assert torch.equal(together, expected)
            for left, right in ((3, 0), (0, 5), (2, 2)):
                padded = nn.functional.pad(tokens, (left, right), value=PAD)
                visible = nn.functional.pad(torch.ones_like(tokens, dtype=torch.bool), (left, right), value=False)
                for output in (model(padded, visible)[field], model(padded)[field]):
                    assert torch.equal(output[:, left : left + length], expected)
                    assert (output[:, :left] == 0).all()
                    assert (output[:, left + length :] == 0).all()


def test_bits_do_not_depend_on_the_batch_with_two_threads(two_threads: None) -> None:
    model = HuggingFaceModel(tiny("bert"))
    tokens = sentences(4, 7)
    assert torch.equal(model(tokens).logits, torch.cat([model(row[None]).logits for row in tokens]))


def test_what_stands_at_padding_does_not_matter(model: HuggingFaceModel) -> None:
    tokens = nn.functional.pad(sentences(2, 6), (1, 2), value=7)
    visible = torch.zeros(2, 9, dtype=torch.bool)
    visible[:, 1:7] = True
    other = tokens.masked_fill(~visible, MASK)
    for a, b in zip(model(tokens, visible), model(other, visible), strict=True):
        assert torch.equal(a, b)


def test_sequences_of_several_lengths_go_back_to_their_places(model: HuggingFaceModel) -> None:
    tokens = sentences(5, 10)
    visible = torch.arange(10) < torch.tensor([10, 4, 7, 4, 10])[:, None]
    logits = model(tokens, visible).logits
    for row in range(5):
        length = int(visible[row].sum())
        assert torch.equal(logits[row, :length], model(tokens[row : row + 1, :length]).logits[0])
    assert (logits[~visible] == 0).all()


def test_padding_to_one_length_is_near_and_can_be_asked_for(architecture: str) -> None:
    exact, padded = (HuggingFaceModel(tiny(architecture), batch_invariant=value) for value in (True, False))
    tokens = sentences(4, 12)
    visible = torch.arange(12) >= torch.tensor([0, 3, 5, 0])[:, None]
    a, b = exact(tokens, visible), padded(tokens, visible)
    assert torch.allclose(a.hidden, b.hidden, atol=1e-5)
    assert torch.allclose(a.logits[..., 5:], b.logits[..., 5:], atol=1e-5)


def test_statistics_without_logits_are_those_of_the_logits(model: HuggingFaceModel) -> None:
    assert model.head is not None
    tokens = nn.functional.pad(sentences(4, 9), (2, 1), value=PAD)
    logits, hidden = model(tokens)
    expected = ops.token_stats(logits)
    stats, state = model.token_stats(tokens)
    inside = tokens != PAD
    assert torch.equal(state, hidden)
    assert torch.equal(stats.token[inside], expected.token[inside])
    for name in ("entropy", "logsumexp", "confidence", "margin"):
        assert torch.allclose(getattr(stats, name)[inside], getattr(expected, name)[inside], atol=1e-5)


def test_statistics_never_hold_the_logits(largest_allocation: Any) -> None:
    configuration = transformers.BertConfig(**{**SIZES, "vocab_size": 60_000}, mask_token_id=MASK)
    network = transformers.BertForMaskedLM(configuration).eval()
    model = HuggingFaceModel(network)
    tokens = torch.full((8, 64), MASK)
    inputs = [tokens, *network.parameters()]
    assert largest_allocation(lambda *_: model.token_stats(tokens), *inputs) < tokens.numel() * 60_000 * 4 / 8
    assert largest_allocation(lambda *_: model(tokens), *inputs) >= tokens.numel() * 60_000 * 4


def test_a_head_that_cannot_be_found_costs_memory_only() -> None:
    network = tiny("bert")
    network.get_output_embeddings = lambda: None  # type: ignore[method-assign, assignment]
    model = HuggingFaceModel(network)
    assert model.head is None
    tokens = sentences(2, 6)
    expected = ops.token_stats(model(tokens).logits)
    assert torch.equal(model.token_stats(tokens).stats.entropy, expected.entropy)


def test_a_network_that_reads_the_weights_of_its_head_itself_is_loaded() -> None:
    torch.manual_seed(0)
    config = transformers.MobileBertConfig(
        **SIZES, **SPECIAL, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16
    )
    model = HuggingFaceModel(transformers.AutoModelForMaskedLM.from_config(config).eval())
    tokens = sentences(2, 6)
    logits, hidden = model(tokens)
    assert model.head is None
    assert torch.equal(model.token_stats(tokens).stats.entropy, ops.token_stats(logits).entropy)
    assert torch.equal(model.token_stats(tokens).hidden, hidden)


def test_chosen_layers_are_joined(architecture: str) -> None:
    network = tiny(architecture)
    tokens = sentences(2, 7)
    last, first, both = (HuggingFaceModel(network, layers=layers) for layers in (-1, 1, (1, -1)))
    assert both.hidden_size == 64
    assert torch.equal(both(tokens).hidden, torch.cat([first(tokens).hidden, last(tokens).hidden], dim=-1))
    assert not torch.equal(first(tokens).hidden, last(tokens).hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_stay_near(architecture: str, dtype: torch.dtype) -> None:
    tokens = sentences(2, 8)
    expected = HuggingFaceModel(tiny(architecture))(tokens)
    model = HuggingFaceModel(tiny(architecture).to(dtype))
    output = model(tokens)
    assert output.logits.dtype == output.hidden.dtype == dtype
    # bf16 carries 8 bits; three layers of states of size 1 add up a few of its steps.
    assert torch.allclose(output.hidden.float(), expected.hidden, atol=1e-4 if dtype == torch.float64 else 0.15)


def test_decoding_fills_every_mask_with_tokens_that_may_be_decoded(architecture: str) -> None:
    model = HuggingFaceModel(tiny(architecture), forbidden_tokens=range(5))
    tokens = sentences(2, 9)
    result = decode(model, tokens, TopK(2), temperature=1.0, generator=torch.Generator().manual_seed(0))
    assert (result.tokens != MASK).all()
    filled = result.tokens[tokens == MASK]
    assert (filled >= 5).all()


def test_attention_graphs_decode_a_model_that_shows_its_attention(tmp_path: Path) -> None:
    tiny("bert").save_pretrained(tmp_path)
    model: Any = load_model(f"hf:{tmp_path}", attention="eager")
    tokens = sentences(4, 9)
    tokens[:, 1:8:2] = MASK
    lengths = torch.tensor([9, 7, 9, 4])
    visible = torch.arange(9) < lengths[:, None]
    output = model(tokens, visible)
    assert output.attention.shape == (4, 9, 9)
    for row, length in enumerate(lengths.tolist()):
        late = model.attentions(tokens[row : row + 1, :length])[1:]  # of three layers
        torch.testing.assert_close(output.attention[row, :length, :length], late.mean(dim=(0, 2))[0])
        assert not output.attention[row, length:].any()
        assert not output.attention[row, :, length:].any()
    right = decode(model, tokens, AttentionGraph(0.13), attention_mask=visible, trace=True)
    assert int(right.passes.min()) == 1 < int(right.passes.max())  # some positions attend to each other, some do not
    turned = torch.stack([row.roll(9 - length) for row, length in zip(tokens, lengths.tolist(), strict=True)])
    left = decode(model, turned, AttentionGraph(0.13), attention_mask=visible.flip(1))
    for row, length in enumerate(lengths.tolist()):
        alone = decode(model, tokens[row : row + 1, :length], AttentionGraph(0.13))
        assert alone.tokens[0].equal(right.tokens[row, :length])
        assert alone.tokens[0].equal(left.tokens[row, 9 - length :])
        assert alone.passes[0] == right.passes[row] == left.passes[row]
    with pytest.raises(ValueError, match=r'AttentionGraph: step must be .* loaded with attention="eager"'):
        decode(load_model(f"hf:{tmp_path}"), tokens, AttentionGraph(0.13))


def test_greedy_decoding_needs_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = HuggingFaceModel(tiny("bert")), sentences(5, 12)
    estimator = PairwiseMIEstimator(model.hidden_size, layers=(8,)).eval()
    rules = (Sequential(), EntropyBound(4.0), MIBudget(estimator, 4.0), MIThreshold(estimator, 0.7))
    stats_only: list[int] = []
    plain = HuggingFaceModel.token_stats
    monkeypatch.setattr(HuggingFaceModel, "token_stats", lambda *given: stats_only.append(1) or plain(*given))
    for policy in rules:
        found = decode(model, tokens, policy, verify=True)
        assert stats_only
        stats_only.clear()
        # Whoever wraps a policy may read anything: logits are made as ever.
        expected = decode(model, tokens, Wrapped(policy), verify=True)
        assert found.tokens.equal(expected.tokens)
        assert found.passes.equal(expected.passes)
    for more in ({"temperature": 1.0}, {"suppressed": [7]}, {"allowed": torch.ones(V, dtype=torch.bool)}):
        decode(model, tokens, TopK(3), **more)
    decode(model, tokens, Stability(0.1))
    assert not stats_only
    monkeypatch.setattr(HuggingFaceModel, "forward", lambda *given: pytest.fail("the network made logits"))
    decode(model, tokens, TopK(3))


class Wrapped:
    """A policy of somebody else's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def select(self, stats: ops.TokenStats, hidden: Tensor, mask: Tensor, step: int) -> ops.Selection:
        return self.policy.select(stats, hidden, mask, step)


def test_attentions_can_be_had_of_eager_attention(tmp_path: Path) -> None:
    tiny("bert").save_pretrained(tmp_path)  # type: ignore[operator]
    tokens = sentences(2, 6)
    model: Any = load_model(f"hf:{tmp_path}", attention="eager")
    weights = model.attentions(tokens)
    assert weights.shape == (3, 2, 4, 6, 6)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 2, 4, 6))
    fused: Any = load_model(f"hf:{tmp_path}", attention="sdpa")
    with pytest.raises(ValueError, match='attention="eager"'):
        fused.attentions(tokens)


def test_a_saved_folder_loads_in_one_line_with_its_tokenizer(architecture: str, tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrst"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    network: Any = tiny(architecture)
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model: Any = load_model(f"hf:{tmp_path}")
    assert model.mask_token_id == MASK
    # Five special tokens, and five rows of the head that belong to no token.
    assert model.forbidden_tokens.tolist() == [0, 1, 2, 3, 4, *range(25, 30)]
    assert model.tokenizer.decode(model.tokenizer("a b").input_ids) == "[CLS] a b [SEP]"
    assert not any(parameter.requires_grad for parameter in model.parameters())
    bare: Any = load_model(f"hf:{tmp_path}", tokenizer=None, dtype=torch.bfloat16)
    assert bare.tokenizer is None
    assert bare(sentences(1, 5)).logits.dtype == torch.bfloat16


def test_a_folder_without_a_tokenizer_goes_by_its_configuration(architecture: str, tmp_path: Path) -> None:
    network: Any = tiny(architecture)
    network.save_pretrained(tmp_path)
    model: Any = load_model(f"hf:{tmp_path}")
    assert model.tokenizer is None
    assert model.mask_token_id == MASK
    assert model.forbidden_tokens.tolist() == [PAD, START, END, MASK]


def test_special_tokens_of_a_configuration_may_be_several_or_no_token_at_all() -> None:
    network = tiny("bert")
    network.config.update({"eos_token_id": [END, 7], "pad_token_id": -1})  # type: ignore[operator, union-attr]
    model = HuggingFaceModel(network)
    assert model.forbidden_tokens.tolist() == [START, END, MASK, 7]
    assert (model(sentences(1, 6)).logits[..., -1] > -torch.inf).all()


def test_a_folder_named_for_its_tokenizer_must_hold_one(tmp_path: Path) -> None:
    tiny("bert").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(OSError, match=rf"hf: folder {tmp_path} holds no tokenizer"):
        load_model(f"hf:{tmp_path}?tokenizer={tmp_path}")


def test_the_option_compile_reaches_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(options))
    tiny("bert").save_pretrained(tmp_path)  # type: ignore[operator]
    load_model(f"hf:{tmp_path}", compile=True)
    assert asked == [{"dynamic": True}]


REMOTE = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TinyConfig(PretrainedConfig):
    model_type = "{kind}"


class TinyModel(PreTrainedModel):
    """Answers like a masked diffusion model: bidirectional, output with logits and hidden states, extra fields."""
    config_class = TinyConfig
    _tied_weights_keys = {{}}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, 16)
        self.mix = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False, **unused):
        assert attention_mask is None, "sequences of one length need no mask"
        x = self.embed(input_ids) + torch.arange(input_ids.shape[1]).unsqueeze(-1) / 10
        y = torch.tanh(self.mix(x) + x.mean(dim=1, keepdim=True))
        return CausalLMOutputWithPast(
            logits=self.lm_head(y), hidden_states=(x, y) if output_hidden_states else None, past_key_values=None
        )
'''


@pytest.fixture(params=["llada", "Dream"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A folder with a tiny diffusion model and the code that it comes with."""
    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [str(modules), *sys.path])
    folder = tmp_path / f"tiny_{request.param.lower()}"
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(textwrap.dedent(REMOTE.format(kind=request.param)))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": request.param,
                "vocab_size": V,
                "mask_token_id": MASK,
                "pad_token_id": PAD,
                "auto_map": {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"},
                "architectures": ["TinyModel"],
            }
        )
    )
    torch.manual_seed(0)
    weights = {"embed.weight": torch.randn(V, 16), "mix.weight": torch.randn(16, 16), "mix.bias": torch.randn(16)}
    weights["lm_head.weight"] = torch.randn(V, 16)
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return request.param, folder


def test_diffusion_models_load_with_their_code_and_are_shifted_where_they_have_to(remote: tuple[str, Path]) -> None:
    kind, folder = remote
    model: Any = load_model(f"hf:{folder}", trust_remote_code=True)
    tokens = nn.functional.pad(sentences(3, 7), (2, 0), value=PAD)
    logits, hidden = model(tokens)
    with torch.no_grad():
        raw = model.network(tokens[:, 2:], output_hidden_states=True)
    logits, hidden = logits[:, 2:], hidden[:, 2:]
    behind = 1 if kind == "Dream" else 0
    assert torch.equal(logits[:, behind:, 5:], raw.logits[:, : 7 - behind, 5:])
    assert torch.equal(hidden[:, behind:], raw.hidden_states[-1][:, : 7 - behind])
    assert torch.equal(logits[:, 0, 5:], raw.logits[:, 0, 5:])
    stats = model.token_stats(tokens).stats
    assert torch.allclose(stats.entropy[:, 2:], ops.token_stats(logits).entropy, atol=1e-5)


def test_code_of_a_model_is_not_run_unless_asked(remote: tuple[str, Path]) -> None:
    _, folder = remote
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(f"hf:{folder}")


def test_no_mask_token_says_what_to_do() -> None:
    configuration = CONFIGURATIONS["bert"]()
    configuration.mask_token_id = None
    network = transformers.BertForMaskedLM(configuration).eval()
    with pytest.raises(ValueError, match="configuration knows no mask token; say which one it is with mask_token_id="):
        HuggingFaceModel(network)
    tokenizer = type("Tokenizer", (), {"mask_token_id": None})()
    with pytest.raises(ValueError, match="the tokenizer knows no mask token"):
        HuggingFaceModel(network, tokenizer)
    assert HuggingFaceModel(network, mask_token_id=7).mask_token_id == 7
    with pytest.raises(ValueError, match=rf"mask_token_id must lie in 0\.\.{V - 1}, got {V}"):
        HuggingFaceModel(network, mask_token_id=V)


@pytest.mark.parametrize("layers", [4, -5, (), (0, 9)])
def test_unknown_layers_name_those_that_exist(layers: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"layers must lie in -4\.\.3"):
        HuggingFaceModel(tiny("bert"), layers=layers)


def test_a_network_without_hidden_states_or_logits_says_what_is_missing() -> None:
    class Silent(nn.Module):
        config = CONFIGURATIONS["bert"]()

        def __init__(self, **fields: Tensor) -> None:
            super().__init__()
            self.fields = fields
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, **_: Any) -> Any:
            return type("Output", (), self.fields)

    with pytest.raises(ValueError, match="gives no hidden_states"):
        HuggingFaceModel(Silent(logits=torch.zeros(1, 3, V)))
    with pytest.raises(ValueError, match="masked-LM head"):
        HuggingFaceModel(Silent(last_hidden_state=torch.zeros(1, 3, V)))


def test_bad_inputs_are_named() -> None:
    model = HuggingFaceModel(tiny("roberta"))
    assert model.max_length == 512 - PAD - 1
    good = sentences(2, 6)
    with pytest.raises(ValueError, match=r"tokens must be \[B, N\] int64, got shape \(2, 6\) torch.int32"):
        model(good.int())
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.29, got 2\.\.30"):
        model(torch.full((1, 2), 30).index_fill(1, torch.tensor([0]), 2))
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 6\) bool"):
        model(good, torch.ones(2, 5, dtype=torch.bool))
    gap = torch.ones(2, 6, dtype=torch.bool)
    gap[1, 3] = False
    with pytest.raises(ValueError, match="in the middle of sequence 1, at position 3"):
        model(good, gap)
    with pytest.raises(ValueError, match="at most 511 tokens, got 512"):
        model(torch.full((1, 512), 7))


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'mdmi-fast\[hf\]'"):
        load_model("hf:anything")


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "no/such/folder", "~/no/such"])
def test_a_folder_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"hf: there is no folder {name}"):
        load_model(f"hf:{name}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: cut(second_shard(folder)), r"model-00002-of-.*\.safetensors is damaged$"),
        (lambda folder: second_shard(folder).unlink(), r"model-00002-of-.*\.safetensors.*missing or damaged$"),
        (lambda folder: cut(folder / "model.safetensors.index.json"), "missing or damaged$"),
        (lambda folder: cut(folder / "config.json"), r"config\.json' is not a valid JSON file"),
        (lambda folder: (folder / "config.json").write_text("{}"), "Should have a `model_type`"),
        (lambda folder: resize(folder / "config.json"), "missing or damaged$"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "missing or damaged$"),
        (lambda folder: (folder / "vocab.txt").write_bytes(b"\xff\xfe"), "missing or damaged$"),
    ],
)
def test_a_folder_with_a_damaged_or_missing_file_is_named_with_the_reason(
    tmp_path: Path, change: Any, reason: str
) -> None:
    network: Any = tiny("bert")
    network.save_pretrained(tmp_path, max_shard_size="30KB")
    load_model(f"hf:{tmp_path}")
    change(tmp_path)
    with pytest.raises((OSError, ValueError), match=f"^hf: {tmp_path} cannot be loaded: .*{reason}") as error:
        load_model(f"hf:{tmp_path}")
    assert "copy the model's folder" not in str(error.value)  # it is here already


def second_shard(folder: Path) -> Path:
    return next(folder.glob("model-00002-of-*.safetensors"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def resize(config: Path) -> None:
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))


def test_a_name_that_cannot_be_fetched_says_what_works_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **options: Any) -> None:
        raise OSError("We couldn't connect.\nMore of it.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(
        OSError, match=r"hf: some/name cannot be loaded: We couldn't connect\. Without .* say hf:FOLDER$"
    ):
        load_model("hf:some/name")


def test_a_model_that_is_no_masked_lm_is_refused(tmp_path: Path) -> None:
    transformers.GPT2Config(vocab_size=V, bos_token_id=1, eos_token_id=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a model of type 'gpt2', of which no masked LM is known"):
        load_model(f"hf:{tmp_path}")


def test_weights_that_a_folder_lacks_are_named(tmp_path: Path) -> None:
    network: Any = tiny("bert")
    network.bert.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"holds no weights for cls\.predictions\.bias, .* this is no trained masked LM"
    ):
        load_model(f"hf:{tmp_path}")


def test_running_a_batch_at_once_makes_no_other_model() -> None:
    network = tiny("bert")
    exact, fast = (HuggingFaceModel(network, batch_invariant=value) for value in (True, False))
    assert identity(exact) == identity(fast)
    assert (exact.batch_invariant, fast.batch_invariant) == (True, False)


def answering(token: int, architecture: str = "bert", **options: Any) -> HuggingFaceModel:
    """A model that would write one token everywhere, if it may."""
    network: Any = tiny(architecture)
    with torch.no_grad():
        network.cls.predictions.bias[token] = 50.0
    return HuggingFaceModel(network, **options)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Sequential(), {}),
        (TopK(2), {"temperature": 1.0}),
        (TopK(2), {"verify": True}),
        (MIBudget(Probing(), 0.1), {}),
        (Stability(0.1), {"temperature": 0.7}),
    ],
)
def test_a_stop_token_that_the_model_never_writes_by_itself_ends_a_sequence(policy: Policy, options: Any) -> None:
    model = answering(END)
    assert END in model.forbidden_tokens
    tokens = torch.tensor([[START, 5, MASK, MASK, MASK, MASK]])
    assert END not in decode(model, tokens, policy, **options).tokens
    result = decode(model, tokens, policy, stop_tokens=[END], trace=True, **options)
    assert result.tokens.tolist() == [[START, 5, END, END, END, END]]
    assert END in model.forbidden_tokens  # what the caller holds is as it was
    assert model(tokens).logits[..., END].eq(-torch.inf).all()


def test_a_model_that_permits_tokens_is_the_same_network(model: HuggingFaceModel) -> None:
    before, tokens = identity(model), sentences(2, 7)
    with torch.no_grad():
        raw = torch.cat([model.network(input_ids=row[None]).logits for row in tokens])
    permitting = model.permitting([END, 9])
    assert permitting.network is model.network
    assert permitting.forbidden_tokens.tolist() == [token for token in model.forbidden_tokens.tolist() if token != END]
    assert permitting(tokens).logits[..., END].equal(raw[..., END])
    assert permitting.token_stats(tokens).stats.entropy.allclose(ops.token_stats(permitting(tokens).logits).entropy)
    assert identity(model) == before
    with pytest.raises(ValueError, match=f"tokens must be others than the mask token {MASK}, got"):
        model.permitting([MASK])
    with pytest.raises(ValueError, match=rf"tokens must be tokens in 0\.\.{V - 1}, got {V}"):
        model.permitting([V])


def test_numbers_between_the_tokens_stand_for_nothing(tmp_path: Path) -> None:
    """Where a line of a vocabulary stands twice, its first number names no token, and the last token is beyond the count."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "twice", *"abcdefg", "twice", *"hijklmno", "last"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    dead, last = words.index("twice"), len(words) - 1
    assert tokenizer.convert_tokens_to_ids("last") == last == len(tokenizer)
    model = HuggingFaceModel(tiny("bert"), tokenizer)
    assert model.forbidden_tokens.tolist() == [0, 1, 2, 3, 4, dead, *range(len(words), V)]
    letters = LetterTokenizer("ACD", first=5, mask=12, pad=0)
    assert HuggingFaceModel(tiny("bert"), letters).forbidden_tokens.tolist() == [0, 1, 2, 3, 4, *range(8, V)]


def test_a_tokenizer_that_only_counts_its_tokens_is_believed() -> None:
    class Counting:
        mask_token_id, pad_token_id, all_special_ids = MASK, PAD, (PAD, MASK)

        def __len__(self) -> int:
            return 25

    assert HuggingFaceModel(tiny("bert"), Counting()).forbidden_tokens.tolist() == [PAD, MASK, *range(25, V)]


def ending_in_its_pad_token() -> HuggingFaceModel:
    configuration = CONFIGURATIONS["bert"]()
    configuration.eos_token_id = PAD
    torch.manual_seed(0)
    network = transformers.BertForMaskedLM(configuration).eval()
    with torch.no_grad():
        network.cls.predictions.bias[PAD] = 3.0
    return HuggingFaceModel(network, forbidden_tokens=[MASK])


def test_a_pad_token_that_ends_texts_too_is_padding_only_where_a_mask_says_so() -> None:
    model = ending_in_its_pad_token()
    tokens = torch.tensor([[START, 5, MASK, MASK, 7, PAD]])
    with torch.no_grad():
        raw = model.network(input_ids=tokens).logits
    assert model(tokens).logits[..., 5:].equal(raw[..., 5:])
    visible = torch.tensor([[True] * 5 + [False]])
    assert model(tokens, visible).logits[:, :5].equal(model(tokens[:, :5]).logits)
    assert not model(tokens, visible).logits[:, :5].equal(model(tokens).logits[:, :5])


def test_a_word_that_only_a_configuration_takes_for_padding_is_text() -> None:
    """Configurations have a pad token that nobody chose, 0 for BERT."""

    class Letters:
        mask_token_id, pad_token_id, all_special_ids = MASK, None, (MASK,)

        def get_vocab(self) -> dict[str, int]:
            return {chr(97 + token): token for token in range(20)}

    tokens = torch.tensor([[START, 5, MASK, MASK, 7, PAD]])
    model = HuggingFaceModel(tiny("bert"), Letters())
    assert model.network.config.pad_token_id == PAD  # type: ignore[union-attr]
    assert model.visible(tokens).all()
    assert not HuggingFaceModel(tiny("bert"), forbidden_tokens=[MASK]).visible(tokens).all()


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
@pytest.mark.parametrize("options", [{"samples": 3}, {"samples": 2, "form": "kl"}, {"batch_size": 2}])
def test_padding_changes_no_label_on_either_side(architecture: str, options: dict[str, Any]) -> None:
    network = tiny(architecture)
    with torch.no_grad():
        for weights in network.parameters():
            weights.mul_(8.0)  # so that labels are no matter of rounding
    model = HuggingFaceModel(network, mask_token_id=MASK)
    pad, own = model.pad_token_id, torch.tensor([[START, 9, MASK, 8, MASK, MASK, 11]])
    assert pad is not None
    expected = label_mi(model, own, **options).mi
    for left, right in ((3, 0), (0, 4), (5, 2)):
        padded = torch.nn.functional.pad(own, (left, right), value=pad)
        assert label_mi(model, padded, **options).mi[:, left : left + 7, left : left + 7].equal(expected)


def test_a_model_may_write_its_pad_token_while_it_decodes_or_is_probed() -> None:
    tokens = torch.tensor([[START, 5, MASK, MASK, MASK, MASK, 7, PAD]])
    plain = HuggingFaceModel(tiny("bert"), forbidden_tokens=[MASK])  # here the last token is padding
    with torch.no_grad():
        plain.network.cls.predictions.bias[PAD] = 3.0  # type: ignore[union-attr, index]
    for model, length in ((ending_in_its_pad_token(), 8), (plain, 7)):
        visible = torch.arange(8).unsqueeze(0) < length
        written = decode(model, tokens, TopK(1), temperature=1.0, seeds=torch.tensor([3]))
        assert PAD in written.tokens[0, 2:6]
        told = decode(model, tokens, TopK(1), temperature=1.0, seeds=torch.tensor([3]), attention_mask=visible)
        assert written.tokens.equal(told.tokens)
        assert label_mi(model, tokens).mi.equal(label_mi(model, tokens, attention_mask=visible).mi)
        assert label_mi(model, tokens).mi[0, 2:6, 2:6].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_that_a_model_knows_changes_no_draw_on_either_side(temperature: float, architecture: str) -> None:
    model = HuggingFaceModel(tiny(architecture))
    tokens = sentences(3, 9)
    for policy in (TopK(2), Random(2), EntropyBound(2.0)):
        alone = decode(model, tokens, policy, temperature=temperature, seeds=torch.arange(3)).tokens
        for left, right in ((4, 0), (0, 4), (1, 2)):
            padded = nn.functional.pad(tokens, (left, right), value=PAD)
            found = decode(model, padded, policy, temperature=temperature, seeds=torch.arange(3)).tokens
            assert found[:, left : left + 9].equal(alone)
            assert (found[:, :left] == PAD).all()
            assert (found[:, left + 9 :] == PAD).all()


@pytest.mark.parametrize("kind", ["fnet", "convbert"])
def test_a_network_that_mixes_padding_in_runs_sequences_of_one_length_together(kind: str) -> None:
    torch.manual_seed(0)
    options = {**SIZES, "embedding_size": 32} if kind == "convbert" else SIZES
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**options, **SPECIAL)
    network: Any = transformers.AutoModelForMaskedLM.from_config(config).eval()
    exact, together = (HuggingFaceModel(network, batch_invariant=value) for value in (True, False))
    tokens = sentences(5, 12)
    visible = torch.arange(12) < torch.tensor([12, 5, 9, 5, 12])[:, None]
    found = together(tokens, visible)
    sizes: list[torch.Size] = []
    network.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    assert together(tokens, visible).hidden.equal(found.hidden)
    assert sorted(sizes) == [(1, 9), (2, 5), (2, 12)]
    expected = exact(tokens, visible)
    assert found.hidden.allclose(expected.hidden, atol=1e-5)  # what the batch changes, as documented
    assert found.logits[..., 5:].allclose(expected.logits[..., 5:], atol=1e-5)


def test_a_pad_token_that_is_none_fills_no_batch() -> None:
    network = tiny("bert")
    network.config.pad_token_id = -1  # type: ignore[union-attr]
    model, tokens = HuggingFaceModel(network, batch_invariant=False), sentences(2, 6)
    visible = torch.arange(6) < torch.tensor([6, 4])[:, None]
    assert model(tokens, visible).logits[1, :4, 5:].allclose(model(tokens[1:, :4]).logits[0, :, 5:], atol=1e-5)


def test_a_network_in_training_mode_is_read_without_its_dropout(tmp_path: Path) -> None:
    config = CONFIGURATIONS["bert"]()
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.5
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    network = transformers.BertForMaskedLM(config)
    tokens = sentences(2, 9)
    network.train()
    model = HuggingFaceModel(network)
    assert model.head is not None  # found in spite of it
    found = model(tokens), model.token_stats(tokens), model.attentions(tokens)
    drawn = decode(model, tokens, TopK(2), temperature=1.0, seeds=torch.arange(2)).tokens
    assert network.training
    assert network.bert.embeddings.dropout.training
    network.eval()
    assert found[0].logits.equal(model(tokens).logits)
    assert found[1].stats.entropy.equal(model.token_stats(tokens).stats.entropy)
    assert found[2].equal(model.attentions(tokens))
    assert drawn.equal(decode(model, tokens, TopK(2), temperature=1.0, seeds=torch.arange(2)).tokens)


def test_a_network_that_was_never_loaded_is_refused() -> None:
    with torch.device("meta"):
        network = transformers.BertForMaskedLM(CONFIGURATIONS["bert"]())
    with pytest.raises(ValueError, match=r"weights must be loaded, got bert\.embeddings\..* on the device meta"):
        HuggingFaceModel(network)
    model = HuggingFaceModel(tiny("bert"))
    with pytest.raises(ValueError, match=r"tokens must hold numbers, got shape \(2, 5\) int64 on meta"):
        model(sentences(2, 5).to("meta"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask_token_id": True}, TypeError, r"mask_token_id must be an int, got True \(bool\)"),
        ({"mask_token_id": 4.0}, TypeError, r"mask_token_id must be an int, got 4\.0"),
        ({"mask_token_id": -1}, ValueError, "mask_token_id must be at least 0, got -1"),
        ({"forbidden_tokens": [400]}, ValueError, r"forbidden_tokens must be tokens in 0\.\.29, got 400"),
        ({"forbidden_tokens": [-1]}, ValueError, r"forbidden_tokens must be tokens in 0\.\.29, got -1"),
        ({"forbidden_tokens": [1.5]}, TypeError, "forbidden_tokens must be a sequence of tokens, which are integers"),
        ({"forbidden_tokens": [True]}, TypeError, "forbidden_tokens must be a sequence of tokens, which are integers"),
        (
            {"forbidden_tokens": 5},
            TypeError,
            "forbidden_tokens must be a sequence of tokens, which are integers, got 5",
        ),
        ({"layers": True}, TypeError, "layers must be a number or several, got True"),
        ({"layers": [1.0]}, TypeError, r"layers must be a number or several, got 1\.0"),
        ({"layers": "1"}, TypeError, "layers must be a number or several, got '1'"),
        ({"shift": 1}, TypeError, "shift must be True or False, got 1"),
        ({"batch_invariant": "false"}, TypeError, "batch_invariant must be True or False, got 'false'"),
        ({"attention": None}, TypeError, "attention must be True or False, got None"),
    ],
)
def test_arguments_of_a_model_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HuggingFaceModel(tiny("bert"), **options)


def test_tokens_that_are_no_tensor_are_named() -> None:
    model = HuggingFaceModel(tiny("bert"))
    with pytest.raises(TypeError, match="HuggingFaceModel: tokens must be a tensor, got list"):
        model([[2, 4, 3]])
    with pytest.raises(TypeError, match="HuggingFaceModel: attention_mask must be a tensor, got list"):
        model(sentences(1, 3), [[True] * 3])
