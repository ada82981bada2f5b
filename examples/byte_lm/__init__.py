"""A byte-level language model that learns to write Python, in four short files.

``model.py``      the decoder, plain PyTorch
``module.py``     its LightningModule: losses, optimizer, schedule
``data.py``       the text: the Python standard library on this machine, nothing to download
``callbacks.py``  what `cann-train demo` needs to prove its claims

Run it from the root of the repository::

    cann-train fit --config configs/byte_lm.yaml
"""

from examples.byte_lm.callbacks import StepClock, WriteResult
from examples.byte_lm.data import ByteWindows, StdlibBytes
from examples.byte_lm.model import GPT
from examples.byte_lm.module import ByteLM

__all__ = ["GPT", "ByteLM", "ByteWindows", "StdlibBytes", "StepClock", "WriteResult"]
