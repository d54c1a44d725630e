"""A small byte-level language model: the next byte of a text from the bytes before it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Block(nn.Module):
    """Causal self-attention, then a two-layer network; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        """Mix each position with those before it; x and the result are (batch, length, width)."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """One block; x and the result are (batch, length, width)."""
        x = x + self.attend(self.attention_norm(x))
        out: Tensor = x + self.network(self.network_norm(x))
        return out


class ByteTransformer(nn.Module):
    """Bytes in, logits of the next byte out; the output layer shares the embedding's weight."""

    def __init__(
        self, width: int = 128, heads: int = 4, blocks: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.final_norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, length, 256) for text (batch, length) of int64 byte values."""
        x = self.embedding(text) + self.position[: text.shape[1]]
        x = self.final_norm(self.blocks(x))
        return F.linear(x, self.embedding.weight)

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte; text is (batch, length + 1) of int64."""
        logits = self(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
