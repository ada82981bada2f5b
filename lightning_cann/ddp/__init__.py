"""Data-parallel training of a plain PyTorch module over a membership that changes.

``buckets`` lays gradients out as DDP does, ``reducer`` averages them as redoable steps.  No Lightning in here.
"""

from lightning_cann.ddp.buckets import buffers_to_sync, pack, unpack
from lightning_cann.ddp.reducer import GradientReducer, StepOutcome, StepTransaction, Transport

__all__ = ["GradientReducer", "StepOutcome", "StepTransaction", "Transport", "buffers_to_sync", "pack", "unpack"]
