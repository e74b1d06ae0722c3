"""Which process stands where: the declared layout, its arithmetic and its checks. No torch.

    rank = (((pipeline * replicate + r) * shard + s) * context + c) * tensor + t

A `state` group is the shard x context processes that together hold one copy of the weights and the
optimizer state; they all see different tokens, as do the copies. The routed experts are divided
inside a state group: neighbours form an `expert` group, and the `expert_shard` processes that stand
at the same place of their groups share those experts' state.
"""

from dataclasses import dataclass

from openk3.config.model import ModelConfig
from openk3.config.recipe import ParallelRecipe
from openk3.errors import ConfigError

Span = tuple[int, int]
"""First row and the row after the last."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. `resolve` makes a valid one."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """All processes."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def state(self) -> int:
        """Processes that together hold one copy of the state."""
        return self.shard * self.context

    @property
    def expert_shard(self) -> int:
        """Processes that share the state of the same experts."""
        return self.state // self.expert

    @property
    def data(self) -> int:
        """Processes that take different rows."""
        return self.replicate * self.shard

    def describe(self) -> str:
        """`replicate 2 x shard 4, expert 4`: the axes above one."""
        axes = ("pipeline", "replicate", "shard", "context", "tensor")
        named = [f"{a} {getattr(self, a)}" for a in axes if getattr(self, a) > 1]
        experts = f", expert {self.expert}" if self.expert > 1 else ""
        return (" x ".join(named) or "one process") + experts


def resolve(recipe: ParallelRecipe, world_size: int) -> Layout:
    """The layout of `world_size` processes. Raises ConfigError naming the numbers that clash."""
    others = recipe.pipeline * recipe.replicate * recipe.context * recipe.tensor
    shard = recipe.shard or max(1, world_size // others)
    layout = Layout(
        recipe.pipeline, recipe.replicate, shard, recipe.context, recipe.tensor, recipe.expert
    )
    if layout.world != world_size:
        axes = ("pipeline", "replicate", "shard", "context", "tensor")
        product = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
        raise ConfigError(
            f"[parallel] {product} makes {layout.world} processes, but there are {world_size}; "
            "leave shard at 0 to take what the other axes leave, or start another number"
        )
    if layout.state % layout.expert:
        raise ConfigError(
            f"parallel.expert ({layout.expert}) must divide shard x context "
            f"({layout.shard} x {layout.context} = {layout.state}): the processes of an expert "
            "group are taken from those that share one copy of the state"
        )
    return layout


def check(layout: Layout, config: ModelConfig, *, batch_sequences: int) -> None:
    """Raise ConfigError unless the model and the batch can be shared out as the layout says."""
    experts = config.num_experts
    if experts % layout.expert:
        raise ConfigError(
            f"parallel.expert ({layout.expert}) must divide model.num_experts ({experts})"
        )
    if layout.expert_shard > experts // layout.expert:
        raise ConfigError(
            f"shard x context / expert ({layout.expert_shard}) processes would share "
            f"{experts // layout.expert} experts, and a process cannot hold less than one: raise "
            "parallel.expert, or parallel.replicate in exchange for parallel.shard"
        )
    for name, heads in (
        ("num_attention_heads", config.num_attention_heads),
        ("linear_attn.num_heads", config.linear_attn.num_heads),
    ):
        if heads % layout.tensor:
            raise ConfigError(
                f"parallel.tensor ({layout.tensor}) must divide model.{name} ({heads})"
            )
    if layout.pipeline > config.num_hidden_layers:
        raise ConfigError(
            f"parallel.pipeline ({layout.pipeline}) exceeds model.num_hidden_layers "
            f"({config.num_hidden_layers})"
        )
    if batch_sequences % layout.data:
        raise ConfigError(
            f"train.batch_sequences ({batch_sequences}) must be a multiple of replicate x shard "
            f"({layout.replicate} x {layout.shard} = {layout.data})"
        )


def row_spans(rows: int, num_parts: int) -> tuple[Span, ...]:
    """Rows 0..rows in parts of equal height ceil(rows / num_parts), the last ones shorter or empty:
    how FSDP2 cuts the first dimension."""
    height = -(-rows // num_parts)
    return tuple((min(i * height, rows), min((i + 1) * height, rows)) for i in range(num_parts))


def expert_spans(experts: int, layout: Layout) -> tuple[Span, ...]:
    """The experts whose state each process of a state group holds, in the group's order."""
    block = experts // layout.expert
    inner = row_spans(block, layout.expert_shard)
    spans = []
    for place in range(layout.state):
        first = place % layout.expert * block
        start, stop = inner[place // layout.expert]
        spans.append((first + start, first + stop))
    return tuple(spans)
