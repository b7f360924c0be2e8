"""One decoder layer of any family: norms, attention, feed-forward, as separate operators or one kernel of the back end.

A layer knows its weights, and nothing of plans, caches or positions: the loop (`skipdecode.model.layer_loop`) says what
runs, and a view (`skipdecode.kv.view`) holds keys, values and positions.

B rows, T tokens, D width, H query heads, G key/value heads, K head dim, F feed-forward width.
"""

from torch import Tensor, nn

from skipdecode.backends.backend import FusedLayer, LayerNorms, LayerShape
from skipdecode.backends.rope import apply_rotary
from skipdecode.config.model import DecoderConfig
from skipdecode.kv.view import KVView, sliding_window, window_of
from skipdecode.model.linear import Linear


def make_norm(config: DecoderConfig, width: int) -> nn.LayerNorm | nn.RMSNorm:
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=config.norm_epsilon)
    return nn.LayerNorm(width, eps=config.norm_epsilon, elementwise_affine=config.norm_affine)


def kernel_shape(config: DecoderConfig, rotary_table: Tensor | None, window: int | None = None) -> LayerShape:
    """The shape of a layer, for the back end's kernels."""
    heads = (config.num_attention_heads, config.num_kv_heads, config.head_dim)
    return LayerShape(*heads, config.norm_epsilon, config.is_pre_norm, config.norm, config.mlp, rotary_table, window)


class Layer(nn.Module):
    """Attention and feed-forward, either of which a plan may skip. Query, key and value projections are fused into one,
    and so are gate and up projections."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        width, gates, window = config.hidden_size, 2 if config.is_gated else 1, config.layer_window(number)
        self.config = config
        self.variant = None if window is None else sliding_window(window, config.head_dim)
        self.attn_norm = make_norm(config, width)
        self.qkv = Linear(width, config.q_dim + 2 * config.kv_dim, bias=config.qkv_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.has_qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.has_qk_norm else None
        self.out_proj = Linear(config.q_dim, width, bias=config.out_bias)
        self.attn_out_norm = make_norm(config, width) if config.has_sublayer_norms else None
        self.ffn_norm = make_norm(config, width)
        self.fc1 = Linear(width, gates * config.ffn_dim, bias=config.mlp_bias, is_gated=gates == 2)
        self.fc2 = Linear(config.ffn_dim, width, bias=config.mlp_bias)
        self.ffn_out_norm = make_norm(config, width) if config.has_sublayer_norms else None
        self.kernel: FusedLayer | None = None
        self.query_kernel: FusedLayer | None = None

    def fuse(self, rotary_table: Tensor | None, query: Linear | None = None) -> None:
        """Makes the layer one kernel if the back end has one; `query` as in `forward`."""
        shape = kernel_shape(self.config, rotary_table, window_of(self.variant))

        def fused(first: Linear) -> FusedLayer | None:
            products = [linear.product() for linear in (first, *self.linears[1:])]
            norms = LayerNorms(
                self.attn_norm, self.ffn_norm, self.q_norm, self.k_norm, self.attn_out_norm, self.ffn_out_norm
            )
            return first.backend.fuse(shape, norms, products)

        self.kernel = fused(self.qkv)
        self.query_kernel = None if query is None else fused(query)

    @property
    def linears(self) -> list[Linear]:
        """The linear layers in the order in which they run."""
        return [self.qkv, self.out_proj, self.fc1, self.fc2]

    def forward(
        self, h: Tensor, kv: KVView, number: int, *, attends: bool, runs_ffn: bool, query: Linear | None = None
    ) -> Tensor:
        """Attention, feed-forward or both for h [B, T, D]; a kernel works in place. FSDP gathers the layer's weights
        for this call.

        `number`: the layer's number. `query`: SwiftKV's query projection, where K and V of the tokens are stored
        already.
        """
        kernel = self.kernel if query is None or not attends else self.query_kernel
        if kernel is not None and kv.has_kernels:
            return kv.run_fused([kernel], h, [number], attends=attends, runs_ffn=runs_ffn)
        if attends:
            h = self._attend(h, kv, number, query)
        return self.feed(h) if runs_ffn else h

    def store(self, h: Tensor, kv: KVView, number: int) -> None:
        """Stores K and V of h [B, T, D], and does nothing else."""
        if self.kernel is not None and self.kernel.store is not None and kv.stores_by_kernel:
            return kv.store_by_kernel(self.kernel.store, h, {0: number})
        _, k, v = self._project(h, kv, number)
        return kv.store(number, k, v)

    def keys(self, k: Tensor, kv: KVView, number: int) -> Tensor:
        """Projected keys [B, G, T, K] -> keys as they are stored: normed, with the rotary embedding of their
        positions."""
        return apply_rotary(k if self.k_norm is None else self.k_norm(k), kv.rotations[number])

    def _project(self, h: Tensor, kv: KVView, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, T, D] -> q [B, H, T, K], k and v [B, G, T, K]."""
        c = self.config
        x = self.qkv(self.attn_norm(h) if c.is_pre_norm else h)
        q, k, v = x.split([c.q_dim, c.kv_dim, c.kv_dim], dim=-1)
        return self._queries(q, kv, number), self.keys(self._by_head(k), kv, number), self._by_head(v)

    def _queries(self, q: Tensor, kv: KVView, number: int) -> Tensor:
        q = self._by_head(q)
        return apply_rotary(q if self.q_norm is None else self.q_norm(q), kv.rotations[number])

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, T, heads x K] -> [B, heads, T, K]."""
        return x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def _attend(self, h: Tensor, kv: KVView, number: int, query: Linear | None) -> Tensor:
        if query is None:
            out = kv.attend(number, *self._project(h, kv, number), self.variant)
        else:
            out = kv.attend(number, self._queries(query(self.attn_norm(h)), kv, number), None, None, self.variant)
        x = out.transpose(1, 2).flatten(2)
        if self.attn_out_norm is not None:
            made: Tensor = self.attn_out_norm(self.out_proj(x))
            return h + made
        h = self.out_proj(x, residual=h)
        return h if self.config.is_pre_norm else self.attn_norm(h)

    def feed(self, h: Tensor) -> Tensor:
        """The feed-forward block: [B, T, D] -> [B, T, D]."""
        return self.post_norm(self.add_feed(h))

    def add_feed(self, h: Tensor) -> Tensor:
        """h + FFN(norm(h)); FFN-SkipLLM compares it with h (`ffn_executor`)."""
        x = self.ffn_norm(h) if self.config.is_pre_norm else h
        inner = self.fc1(x, activation=self.config.mlp)
        if self.ffn_out_norm is not None:
            made: Tensor = self.ffn_out_norm(self.fc2(inner))
            return h + made
        added: Tensor = self.fc2(inner, residual=h)
        return added

    def post_norm(self, h: Tensor) -> Tensor:
        """The norm after the block in post-norm models (OPT-350m)."""
        return h if self.config.is_pre_norm else self.ffn_norm(h)
