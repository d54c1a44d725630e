"""The types of options that several public functions take."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Number: TypeAlias = float | Tensor
"""A number, or a tensor of one element."""

NormType: TypeAlias = float | Literal["inf", "-inf"]
"""The p of a p-norm; torch takes these two strings too."""

Ranks: TypeAlias = "Sequence[int] | AbstractSet[int] | ProcessGroup | DeviceMesh"
"""Ranks of the world: a list of them, or a process group or mesh over them."""

PlainReplicas: TypeAlias = "Literal['replicated', 'distinct'] | Ranks"
"""`plain=`: which ranks hold replicas of plain tensors."""

ParameterReplicas: TypeAlias = "Literal['replicated', 'distinct', 'elsewhere'] | Ranks"
"""A value of `replicas=`: which ranks hold replicas of one parameter."""

Replicas: TypeAlias = (
    "Mapping[Any, ParameterReplicas] | Callable[[str | None, Tensor], ParameterReplicas | None]"
)
"""`replicas=`: by name or by parameter, or computed from both."""

MeshDims: TypeAlias = (
    "str | DeviceMesh | Sequence[str | DeviceMesh] | AbstractSet[str | DeviceMesh]"
)
"""`distinct_dims=`: one dimension of the root mesh, or several."""

Reduce: TypeAlias = Callable[[Tensor, Literal["sum", "max"]], object]
"""`reduce=`: reduces an int64 vector in place over all ranks."""
