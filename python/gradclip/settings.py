"""What a call asked for, once its arguments were checked."""

import math
from typing import NamedTuple


class Settings(NamedTuple):
    """The numbers of a clip; over ranks, what every rank must have asked for alike."""

    norm_type: float
    max_norm: float = math.inf
    eps: float = 1e-6
    scale: float = 1.0
    error_if_nonfinite: bool = False

    def words(self) -> str:
        """How an error tells a rank's settings."""
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())
