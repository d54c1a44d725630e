"""The accessors of torch that are private, or that differ between torch 2.10 and the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from gradclip.wrappers import waited

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor, without importing DTensor for those who never use it."""
    return getattr(tensor, "_spec", None) is not None


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced, flattened or unflattened from (itself when it was not)."""
    accessor = getattr(mesh, "_get_root_mesh", None)
    if accessor is None:
        from torch.distributed import device_mesh

        return cast("DeviceMesh", cast(Any, device_mesh)._mesh_resources.get_root_mesh(mesh))
    return cast("DeviceMesh", accessor())


def coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's coordinate in `mesh`, None outside it (torch gives a list or a tuple)."""
    found = mesh.get_coordinate()
    return None if found is None else tuple(found)


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of `mesh`, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def local_tensor(gradient: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself, once any collective that still fills it is done.

    `to_local()` gives a view, costs six times more, and does not unwrap an asynchronous result.
    """
    return waited(gradient._local_tensor)


def placements_of(gradient: torch.Tensor) -> tuple[Any, ...]:
    """The placements of a DTensor."""
    return tuple(cast(Any, gradient)._spec.placements)


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of `group`, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend `group` uses for each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in str(config).split(","))
