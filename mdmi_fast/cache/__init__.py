"""What was computed for a context, kept: mutual information and selections, in memory, on disk and in Redis.

A key is a hash of everything that an answer depends on: the library's version, the model's weights, the settings of
the policy or source with the estimator's weights, the tokens, the mask, the padding, and, where they are read, the
marginals, which differ with the tokens that `decode` suppresses. An entry carries a checksum; one that does not agree
with it is dropped and counts as a miss. No fault of a store ever fails a decode.

Worth it where an answer is expensive: probing takes hundreds of forward passes, a hit 20 to 200 microseconds. The
selection by a small estimator takes hardly longer than a hit (benchmarks/results/cache.csv), and the states of sampled
sequences do not recur: computing again is faster. So nothing is cached unless it is wrapped here.
"""

from mdmi_fast.cache.cached import CachedMI, CachedPolicy
from mdmi_fast.cache.keys import describe
from mdmi_fast.cache.stores import DiskStore, MemoryStore, RedisStore, Store
from mdmi_fast.cache.tiers import Cache, Counts

__all__ = [
    "Cache",
    "CachedMI",
    "CachedPolicy",
    "Counts",
    "DiskStore",
    "MemoryStore",
    "RedisStore",
    "Store",
    "describe",
]
