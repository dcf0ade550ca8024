"""The declaration: what each module's tensors are under a recipe, written down apart from the code that runs.

    flow = declare_flow(decoder_modules(config), rollout=recipe, train=recipe)

The live model is observed on its own (models/observed.py) and must agree before step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.numerics.fp8 import PER_ROW, QuantBlock
from octavo.numerics.precision_flow import Edge, Format, Graph, Kind, Node, Phase, PrecisionFlow, Role
from octavo.numerics.recipe import GemmRecipe, Recipe, names_module

E4M3_SUMS = "E4M3 sums"
"""Raw E4M3 products summed, then scaled, blocks of K in ascending order: exactly on a CPU, in FP32 by tensor cores."""
GRID_SUMS = "ordered sums"
"""Operands that are not FP8, summed in one order: on a CPU exactly, on a fixed-point grid, blocks of 128 along K (64
keys); in FP32 by tensor cores."""
FP32_PRODUCT = "any order"
"""The backward: a CPU multiplies the decoded operands in FP32, a GPU the operands themselves, each in its own order."""
FP32_SUM = "FP32 sum"
"""Rows of one token added up: the embedding's gradient."""
FP32 = "FP32, rounded once"
"""Elementwise; a norm's mean square is an exact sum, that of its backward an FP32 one."""
COPY = "copy"
"""Cast, stored or looked up."""
NONE = GemmRecipe(left=None, right=None)


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module of a decoder, without saying which class runs it."""

    name: str
    """As Hugging Face names it; rotary, kv_cache and the residual sums have names of ours."""
    kind: Kind
    """What it does."""
    inputs: tuple[str, ...]
    """Modules whose outputs it reads, in the order of its arguments."""
    shape: tuple[int, ...] = ()
    """Of its weight: (N, K) of a projection, (V, D) of embedding and head, (D,) of a norm."""
    bias: bool = False
    """A projection adds one."""
    fused: tuple[str, ...] = ()
    """Names of the projections that are one weight matrix, its own included."""
    tied_to: str = ""
    """The module whose weight it reads instead of one of its own."""


def declare_flow(
    modules: Sequence[Module], *, rollout: Recipe, train: Recipe, reference: bool = True, masters: Format = "fp32"
) -> PrecisionFlow:
    """The graphs of a run.

    Args:
        modules: of the model, in the order of the forward pass.
        rollout, train: recipes of the two sides; old and reference log-probabilities are training's.
        reference: whether the run has a reference model.
        masters: format of the matrices that the optimiser moves; vectors are FP32.

    Raises:
        ValueError: `keep_bf16` names no module, or part of a fused one; train is forward only.
    """
    roles: list[tuple[Role, Recipe]] = [("rollout", rollout), ("old", train), ("train", train), ("export", train)]
    if reference:
        roles.insert(2, ("reference", train))
    return PrecisionFlow(graphs=tuple(declare_graph(role, modules, recipe, masters) for role, recipe in roles))


def declare_graph(role: Role, modules: Sequence[Module], recipe: Recipe, masters: Format = "fp32") -> Graph:
    """The graph of one role."""
    check_kept(modules, recipe)
    readers: dict[str, list[str]] = {}
    for module in modules:
        for name in module.inputs:
            readers.setdefault(name, []).append(module.name)
    nodes = []
    for module in modules:
        writer = _Writer(module, recipe, tuple(readers.get(module.name, ())), masters)
        if role == "export":
            edges = writer.export() if module.shape and not module.tied_to else []
        else:
            forward, backward = EDGES[module.kind](writer)
            edges = [*forward, *backward] if role == "train" else forward
        if edges:
            kept = kept_reason(module, recipe) if role != "export" else "the exported model is not quantised"
            nodes.append(Node(name=module.name, kind=module.kind, shape=module.shape, kept=kept, edges=tuple(edges)))
    return Graph(role=role, recipe=recipe.name, nodes=tuple(nodes))


def check_kept(modules: Sequence[Module], recipe: Recipe) -> None:
    """Every `keep_bf16` pattern must name something, or a typing error would quietly quantise a layer.

    Raises:
        ValueError: names the pattern, or the fused projections of which it keeps only some.
    """
    names = [module.name for module in modules if module.kind in ("projection", "head", "embedding")]
    for pattern in recipe.keep_bf16:
        if not any(names_module(pattern, name) for name in names):
            example = next(module.name for module in modules if module.kind == "projection")
            raise ValueError(
                f"keep_bf16 has {pattern!r}, which names no module; modules look like {example!r}. "
                f"Patterns match whole names: 'down_proj', 'layers.0.*'"
            )
    for module in modules:
        if module.fused:
            recipe.keeps_fused(module.fused)


def kept_reason(module: Module, recipe: Recipe) -> str:
    """Why a module is not FP8; empty where it is."""
    if module.kind == "kv_cache":
        return "" if recipe.kv_cache == "fp8" else f"kv_cache is {recipe.kv_cache}"
    if module.kind != "projection":
        return "never quantised"
    if not recipe.quantizes:
        return f"recipe {recipe.name!r} quantises nothing"
    pattern = next((pattern for pattern in recipe.keep_bf16 if names_module(pattern, module.name)), None)
    return "" if pattern is None else f"keep_bf16 has {pattern!r}"


@dataclass(frozen=True)
class _Writer:
    """Writes the edges of one module under a recipe."""

    module: Module
    recipe: Recipe
    readers: tuple[str, ...]
    """Modules that read its output: its gradient comes from them."""
    masters: Format
    """Of matrices."""

    @property
    def high(self) -> Format:
        return self.recipe.high_precision

    def edge(
        self, phase: Phase, tensor: str, sources: tuple[str, ...], kernel: str, format: Format | None = None
    ) -> Edge:
        """An edge without quantisation, in the high-precision format unless another is given."""
        return Edge(phase=phase, tensor=tensor, sources=sources, kernel=kernel, format=format or self.high)

    def operand(
        self, phase: Phase, tensor: str, sources: tuple[str, ...], kernel: str, quant_block: QuantBlock | None
    ) -> Edge:
        """An operand of a GEMM: E4M3 by quant_block, or the high-precision format."""
        if quant_block is None:
            return self.edge(phase, tensor, sources, kernel)
        frozen = self.recipe.static_activation_scale and (phase, tensor) == ("fprop", "X")
        return replace(
            self.edge(phase, tensor, sources, kernel, "e4m3"),
            quant_block=quant_block,
            scale="power_of_two" if self.recipe.scale_rounding == "power_of_two" else "fp32",
            margin=self.recipe.amax_margin if frozen else None,
        )

    def inputs(self, kernel: str, *tensors: str) -> list[Edge]:
        """The forward's inputs, one per module that it reads."""
        pairs = zip(tensors, self.module.inputs, strict=True)
        return [self.edge("fprop", tensor, (source,), kernel) for tensor, source in pairs]

    def output(self, tensor: str = "Y", format: Format | None = None) -> Edge:
        """What comes out of the forward."""
        return self.edge("fprop", tensor, (self.module.name,), "", format)

    def gradients(self, kernel: str, *saved: str) -> list[Edge]:
        """dY, dX and the inputs that are saved for it, all in the high-precision format."""
        return [
            self.edge("dgrad", "dY", self.readers, kernel),
            self.edge("dgrad", "dX", (self.module.name,), ""),
            *(
                self.edge("saved", tensor, (source,), COPY)
                for tensor, source in zip(saved, self.module.inputs, strict=bool(saved))
            ),
        ]

    def parameter(self, tensor: str = "W") -> list[Edge]:
        """Master and FP32 gradient; a tied module has them in the other one."""
        owner = (self.module.tied_to,) if self.module.tied_to else ()
        return [
            self.edge("master", tensor, owner, COPY, self.master(tensor)),
            self.edge("gradient", f"d{tensor}", owner, "", "fp32"),
        ]

    def master(self, tensor: str) -> Format:
        """Format of a parameter: FP32 of a vector."""
        return self.masters if tensor == "W" and len(self.module.shape) > 1 else "fp32"

    def export(self) -> list[Edge]:
        """What is written at the end: masters rounded once."""
        tensors = ["W", *(["bias"] if self.module.bias else [])]
        kernels = {tensor: f"rounded from the {self.master(tensor).upper()} master" for tensor in tensors}
        return [self.edge("export", tensor, (), kernel) for tensor, kernel in kernels.items()]


def _projection(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    """Three GEMMs; what `keep_bf16` names, and what the recipe leaves, is not quantised."""
    recipe, inputs = w.recipe, w.module.inputs
    quantised = not kept_reason(w.module, recipe)
    fprop = recipe.fprop if quantised else NONE
    kernel = GRID_SUMS if fprop.left is None else E4M3_SUMS
    forward = [
        w.operand("fprop", "X", inputs, kernel, fprop.left),
        w.operand("fprop", "W", (), kernel, fprop.right),
        *([w.edge("fprop", "bias", (), FP32)] if w.module.bias else []),
        w.output(),
    ]
    if recipe.dgrad is None or recipe.wgrad is None:
        return forward, []
    dgrad, wgrad = (recipe.dgrad, recipe.wgrad) if quantised else (NONE, NONE)
    backward = [
        w.operand("dgrad", "dY", w.readers, FP32_PRODUCT, dgrad.left),
        w.operand("dgrad", "W", (), FP32_PRODUCT, dgrad.right),
        w.edge("dgrad", "dX", (w.module.name,), ""),
        w.operand("wgrad", "dY", w.readers, FP32_PRODUCT, wgrad.left),
        w.operand("wgrad", "X", inputs, FP32_PRODUCT, wgrad.right),
        w.operand("saved", "X", inputs, COPY, wgrad.right if recipe.saved_activations == "fp8" else None),
        *w.parameter(),
        *(w.parameter("bias") if w.module.bias else []),
    ]
    return forward, backward


def _kv_cache(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    """Stored as every query sees them; the gradient passes straight through."""
    forward = w.inputs(COPY, "K", "V")
    if w.recipe.kv_cache == "fp8":
        forward = [replace(edge, format="e4m3", quant_block=PER_ROW, scale="power_of_two") for edge in forward]
    return forward, [w.edge("dgrad", "dK", w.readers, COPY), w.edge("dgrad", "dV", w.readers, COPY)]


def _attention(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    """q.K^ and p.V^; Q and P in FP16 beside an FP8 cache, K^ and V^ exact in BF16. The backward is in FP32."""
    kernel = f"{GRID_SUMS}, FP32 softmax"
    product: Format = "fp16" if w.recipe.kv_cache == "fp8" else w.high
    rotary, cache = w.module.inputs
    own = (w.module.name,)
    forward = [
        w.edge("fprop", "Q", (rotary,), kernel, product),
        w.edge("fprop", "K^", (cache,), kernel),
        w.edge("fprop", "V^", (cache,), kernel),
        w.edge("fprop", "scores", own, kernel, "fp32"),
        w.edge("fprop", "P", own, kernel, product),
        w.output(),
    ]
    backward = [
        w.edge("dgrad", "dY", w.readers, FP32_PRODUCT),
        w.edge("dgrad", "P", own, FP32_PRODUCT, "fp32"),
        *(w.edge("dgrad", tensor, own, "") for tensor in ("dQ", "dK", "dV")),
        w.edge("saved", "Q", (rotary,), COPY),
        *(w.edge("saved", tensor, (cache,), COPY) for tensor in ("K^", "V^")),
        w.edge("saved", "Y", own, COPY),
    ]
    return forward, backward


def _norm(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    forward = [*w.inputs(FP32, "X"), w.edge("fprop", "W", (), FP32, "fp32"), w.output()]
    return forward, [*w.gradients(FP32, "X"), *w.parameter()]


def _rotary(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    table = w.edge("fprop", "cos sin", (), FP32, "fp32")
    return [*w.inputs(FP32, "Q", "K"), table, w.output()], w.gradients(FP32)


def _activation(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    return [*w.inputs(FP32, "gate", "up"), w.output()], w.gradients(FP32, "gate", "up")


def _residual(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    return [*w.inputs(FP32, "h", "X"), w.output()], w.gradients(FP32)


def _embedding(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    return [w.edge("fprop", "W", (), COPY), w.output()], [w.edge("dgrad", "dY", w.readers, FP32_SUM), *w.parameter()]


def _head(w: _Writer) -> tuple[list[Edge], list[Edge]]:
    """Logits in FP32; their gradient too."""
    weight = (w.module.tied_to,) if w.module.tied_to else ()
    forward = [
        *w.inputs(GRID_SUMS, "X"),
        w.edge("fprop", "W", weight, GRID_SUMS),
        w.output("logits", "fp32"),
    ]
    own = (w.module.name,)
    backward = [
        w.edge("dgrad", "dlogits", own, FP32_PRODUCT, "fp32"),
        w.edge("dgrad", "W", weight, FP32_PRODUCT),
        w.edge("dgrad", "dX", own, ""),
        w.edge("wgrad", "dlogits", own, FP32_PRODUCT, "fp32"),
        w.edge("wgrad", "X", w.module.inputs, FP32_PRODUCT),
        w.edge("saved", "X", w.module.inputs, COPY),
        *w.parameter(),
    ]
    return forward, backward


EDGES: dict[Kind, Callable[[_Writer], tuple[list[Edge], list[Edge]]]] = {
    "embedding": _embedding,
    "norm": _norm,
    "projection": _projection,
    "rotary": _rotary,
    "kv_cache": _kv_cache,
    "attention": _attention,
    "activation": _activation,
    "residual": _residual,
    "head": _head,
}
