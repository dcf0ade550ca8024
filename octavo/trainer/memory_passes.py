"""What a pass of a decoder holds on a CUDA device beside the weights, tensor by tensor, without running it.

The order is that of models/decoder.py and kernels/, as in `memory_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from octavo.kernels import lm_head
from octavo.kernels.attention_gradients import BLOCK_BYTES, WIDTHS, blocks_of, heads_at_once
from octavo.kernels.lm_head_gradients import kept_bytes, most_kept
from octavo.kernels.norm import BACKWARD_PROGRAMS, TILE_ELEMENTS
from octavo.models.config import DecoderConfig
from octavo.models.fused import PADDING, saves_both
from octavo.numerics.fp8 import BLOCK_1X128
from octavo.numerics.recipe import Recipe
from octavo.rollout.kv_cache import MAX_GATHERED
from octavo.trainer.memory_linear import BF16, FP32, INT64, Ledger, LinearPass


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """A decoder layer on T packed tokens."""

    shape: DecoderConfig
    recipe: Recipe
    index: int
    num_tokens: int
    """T."""
    longest: int
    """Tokens of a sequence."""
    paged: bool
    """Keys and values go to the cache of the engine."""

    def _linear(self, in_features: int, bias: bool = False, **projections: int) -> LinearPass:
        parent = "mlp" if "down_proj" in projections or "gate_proj" in projections else "self_attn"
        names = [f"model.layers.{self.index}.{parent}.{name}" for name in projections]
        return LinearPass(
            num_tokens=self.num_tokens,
            in_features=in_features,
            splits=tuple(projections.values()),
            quantized=self.recipe.quantizes and not self.recipe.keeps_fused(names),
            bias=bias,
            recipe=self.recipe,
        )

    @cached_property
    def qkv(self) -> LinearPass:
        """q, k and v."""
        query, key = (n * self.shape.head_dim for n in (self.shape.num_heads, self.shape.num_kv_heads))
        return self._linear(self.shape.hidden_size, self.shape.qkv_bias, q_proj=query, k_proj=key, v_proj=key)

    @cached_property
    def o(self) -> LinearPass:
        """Of the output of attention."""
        return self._linear(self.shape.num_heads * self.shape.head_dim, o_proj=self.shape.hidden_size)

    @cached_property
    def gate_up(self) -> LinearPass:
        """gate and up."""
        F = self.shape.intermediate_size
        return self._linear(self.shape.hidden_size, gate_proj=F, up_proj=F)

    @cached_property
    def down(self) -> LinearPass:
        """down."""
        return self._linear(self.shape.intermediate_size, down_proj=self.shape.hidden_size)

    @property
    def linears(self) -> tuple[LinearPass, ...]:
        """All four."""
        return self.qkv, self.o, self.gate_up, self.down

    def _bf16(self, width: int) -> int:
        return BF16 * self.num_tokens * width

    @property
    def saved(self) -> dict[str, int]:
        """What autograd keeps of the layer, by name."""
        T, H, D = self.num_tokens, self.shape.num_heads, self.shape.hidden_size
        F, query = self.shape.intermediate_size, self.o.in_features
        return {
            "h": self._bf16(2 * D),  # before each norm
            "inverse_rms": FP32 * 2 * T,
            "x of qkv": self.qkv.saved + self._bf16(D) * self.qkv.keeps_x,
            "qkv": self._bf16(self.qkv.out_features),
            "out of attention": self._bf16(query),
            "logsumexp": FP32 * T * H,
            "x of o": self.o.saved,  # where it keeps X, that is attention's output
            "x of gate_up": self.gate_up.saved + self._bf16(D) * self.gate_up.keeps_x,
            "gate_up": self._bf16(2 * F),
            "x of down": self.down.saved + self._bf16(F) * self.down.keeps_x,
        }

    def forward(self, ledger: Ledger, *, grad: bool, shadow: bool = False, again: bool = False) -> None:
        """h [T, D] is held before; after it the next h in its place, and with `grad` all of `saved`."""
        h, mode = self._bf16(self.shape.hidden_size), {"grad": grad, "shadow": shadow, "again": again}
        self._norm_forward(ledger, self.qkv, **mode)
        self._attend(ledger)
        ledger.free(FP32 * self.num_tokens * self.shape.num_heads, when=not grad)
        self.o.forward(ledger, **mode)
        ledger.free(self._bf16(self.o.in_features), when=not grad)
        ledger.take(h)
        ledger.free(h, when=shadow)
        self._norm_forward(ledger, self.gate_up, **mode)
        width, fused = self._bf16(self.down.in_features), self._casts(self.gate_up, self.down) and not shadow
        width = 0 if fused and self._never_written else width
        ledger.take(width)
        ledger.free(self._bf16(self.gate_up.out_features), when=not grad)
        self.down.forward(ledger, **mode, made_of=width * fused)
        ledger.free(width, when=not (fused or (grad and self.down.keeps_x)))
        ledger.free(h, when=not shadow)  # what o made, a name in models/fused.py until down has made the next
        ledger.take(h)
        ledger.free(h)
        ledger.free(
            self._bf16(self.qkv.out_features) + 2 * h, when=not grad
        )  # names that end with the layer's function

    def _norm_forward(self, ledger: Ledger, linear: LinearPass, *, grad: bool, shadow: bool, again: bool) -> None:
        """h is held before; after it the linear layer of its norm, too, and with `grad` what both save."""
        x, fused = self._bf16(self.shape.hidden_size), self._casts(linear) and not shadow
        x = 0 if fused and self._never_written else x
        with ledger.holding(FP32 * self.num_tokens):
            ledger.take(x)
            linear.forward(ledger, grad=grad, shadow=shadow, again=again, made_of=x * fused)
            ledger.free(x, when=not (fused or (grad and linear.keeps_x)))
        ledger.take(FP32 * self.num_tokens, when=grad)  # inverse root mean squares

    def _attend(self, ledger: Ledger) -> None:
        """qkv is held before; after it the output of attention and its logsumexp too."""
        with ledger.holding(self._turned + self._stored_kv * (MAX_GATHERED if self.paged else 1)):
            ledger.take(self._bf16(self.o.in_features) + FP32 * self.num_tokens * self.shape.num_heads)

    def infer(self, ledger: Ledger, *, first: bool) -> None:
        """As models/fused.py runs the layer: h, delta and the last layer's gate_up are held before and after it.

        Args:
            ledger: of the pass.
            first: there is no delta and no gate_up yet.
        """
        h, delta = self._bf16(self.shape.hidden_size), 0 if first else self._bf16(self.shape.hidden_size)
        self._project(ledger, self.qkv, taken=delta, ends=0 if first else self._bf16(self.qkv.out_features) + h)
        self._attend(ledger)
        ledger.free(FP32 * self.num_tokens * self.shape.num_heads)
        self.o.forward(ledger, grad=False)
        ledger.free(self._bf16(self.o.in_features) + delta)
        ends = 0 if first else self._bf16(self.gate_up.out_features) + h  # the embeddings stay
        self._project(ledger, self.gate_up, taken=h, ends=ends)
        width = self._bf16(self.shape.intermediate_size)
        if self._fuses(self.down):
            with ledger.holding(self.down.operand_bytes):
                self.down.multiply(ledger)
        else:
            with ledger.holding(width):
                self.down.forward(ledger, grad=False)
        ledger.free(h)  # the delta before it

    def _project(self, ledger: Ledger, linear: LinearPass, *, taken: int, ends: int) -> None:
        """h + delta, which is `taken`, and a linear layer of its norm; what they replace `ends`."""
        h, inverse_rms = self._bf16(self.shape.hidden_size), FP32 * self.num_tokens
        ledger.take(taken)
        if self._fuses(linear):
            with ledger.holding(linear.operand_bytes + inverse_rms):
                linear.multiply(ledger)
        else:
            with ledger.holding(h + inverse_rms):
                linear.forward(ledger, grad=False)
        ledger.free(ends)

    def _fuses(self, linear: LinearPass) -> bool:
        """Whether what makes X casts it."""
        dynamic = linear.quantized and not self.recipe.static_activation_scale
        return dynamic and self.recipe.fprop.left in PADDING

    def _casts(self, *linears: LinearPass) -> bool:
        """Whether X of these layers goes with its casts for FProp and for WGrad."""
        return saves_both(self.recipe) and all(linear.quantized and linear.casts_both for linear in linears)

    @property
    def _never_written(self) -> bool:
        """Whether what goes with its casts is not held beside them."""
        return self.recipe.fprop.left == BLOCK_1X128

    def backward(self, ledger: Ledger, *, accumulated: bool) -> None:
        """The gradient of the layer's output is held before; after it that of its input, and `saved` is free."""
        fused = self._casts(self.gate_up, self.down)
        self.down.backward(ledger, accumulated=accumulated and not fused)
        ledger.free(self.saved["x of down"] - self.down.saved)
        halves, made_of = self._bf16(self.gate_up.out_features), self._bf16(self.down.in_features)
        if fused:
            if not self._never_written:
                ledger.take(halves)
                ledger.free(made_of + halves)
                made_of = 0
            self.gate_up.backward_of_casts(ledger, made_of=made_of + halves)
            self._norm_backward(ledger)
            ledger.free(self.gate_up.gradient + self.down.gradient, when=accumulated)
        else:
            ledger.take(halves)
            ledger.free(made_of + halves)
            self._norm_linear_backward(ledger, self.gate_up, accumulated)
        self.o.backward(ledger, accumulated=accumulated)
        self._attention_backward(ledger)
        self._norm_linear_backward(ledger, self.qkv, accumulated)

    def _norm_linear_backward(self, ledger: Ledger, linear: LinearPass, accumulated: bool) -> None:
        """A linear layer and the norm before it; dY and the residual's gradient are held before, that of h after."""
        fused, grad_y = self._casts(linear), self._bf16(linear.out_features)
        linear.backward(ledger, accumulated=accumulated and not fused)
        ledger.free(grad_y + self._bf16(self.shape.hidden_size) * linear.keeps_x, when=not fused)
        self._norm_backward(ledger, fused=fused)
        ledger.free(grad_y + linear.gradient * accumulated, when=fused)

    def _norm_backward(self, ledger: Ledger, *, fused: bool = True) -> None:
        """A norm and the sum before it; their two gradients are held before, and one of them after."""
        T, D = self.num_tokens, self.shape.hidden_size
        ledger.take(self._bf16(D))
        ledger.touch(_gain_partials(T, D))
        ledger.free(2 * self._bf16(D) + FP32 * T)  # dY, h
        ledger.touch(self._bf16(D), when=not fused)  # the sum
        ledger.free(self._bf16(D))

    @property
    def _turned(self) -> int:
        """Queries after rotary, and the inverse root mean squares of heads."""
        T, shape = self.num_tokens, self.shape
        return self._bf16(self.o.in_features) + FP32 * T * (shape.num_heads + shape.num_kv_heads)

    @property
    def _stored_kv(self) -> int:
        """Keys and values of as many tokens, side by side."""
        per_head = BF16 * self.shape.head_dim + FP32 * (
            self.recipe.kv_cache == "fp8"
        )  # codes in FP16 or times their scale in BF16, and a scale
        return 2 * self.num_tokens * self.shape.num_kv_heads * per_head

    @property
    def _in_gradients(self) -> int:
        """Rows and blocks of scores within attention's backward, of sequences as long as they may be."""
        T, heads, kv_heads = self.num_tokens, self.shape.num_heads, self.shape.num_kv_heads
        if self.shape.head_dim not in WIDTHS:
            return FP32 * T * heads
        num_whole, rest = divmod(T, self.longest)
        blocks = heads // kv_heads * (num_whole * blocks_of(self.longest) + blocks_of(rest))
        return 2 * FP32 * T * heads + heads_at_once(blocks, kv_heads) * blocks * BLOCK_BYTES

    def _attention_backward(self, ledger: Ledger) -> None:
        """d_out is held before; after it the gradient of qkv, and what attention saved is free."""
        T, query, key = self.num_tokens, self.o.in_features, self.shape.num_kv_heads * self.shape.head_dim
        gradients, saved = self._bf16(query + 2 * key), self.saved
        with ledger.holding(self._turned + self._stored_kv):
            with ledger.holding(self._in_gradients):
                ledger.take(gradients)
            partials = _gain_partials(T * self.shape.num_heads, self.shape.head_dim)
            before_norm = (self._bf16(query) + partials) * self.shape.qk_norm
            ledger.touch(self._bf16(query + key) + before_norm)  # rotated back, and of q what it was before its norm
        ledger.free(self._bf16(query))  # d_out
        ledger.free(saved["qkv"] + saved["out of attention"] + saved["logsumexp"])
        ledger.take(gradients)  # side by side
        ledger.free(gradients)


@dataclass(frozen=True, kw_only=True)
class DecoderPass:
    """A whole decoder on T packed tokens, of which S are scored."""

    shape: DecoderConfig
    recipe: Recipe
    num_tokens: int
    """T."""
    num_scored: int
    """S: sampled tokens, whose log-probabilities are wanted; 0 where lm_head does not run."""
    longest: int | None = None
    """Tokens of its longest sequence; None: all."""
    recompute: bool = False
    """Layers and logits are computed again in the backward."""
    paged: bool = False
    """A prefill or decode of the engine: S sequences, each of which wants its logits."""

    def forward(self, *, shadow: bool = False) -> int:
        """Most bytes of a forward without gradients, by models/fused.py but in the shadow."""
        ledger = Ledger()
        self._forward(ledger, grad=False, shadow=shadow)
        return ledger.most

    def update(self, *, accumulated: bool) -> int:
        """Most bytes of forward and backward.

        Args:
            accumulated: the gradients are there from an earlier microbatch, and not counted here.
        """
        ledger, T, D = Ledger(), self.num_tokens, self.shape.hidden_size
        self._forward(ledger, grad=True)
        self._head_backward(ledger, accumulated)
        for layer in reversed(self.layers):
            if self.recompute:
                layer.forward(ledger, grad=True, again=True)
                ledger.free(BF16 * T * D)  # the next h, which the layer above has had
            layer.backward(ledger, accumulated=accumulated)
        table = FP32 * self.shape.vocab_size * D
        ledger.take(table)
        ledger.touch(FP32 * T * D)  # the gradient in FP32, before it is added to the rows
        return ledger.most

    @property
    def saved_bytes(self) -> int:
        """What is held between forward and backward."""
        ledger = Ledger()
        self._forward(ledger, grad=True)
        return ledger.held

    @cached_property
    def layers(self) -> list[LayerPass]:
        """In order."""
        return [
            LayerPass(
                shape=self.shape,
                recipe=self.recipe,
                index=index,
                num_tokens=self.num_tokens,
                longest=min(self.longest or self.num_tokens, self.num_tokens),
                paged=self.paged,
            )
            for index in range(self.shape.num_layers)
        ]

    def _forward(self, ledger: Ledger, *, grad: bool, shadow: bool = False) -> None:
        """With `grad` all that the backward reads is held after it."""
        T, S, D, V = self.num_tokens, self.num_scored, self.shape.hidden_size, self.shape.vocab_size
        h = BF16 * T * D
        ledger.take(FP32 * T * self.shape.head_dim + h)  # cos and sin, the embeddings
        fused = not grad and not shadow
        for layer in self.layers:
            if fused:
                layer.infer(ledger, first=layer.index == 0)
            else:
                layer.forward(ledger, grad=grad and not self.recompute, shadow=shadow)
                ledger.take(h, when=grad and self.recompute)
        if fused:
            last = self.layers[-1]
            ledger.take(h)  # h + delta
            ledger.free(BF16 * T * (last.qkv.out_features + last.gate_up.out_features) + 2 * h)
        ledger.take(h + FP32 * T)
        if not grad:
            ledger.free(h * (2 if fused else 1) + FP32 * T + FP32 * T * self.shape.head_dim)
        kept = self._kept_by_head if grad else 0
        ledger.take(BF16 * S * D + 3 * INT64 * S + kept)
        sums = (2 if kept else 3) * FP32 * -(-V // lm_head.BLOCK_V) * S  # the largest logits are kept with the weights
        ledger.touch(sums + FP32 * S * V if self.paged else sums)
        ledger.take((FP32 + INT64 + FP32) * S)
        ledger.free(BF16 * T * D)  # the normalised h

    def _head_backward(self, ledger: Ledger, accumulated: bool) -> None:
        """After it the gradient of the last layer's output is held, and the tied embedding's."""
        T, S, D, V = self.num_tokens, self.num_scored, self.shape.hidden_size, self.shape.vocab_size
        if S:
            ledger.take(FP32 * V * D)
            with ledger.holding(FP32 * S * D):
                before, last = (0, 0) if self._kept_by_head else self._grad_logits()
                ledger.touch(before)
                with ledger.holding(last):
                    ledger.take(BF16 * S * D)
            ledger.free(self._kept_by_head)
            if accumulated and not self.shape.tied_embeddings:
                ledger.free(FP32 * V * D)
            ledger.free(BF16 * S * D + (INT64 + INT64) * S)  # hidden states of the scored, tokens, logsumexp
        ledger.take(BF16 * T * D)
        ledger.free(BF16 * S * D + (INT64 + 2 * FP32) * S)
        ledger.take(BF16 * T * D)
        ledger.touch(_gain_partials(T, D))
        ledger.free(2 * BF16 * T * D + FP32 * T)

    @property
    def _kept_by_head(self) -> int:
        """Bytes from which the backward makes the gradients of logits, in their place; 0 where it multiplies again."""
        return 0 if self.recompute else kept_bytes(self.num_scored, self.shape.vocab_size)

    def _grad_logits(self) -> tuple[int, int]:
        """Bytes of the gradients of logits: two chunks, since one ends when the next is there, and the last one."""
        S, V = self.num_scored, self.shape.vocab_size
        columns = lm_head.chunk_columns(S)
        widths = [min(columns, V - start) for start in range(0, V, columns)]
        pairs = [a + b for a, b in pairwise([0, *widths])]
        return BF16 * S * max(pairs), BF16 * S * widths[-1]


def scored_counts(num_tokens: int, vocabulary: int) -> list[int]:
    """Scored ones among so many tokens that may take most: all, and the most whose weights lm_head keeps."""
    return sorted({num_tokens, min(num_tokens, most_kept(vocabulary))}, reverse=True)


def _gain_partials(num_rows: int, width: int) -> int:
    """Bytes of what programs of a norm's backward find for the gain, of which there is one for some rows each."""
    rows = max(1, min(32, TILE_ELEMENTS // 2 ** (width - 1).bit_length()))
    return FP32 * width * -(-num_rows // (rows * -(-num_rows // (rows * BACKWARD_PROGRAMS))))
