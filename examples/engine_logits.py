"""An engine with a loop of its own hands over logits [B, V], one array a position; a policy says what to write.

python examples/engine_logits.py

The engine here is a stand-in that answers in numpy, as one behind a socket or a C interface would. It computes only
positions that are still masked, so nothing of size [B, N, V] ever exists.
"""

import numpy as np
import torch

from mdmi_fast import ConfidenceBudget, TokenStats, ops
from mdmi_fast.decoding import as_tensor


class Engine:
    """Logits [B, V] of one position of a batch, float16."""

    def __init__(self, vocabulary, seed=0):
        self.random = np.random.default_rng(seed)
        self.vocabulary = vocabulary

    def logits_at(self, position, batch):
        return (3 * self.random.normal(size=(batch, self.vocabulary))).astype(np.float16)


def statistics(engine, mask):
    """TokenStats [B, N] of the positions that anybody waits for; what is not masked is never read."""
    batch, length = mask.shape
    fields = [torch.zeros(batch, length) for _ in range(5)]
    fields[3] = fields[3].long()
    for position in np.flatnonzero(mask.any(axis=0)):
        stats = ops.token_stats(as_tensor(engine.logits_at(position, batch)))
        for field, column in zip(fields, stats, strict=True):
            field[:, position] = column
    return TokenStats(*fields)


def main():
    batch, length, mask_token = 4, 16, -1
    engine, policy = Engine(vocabulary=1000), ConfidenceBudget(0.9)
    tokens = np.full((batch, length), mask_token)
    tokens[:, :3] = 7  # a prompt
    passes = 0
    while (mask := tokens == mask_token).any():
        stats = statistics(engine, mask)
        selected = np.asarray(policy.select(stats, None, mask, passes).selected)
        tokens[selected] = stats.token.numpy()[selected]
        passes += 1
    print(f"{batch} sequences of {length} filled in {passes} passes")


if __name__ == "__main__":
    main()
