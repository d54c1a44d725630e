"""A clip that is set up once and called every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradclip import arguments, clip, compiled, entry, gradients, mistakes, totals
from gradclip.describe import described
from gradclip.grad_mode import without_grad
from gradclip.option_types import MeshDims, NormType, Number, PlainReplicas, Reduce, Replicas
from gradclip.parameters import Parameters, ParametersLike, is_exhausted, warn
from gradclip.settings import Settings
from gradclip.sharding import clip as sharded
from gradclip.sharding.options import DISTINCT_DIMS
from gradclip.sharding.session import Session, open_session
from gradclip.sources import ListSource, ModuleSource

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Never


class Clipper:
    """Clips the gradients of a Module or of a list of parameters at every step.

    Which gradients exist may change from step to step (an unused expert, a frozen layer). The
    parameters of a Module may change too: layers that are added, or parameters that are replaced,
    as by `load_state_dict(assign=True)` or `to()`, are clipped from the next step on. A list stays
    what it is; a clip warns when nobody else holds any of its parameters, or none has a gradient.

    Args:
        parameters: as for `gradclip.clip_`; anything but a Module is listed once, now.
        max_norm: the limit, >= 0.
        norm_type: the p of the p-norm.
        error_if_nonfinite: as for `gradclip.clip_`.
        dtype: as for `gradclip.clip_`.
        eps: as for `gradclip.clip_`.
        grad: as for `gradclip.clip_`.
        group: as for `gradclip.clip_`, like the other options for ranks.
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
            without waiting for it; None before the first clip.

    Raises:
        ValueError: an exhausted generator; no parameters, unless `group` or `reduce` connects this
            rank with others that have some.
        ValueError, TypeError: other arguments, as `gradclip.clip_`.
    """

    @without_grad
    def __init__(
        self,
        parameters: ParametersLike,
        max_norm: Number,
        norm_type: NormType = 2.0,
        *,
        error_if_nonfinite: bool = False,
        dtype: torch.dtype | None = None,
        eps: float = 1e-6,
        grad: str = "grad",
        group: ProcessGroup | None = None,
        reduce: Reduce | None = None,
        plain: PlainReplicas | None = None,
        distinct_dims: MeshDims = DISTINCT_DIMS,
        replicas: Replicas | None = None,
        check_replicas: bool | int | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            arguments.refuse_unknown("Clipper", unknown, arguments.names_of(Clipper))
        self.max_norm: Number = arguments.limit(max_norm, "max_norm")
        self._limit: Number = self.max_norm
        self.norm_type: NormType = arguments.order(norm_type)
        self.eps = arguments.epsilon(eps)
        self.dtype = arguments.result_dtype(dtype)
        self.error_if_nonfinite = arguments.flag(error_if_nonfinite, "error_if_nonfinite")
        self.grad = arguments.attribute(grad)
        self.total_norm: Tensor | None = None
        self._coefficient: float | Tensor | None = None
        self.sharding = entry.options(
            group, reduce, plain, distinct_dims, replicas, check_replicas, {}
        )
        if entry.is_data_parallel(parameters) and group is not None:
            self.sharding = {"plain": "replicated", **self.sharding}
        self._source = _source_of(parameters)
        self._given = self._source.listed
        self._session = open_session(self._given, self.grad, self.sharding)
        if not self._given.tensors:
            _accept_nothing(self._given, self._session)

    @without_grad
    def clip_(self, scale: float | Tensor | None = None) -> Tensor:
        """Clip the gradients as they are now; result and errors are those of `gradclip.clip_`."""
        if torch.compiler.is_compiling():
            return self._clip_in_graph(scale)
        try:
            settings = self._settings(scale)
            self._follow()
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
    def coefficient(self) -> float | Tensor | None:
        """The clip coefficient of the last clip; worked out when it is asked for."""
        if self._coefficient is None and self.total_norm is not None:
            total = totals.remembered(self.total_norm)
            limit = arguments.limit(self._limit, "max_norm")
            self._coefficient = totals.coefficient(total, limit, self.eps)
        return self._coefficient

    def check(self) -> None:
        """Wait for the last clip over ranks on a device, and raise if it failed on any rank.

        Without this the next `clip_` raises it. Elsewhere `clip_` itself has raised.

        Raises:
            ShardedClipError: with the rank that failed.
        """
        if self._session is not None:
            sharded.check(self._session)

    def _settings(self, scale: float | Tensor | None) -> Settings:
        """The numbers of this clip; attributes may have been set since the last."""
        mistakes.refuse_as_scale(scale)
        arguments.result_dtype(self.dtype)
        return arguments.settings(
            self.norm_type, self.max_norm, self.eps, scale, self.error_if_nonfinite
        )

    def _follow(self) -> None:
        """Takes the parameters as they are now, with a new session if they are others."""
        given = self._source.current()
        if given is self._given:
            return
        session = open_session(given, self.grad, self.sharding)
        if session is not None and self._session is not None:
            session.deferred.pending = self._session.deferred.pending  # of the last clip
        self._given, self._session = given, session

    def _clip_in_graph(self, scale: float | Tensor | None) -> Tensor:
        if self._session is not None:
            return compiled.outside(self.clip_, scale)
        source = self._source
        parameters = source.module if isinstance(source, ModuleSource) else source.listed.tensors
        numbers = (self.norm_type, self.max_norm, self.eps, scale)
        self.total_norm = compiled.clip_(
            parameters, self.grad, numbers, self.error_if_nonfinite, self.dtype, False, {}
        )
        self._coefficient, self._limit = None, self.max_norm
        return self.total_norm

    def _clip_alone(self, settings: Settings) -> Tensor:
        found = gradients.of(self._given, self.grad)
        if not found.tensors:
            return clip.no_gradient(self._given, self.dtype, remedy=self._source.if_unused)
        return clip.clip_found_(found, settings, self.dtype)

    def __call__(
        self, parameters: ParametersLike | None = None, max_norm: Number | None = None
    ) -> Tensor:
        """`clip_()`, in the form in which trainers call a clipping function.

        Other parameters or another limit are taken for this call alone, with this clipper's norm
        type and declarations; its attributes keep what they were.
        """
        if parameters is None and max_norm is None:
            return self.clip_()
        limit: Any = self.max_norm if max_norm is None else max_norm
        order: Any = self.norm_type
        return clip.clip_(
            self._named() if parameters is None else parameters,
            limit,
            order,
            error_if_nonfinite=self.error_if_nonfinite,
            dtype=self.dtype,
            eps=self.eps,
            grad=self.grad,
            **self.sharding,
        )

    def _named(self) -> ParametersLike:
        """The parameters with their names, for `replicas=` to find them."""
        if not torch.compiler.is_compiling():
            self._follow()
        names, tensors = self._given.names, self._given.tensors
        return tensors if names is None else zip(names, tensors, strict=True)

    def __repr__(self) -> str:
        """The parameters, the limit, and the options that were set."""
        shown: dict[str, object] = {"max_norm": self.max_norm, "norm_type": self.norm_type}
        defaults = {"error_if_nonfinite": False, "dtype": None, "eps": 1e-6, "grad": "grad"}
        for name, usual in defaults.items():
            if (value := getattr(self, name)) != usual:
                shown[name] = value
        shown |= self.sharding
        options = ", ".join(f"{name}={described(value)}" for name, value in shown.items())
        return f"Clipper({self._source}, {options})"


def _source_of(parameters: ParametersLike) -> ModuleSource | ListSource:
    if is_exhausted(parameters):
        raise ValueError("`parameters` is an exhausted generator; call model.parameters() again")
    return ModuleSource(parameters) if isinstance(parameters, nn.Module) else ListSource(parameters)


def _accept_nothing(given: Parameters, session: Session | None) -> None:
    """Where other ranks take part, one may be without parameters; alone it would clip nothing."""
    if session is None:
        raise ValueError(f"`parameters` holds nothing to clip; {given.nothing}")
    warn(given.nothing)
