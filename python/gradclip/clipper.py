"""A clip that is set up once and called every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradclip import arguments, clip, compiled, entry, gradients, totals
from gradclip.grad_mode import without_grad
from gradclip.parameters import ParametersLike, listed, warn
from gradclip.settings import Settings
from gradclip.sharding import clip as sharded
from gradclip.sharding.options import DISTINCT_DIMS, Replicas
from gradclip.sharding.session import open_session
from gradclip.sharding.transport import Reduce

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Never


class Clipper:
    """Clips the gradients of the same parameters at every step.

    Which gradients exist may change from step to step (an unused expert, a frozen layer); the
    parameters may not: make a new Clipper for others.

    Args:
        parameters: as for `gradclip.clip_`; listed once, now.
        max_norm: the limit, >= 0.
        norm_type: the p of the p-norm.
        error_if_nonfinite: as for `gradclip.clip_`.
        dtype: as for `gradclip.clip_`.
        eps: as for `gradclip.clip_`.
        grad: as for `gradclip.clip_`.
        group: as for `gradclip.clip_`; like the following.
        reduce: as for `gradclip.clip_`.
        plain: as for `gradclip.clip_`.
        distinct_dims: as for `gradclip.clip_`.
        replicas: as for `gradclip.clip_`.
        check_replicas: as for `gradclip.clip_`.

    Attributes:
        max_norm: the limit of the next clip; may be changed between steps, on all ranks alike.
        total_norm: what the last `clip_()` returned; None before the first.
        coefficient: its clip coefficient, min(1, max_norm / (total_norm + eps)); gradients were
            multiplied by this over the loss scale. A 0-dim tensor where the clip ran on a device
            without waiting for it.
    """

    def __init__(
        self,
        parameters: ParametersLike,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        dtype: torch.dtype | None = None,
        eps: float = 1e-6,
        grad: str = "grad",
        group: dist.ProcessGroup | None = None,
        reduce: Reduce | None = None,
        plain: Any = None,
        distinct_dims: Sequence[Any] = DISTINCT_DIMS,
        replicas: Replicas | None = None,
        check_replicas: bool | int | None = None,
        **unknown: Never,
    ) -> None:
        sharding = entry.options(
            unknown,
            group=group,
            reduce=reduce,
            plain=plain,
            distinct_dims=distinct_dims,
            replicas=replicas,
            check_replicas=check_replicas,
        )
        arguments.refuse_unknown("Clipper", unknown, ())
        if entry.is_data_parallel(parameters) and group is not None:
            sharding = {"plain": "replicated", **sharding}
        self.max_norm = arguments.limit(max_norm, "max_norm")
        self.norm_type, self.eps = arguments.order(norm_type), arguments.epsilon(eps)
        self.dtype = arguments.result_dtype(dtype)
        self.error_if_nonfinite = error_if_nonfinite
        self.grad = arguments.attribute(grad)
        self.sharding = sharding
        self.total_norm: Tensor | None = None
        self._coefficient: float | Tensor | None = 1.0
        self._limit = self.max_norm
        self._given = listed(parameters)
        if self._given.nothing:
            warn(self._given.nothing)
        self._session = open_session(self._given, grad, sharding)

    @without_grad
    def clip_(self, scale: float | Tensor | None = None) -> Tensor:
        """Clip the gradients as they are now; result and errors are those of `gradclip.clip_`."""
        if torch.compiler.is_compiling():
            return self._clip_in_graph(scale)
        try:
            settings = self._settings(scale)
        except Exception as cause:
            if self._session is not None:
                sharded.refuse(self._session, "clip_", cause)
            raise
        if self._session is not None:
            self.total_norm, self._coefficient = sharded.clip_(
                self._session, self._given, settings, self.dtype
            )
            return self.total_norm
        self.total_norm = self._clip_alone(settings)
        self._coefficient, self._limit = None, settings.max_norm
        return self.total_norm

    @property
    def coefficient(self) -> float | Tensor:
        """The clip coefficient of the last clip; worked out when it is asked for."""
        if self._coefficient is None and self.total_norm is not None:
            total = totals.remembered(self.total_norm)
            self._coefficient = totals.coefficient(total, self._limit, self.eps)
        return 1.0 if self._coefficient is None else self._coefficient

    def check(self) -> None:
        """Wait for the last clip over ranks on a device, and raise if it failed on any rank.

        Without this the next `clip_` raises it. Elsewhere `clip_` itself has raised.

        Raises:
            ShardedClipError: with the rank that failed.
        """
        if self._session is not None:
            sharded.check(self._session)

    def _settings(self, scale: float | Tensor | None) -> Settings:
        """What is asked of this clip; attributes may have been set since the last."""
        arguments.result_dtype(self.dtype)
        return arguments.settings(
            self.norm_type, self.max_norm, self.eps, scale, self.error_if_nonfinite
        )

    def _clip_in_graph(self, scale: float | Tensor | None) -> Tensor:
        if self._session is not None:
            return compiled.outside(self.clip_, scale)
        numbers = (self.norm_type, self.max_norm, self.eps, scale)
        self.total_norm = compiled.clip_(
            self._given.tensors, self.grad, numbers, self.error_if_nonfinite, self.dtype, False, {}
        )
        self._coefficient, self._limit = None, self.max_norm
        return self.total_norm

    def _clip_alone(self, settings: Settings) -> Tensor:
        found = gradients.of(self._given, self.grad)
        if not found.tensors:
            return clip.no_gradient(self._given, self.dtype)
        return clip.clip_found_(found, settings, self.dtype)

    def __call__(
        self, parameters: ParametersLike | None = None, max_norm: float | None = None
    ) -> Tensor:
        """`clip_()`, in the form in which trainers call a clipping function.

        Other parameters or another limit are taken for this call alone, with this clipper's norm
        type and declarations; its attributes keep what they were.
        """
        if parameters is None and max_norm is None:
            return self.clip_()
        return clip.clip_(
            self._named() if parameters is None else parameters,
            self.max_norm if max_norm is None else max_norm,
            self.norm_type,
            error_if_nonfinite=self.error_if_nonfinite,
            dtype=self.dtype,
            eps=self.eps,
            grad=self.grad,
            **self.sharding,
        )

    def _named(self) -> ParametersLike:
        """The parameters as they were given, for `replicas=` to find them by name."""
        names, tensors = self._given.names, self._given.tensors
        return tensors if names is None else zip(names, tensors, strict=True)
