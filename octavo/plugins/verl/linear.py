"""The linear layers of a transformers model as `FP8Linear`, under FSDP2.

FSDP2 shards the FP32 masters and gathers them, cast to BF16, around each block's forward and backward. The FP8 bytes
lie whole on every rank: they are written from the gathered FP32 masters, once per optimiser step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.layers.linear import FP8Linear
from octavo.numerics.recipe import Recipe


class ShardedLinear(FP8Linear):
    """An nn.Linear of a transformers model, its parameters shared, its products under a recipe.

    Args:
        linear: the layer it stands in for.
        recipe: one that quantises it.
        name: dotted name in the model.
    """

    def __init__(self, linear: nn.Linear, recipe: Recipe, name: str) -> None:
        parent, _, leaf = name.rpartition(".")
        projections = {leaf: linear.out_features}
        super().__init__(linear.in_features, projections, bias=linear.bias is not None, recipe=recipe, path=parent)
        self.weight, self.bias = linear.weight, linear.bias  # type: ignore[assignment]
        self.shadowed = False

    def forward(self, x: Tensor, *, shadow: bool = False) -> Tensor:
        """x [..., K] -> [..., N] bf16; while `shadowed`, as `shadow` of an FP8Linear."""
        flat = x.reshape(-1, x.shape[-1]).to(self._dtype)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(flat, shadow=shadow or self.shadowed).view(*x.shape[:-1], -1)

    @torch.no_grad()
    def requantize_(self) -> None:
        """Write the bytes from the whole masters, which exist meanwhile; a collective call where they are sharded."""
        sharded, device = dict(self._parameters), self.get_buffer("weight_q").device
        try:
            for name, parameter in sharded.items():
                self._parameters[name] = whole(parameter, device)  # type: ignore[assignment]
            super().requantize_()
        finally:
            self._parameters.update(sharded)


def whole(parameter: Tensor | None, device: torch.device | str) -> Tensor | None:
    """A parameter gathered from all ranks, on a device."""
    if parameter is None:
        return None
    moved = parameter.detach().to(device)
    return moved.full_tensor() if isinstance(moved, DTensor) else moved


def quantize_linears(model: nn.Module, recipe: Recipe) -> dict[str, ShardedLinear]:
    """Replace every linear layer that the recipe does not keep in BF16; {dotted name: its replacement}.

    Raises:
        ValueError: there is none.
    """
    names = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and not recipe.keeps_bf16(name)
    ]
    if not names:
        raise ValueError(
            f"keep_bf16={list(recipe.keep_bf16)} leaves no linear layer of {type(model).__name__} to recipe "
            f"{recipe.name!r}. Use actor.strategy=fsdp2, or keep fewer"
        )
    layers = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layers[name] = ShardedLinear(model.get_submodule(name), recipe, name)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def check_vllm_takes(layers: Mapping[str, ShardedLinear]) -> None:
    """Refuse, before anything is sent, what vLLM's block FP8 would refuse to load.

    Raises:
        ValueError: q, k, v or gate, up, which vLLM runs as one weight, meet within a block of 128 rows.
    """
    widths = {name: layer.weight.shape[0] for name, layer in layers.items()}
    inner = (".q_proj", ".k_proj", ".gate_proj")  # all but the last part of a merged weight
    refused = [f"{name}: {width}" for name, width in widths.items() if name.endswith(inner) and width % 128]
    if refused:
        raise ValueError(
            f"vLLM runs q, k, v and gate, up as one FP8 weight and refuses parts that are no multiple of 128 rows: "
            f"{', '.join(refused[:3])}{f' and {len(refused) - 3} more' if len(refused) > 3 else ''}. Set "
            f"rollout_weights=bf16 with BF16 rollouts, or name them in keep_bf16 and in vLLM's ignored_layers"
        )


def take_buffers(layers: Iterable[ShardedLinear]) -> Callable[[torch.device | str], None]:
    """Take the layers' buffers off, and return what puts empty ones back on a device.

    verl broadcasts every buffer of a model, and not every back end can broadcast E4M3.
    """
    taken = [(layer, name, buffer) for layer in layers for name, buffer in layer.named_buffers(recurse=False)]
    for layer, name, _ in taken:
        delattr(layer, name)

    def put_back(device: torch.device | str) -> None:
        for layer, name, buffer in taken:
            layer.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)

    return put_back


@contextmanager
def shadowing(layers: Iterable[ShardedLinear]) -> Iterator[None]:
    """Within, the layers multiply BF16 weights cast from the masters."""
    for layer in layers:
        layer.shadowed = True
    try:
        yield
    finally:
        for layer in layers:
            layer.shadowed = False
