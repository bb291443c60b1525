"""Training on several ranks: replicas, shards, and what ranks agree on."""

from torchfast.parallel.options import ShardOptions
from torchfast.parallel.ranks import Ranks, start_ranks
from torchfast.parallel.sharding import Sharding
from torchfast.parallel.watchdog import Watchdog

__all__ = ["Ranks", "ShardOptions", "Sharding", "Watchdog", "start_ranks"]
