"""Real text that every Python brings along: the language's own reference, by topics."""

import pydoc_data.topics

import torch
from torch import Tensor


def language_reference() -> Tensor:
    """The texts behind `help("topics")` in one int64 vector of byte values (about 500,000)."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def random_batch(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Stretches of the text, (batch, length), each from a random place."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    return text[starts + torch.arange(length)]
