"""Train the byte transformer with every step clipped, and show how it goes."""

import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import gradclip
from examples.text import random_batch
from examples.transformer import ByteTransformer

BATCH = 16
LEARNING_RATE = 2e-3
REPORTS = 10


@dataclass
class Training:
    """What stays the same from step to step."""

    model: ByteTransformer
    optimizer: torch.optim.Optimizer
    text: Tensor
    generator: torch.Generator
    max_norm: float

    def backward(self) -> Tensor:
        """New gradients from a new batch; returns its loss in nats a byte."""
        batch = random_batch(self.text, BATCH, self.model.context + 1, self.generator)
        loss = self.model.loss(batch.to(self.model.position.device))
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def step(self) -> tuple[Tensor, Tensor]:
        """One step; returns the loss in nats a byte and the total norm before clipping."""
        loss = self.backward()
        total_norm = gradclip.clip_(self.model, self.max_norm)
        self.optimizer.step()
        return loss, total_norm


def begin(text: Tensor, device: torch.device, max_norm: float, seed: int = 0) -> Training:
    """A fresh model on the device, its optimizer, and a seeded choice of batches."""
    torch.manual_seed(seed)
    model = ByteTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return Training(model, optimizer, text, torch.Generator().manual_seed(seed), max_norm)


def run(training: Training, steps: int, seconds: float, console: Console) -> None:
    """Take the steps, or as many as the seconds allow, under a progress bar.

    About ten of them leave a line, with a terminal or without.
    """
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start = time.monotonic()
    n_clipped = torch.zeros((), dtype=torch.int64)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        for step in bar.track(range(1, steps + 1)):
            loss, total_norm = training.step()
            n_clipped += (total_norm > training.max_norm).cpu()
            if step == 1 or step % max(1, steps // REPORTS) == 0:
                console.print(
                    f"step {step:4d}   loss {loss:.3f} nats a byte   total norm {total_norm:.4f}"
                    f"   clipped so far {n_clipped} of {step}"
                )
            if time.monotonic() - start > seconds:
                console.print(f"stopped after {seconds:g} s and {step} steps")
                break
