"""A small pre-norm decoder over bytes, plain PyTorch: no tokenizer, no cache, no Lightning.

The shape follows GPT-2 as nanoGPT tells it: learned positions, pre-norm blocks, GELU, output tied to the embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT"]

VOCABULARY = 256  # every byte is a token


class Attention(nn.Module):
    """Causal self-attention with ``n_head`` heads."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.n_head, width // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a four times wider MLP, each on a normalised input and added back."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(n_embd)
        self.attention = Attention(n_embd, n_head, dropout)
        self.norm2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Byte tokens in, logits of the next byte out.

    Args:
        n_layer: Number of blocks.
        n_head: Attention heads in a block; must divide ``n_embd``.
        n_embd: Width.
        block_size: Longest context, in bytes.
        dropout: Probability of dropping a residual or an attention weight.
        tied: Whether output and input embedding share one matrix.

    Raises:
        ValueError: ``n_head`` does not divide ``n_embd``.
    """

    def __init__(
        self,
        *,
        n_layer: int = 5,
        n_head: int = 4,
        n_embd: int = 128,
        block_size: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f"n_embd={n_embd} cannot be cut into n_head={n_head} heads: make it a multiple of n_head")
        self.block_size = block_size
        self.tokens = nn.Embedding(VOCABULARY, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.apply(self._init)
        # GPT-2: what is added to the residual stream starts smaller, so that its variance does not grow with depth.
        for block in self.blocks:
            for layer in (block.attention.out, block.mlp[-1]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * n_layer))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens ``(batch, length)`` to float logits ``(batch, length, 256)``; ``length <= block_size``.

        Raises:
            ValueError: The text is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"{length} bytes do not fit into block_size={self.block_size}: cut the text or raise it")
        places = torch.arange(length, device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
