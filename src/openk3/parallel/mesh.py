"""The process groups of a layout, as torch DeviceMeshes.

Every process must build the mesh, at the same point of the program.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from openk3.parallel.layout import Layout


class Mesh:
    """Groups by what they are for. Axes that no one uses yet have groups of one process."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._meshes: list[DeviceMesh] = []
        n = layout
        self.axes = self._mesh(
            pipeline=n.pipeline, replicate=n.replicate, shard=n.shard, context=n.context,
            tensor=n.tensor,
        )  # fmt: skip
        """Every declared axis; `axes["context"].get_group()` and so on."""
        state = self._mesh(
            pipeline=n.pipeline, replicate=n.replicate, state=n.state, tensor=n.tensor
        )
        experts = self._mesh(
            pipeline=n.pipeline, replicate=n.replicate, expert_shard=n.expert_shard,
            expert=n.expert, tensor=n.tensor,
        )  # fmt: skip
        tokens = self._mesh(pipeline=n.pipeline, tokens=n.replicate * n.state, tensor=n.tensor)
        copies = ("replicate",) if n.replicate > 1 else ()
        self.dense: DeviceMesh = state[(*copies, "state")]
        """Over which FSDP2 shards what is not an expert."""
        self.experts: DeviceMesh = experts[(*copies, "expert_shard")]
        """Over which FSDP2 shards the experts of this process's expert group place."""
        self.state: dist.ProcessGroup = state["state"].get_group()
        """Those that together hold one copy of the state."""
        self.expert: dist.ProcessGroup = experts["expert"].get_group()
        """Those that exchange tokens for experts, in the order of their experts."""
        self.tokens: dist.ProcessGroup = tokens["tokens"].get_group()
        """Those whose tokens differ: losses, counts and replicated gradients add up over them."""
        self.place: int = dist.get_rank(self.state)
        """This process's place in its state group."""

    def wait_up_to(self, patience: timedelta) -> None:
        """Let the collectives of every group wait so long; torch grants 10 minutes on GPUs."""
        for mesh in self._meshes:
            for group in mesh.get_all_groups():
                _set_pg_timeout(patience, group)

    @property
    def data_rank(self) -> int:
        """Which of `layout.data` shares of the rows this process takes."""
        at = self.axes.get_coordinate()
        assert at is not None, "a mesh holds every process"
        return at[1] * self.layout.shard + at[2]

    def _mesh(self, **axes: int) -> DeviceMesh:
        sizes = tuple(axes.values())
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=tuple(axes))
        self._meshes.append(mesh)
        return mesh
