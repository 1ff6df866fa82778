"""A plain Hugging Face loop that lets mdmi_fast choose what to unmask: one call of `policy.select` a pass.

python examples/huggingface_loop.py            a tiny BERT with random weights: nothing is downloaded
python examples/huggingface_loop.py FOLDER     a masked language model of yours, with its tokenizer
"""

import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

from mdmi_fast import EntropyBound, TopK, ops
from mdmi_fast.decoding import AttentionGraph, Memory, Step


def fill(model, tokens, attention_mask, mask_token, policy):
    """The tokens [B, N] without a mask, and the passes it took."""
    tokens, memory, passes = tokens.clone(), Memory(), 0
    while (mask := (tokens == mask_token) & attention_mask.bool()).any():
        output = model(tokens, attention_mask, output_hidden_states=True, output_attentions=True)
        logits = output.logits
        logits[..., mask_token] = -torch.inf
        stats = ops.token_stats(logits)
        step = Step(  # only what the policy asks for; a bare number will do for most
            passes,
            logits=logits,
            attention=torch.stack(output.attentions[-2:]).mean(dim=(0, 2)),
            attention_mask=attention_mask.bool(),
            memory=memory,
        )
        selected = policy.select(stats, output.hidden_states[-1], mask, step).selected
        tokens = torch.where(selected, stats.token, tokens)
        passes += 1
    return tokens, passes


@torch.no_grad()
def main(folder=None):
    torch.manual_seed(0)
    if folder is None:
        config = BertConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        model, mask_token = BertForMaskedLM._from_config(config, attn_implementation="eager"), 4
    else:
        model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager")
        mask_token = AutoTokenizer.from_pretrained(folder).mask_token_id
    model.eval()
    tokens = torch.randint(5, model.config.vocab_size, (3, 12))
    tokens[torch.rand(tokens.shape) < 0.6] = mask_token
    attention_mask = torch.ones_like(tokens)
    attention_mask[2, 9:] = 0
    for policy in (TopK(2), EntropyBound(4.0), AttentionGraph(0.09)):
        filled, passes = fill(model, tokens, attention_mask, mask_token, policy)
        print(f"{policy}: {passes} passes, {filled[0].tolist()}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:  # no such folder, or no model in it
        sys.exit(str(error))
