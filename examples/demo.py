"""Train a small transformer with exact clipping, then compare its gradients' norm three ways."""

import argparse

import torch
from rich.console import Console

from examples import compare, train
from examples.text import language_reference

WIDTH = 100  # columns, where no terminal says how many it has


def main() -> None:
    """Run the demo on the first CUDA device, or on the CPU where there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time at most")
    parser.add_argument("--max-norm", type=float, default=0.5, help="norm to clip to")
    arguments = parser.parse_args()

    console = Console(width=None if Console().is_terminal else WIDTH)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = language_reference()
    training = train.begin(text, device, arguments.max_norm)
    n_parameters = sum(p.numel() for p in training.model.parameters())
    console.print(
        f"{n_parameters:,} parameters on {device}, {len(text):,} bytes of Python's reference, "
        f"each step clipped to {arguments.max_norm}"
    )
    train.run(training, arguments.steps, arguments.seconds, console)
    show_norms(training, console)


def show_norms(training: train.Training, console: Console) -> None:
    """Compare the norms of fresh gradients, in float32 and rounded to bfloat16."""
    training.backward()
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    for dtype in (torch.float32, torch.bfloat16):
        measurements = list(compare.measure([gradient.to(dtype) for gradient in gradients]))
        console.print(compare.table(measurements, f"one more step's gradients, as {dtype}"))
        console.print(compare.verdict(measurements))


if __name__ == "__main__":
    main()
