"""Exactly-once data: the book of who trains on what, the epoch's order, and the loader that follows both.

``ledger.ShardLedger`` is the pure book, ``order.EpochOrder`` says which samples a batch has, and
``loader.ElasticLoader`` wraps a user's DataLoader.  Plain PyTorch: Lightning is not imported here.
"""

from __future__ import annotations

from lightning_cann.data.ledger import Piece, ShardLedger
from lightning_cann.data.loader import ElasticLoader, transferable
from lightning_cann.data.order import EpochOrder, EpochPlan, make_order, shard_indices

__all__ = [
    "ElasticLoader",
    "EpochOrder",
    "EpochPlan",
    "Piece",
    "ShardLedger",
    "make_order",
    "shard_indices",
    "transferable",
]
