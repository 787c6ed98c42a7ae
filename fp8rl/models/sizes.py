"""The sizes of a model, and the keys of config.json that all families read in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fp8rl.models.config_file import ConfigFile
from fp8rl.models.tensors import FP8_BLOCK
from fp8rl.numerics.ops.rope import Scaling

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class SigmoidRouter:
    """A router that chooses by sigmoid + bias (`numerics.ops.route_sigmoid`) instead of by softmax."""

    groups: int
    """The number of equal groups of experts."""
    kept_groups: int
    """The number of groups that a token may go to."""
    factor: float
    """The factor by which the chosen experts' probabilities are multiplied."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model that trainer, engine and checks need in addition to its tensors and ops."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """Number of leading channels of a head that are rotated."""
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    """True if the embedding is also the output projection."""
    ffn_size: int = 0
    """Width of the dense MLPs; 0 where every layer has experts."""
    experts: int = 0
    """Number of routed experts of a layer; 0 in a dense model."""
    top_k: int = 0
    """Number of routed experts that a token takes."""
    expert_size: int = 0
    """Width of a routed expert."""
    dense_layers: int = 0
    """Number of leading layers with a dense MLP, in a model with experts."""
    shared_size: int = 0
    """Total width of the experts that every token takes; 0 where there are none."""
    renormalize: bool = True
    """True if the top-k router probabilities are scaled to sum to one."""
    sigmoid_router: SigmoidRouter | None = None
    """The sizes of a router with sigmoids; None: routers take a softmax."""
    head_norms: Literal["each", "together"] | None = "each"
    """A norm of queries and keys is over each head, or over all heads of a token together; None: there is no norm."""
    joined: int = 1
    """Number of key-value heads whose rows are together in the trainer's fused parameter, with the rows of their
    queries: as many as fill a quantization block, if a head is narrower than a block."""
    cpu_head_dim: int = 0
    """The width that SGLang's own model takes for a head on a CPU, whatever config.json says; 0: `head_dim`."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases."""
    zero_centered_norms: bool = False
    """True if RMSNorms store their weight zero-centered, and multiply by 1 + weight (`numerics.ops.one_plus`)."""
    shared_gate: bool = False
    """True if a gate of each token multiplies the output of the expert that every token takes."""
    kept: tuple[str, ...] = ()
    """Beginnings of the names of tensors that no code reads, and that are written back unchanged."""
    kept_in_layers: tuple[str, ...] = ()
    """Parts of the names of such tensors in a layer, such as `.self_attn.indexer.`"""
    tower: str = ""
    """The checkpoint's architecture if it also has an image encoder (a tower), which nothing here uses; else empty."""
    picture_tokens: tuple[int, ...] = ()
    """The tokens for parts of a picture, in a checkpoint with a tower."""
    draft_layers: int = 0
    """Number of layers after the last layer that predict further tokens. Nothing here trains or serves them."""
    limit: str = "max_position_embeddings"
    """The key of config.json that gives `max_positions`, for messages; for an unusual key also the reason."""
    rope_scaling: Scaling | None = None
    """The method by which the context was lengthened; None: it was not."""
    own: tuple[Any, ...] = ()
    """Sizes that only one family of ops has, each an object of a class of its own; see `of`."""

    def of(self, kind: type[S]) -> S:
        """Return the object of class `kind` in `own`. Raises KeyError if the model has none."""
        for sizes in self.own:
            if isinstance(sizes, kind):
                return sizes
        raise KeyError(f"found the sizes {self.own}, expected a {kind.__name__} among them")

    @property
    def attention_scale(self) -> float:
        """The factor by which the products of queries and keys are multiplied."""
        return self.head_dim**-0.5 * (self.rope_scaling.temperature if self.rope_scaling else 1.0)

    @property
    def plain_dim(self) -> int:
        """Number of channels of a head that are not rotated."""
        return self.head_dim - self.rotary_dim

    @property
    def moe(self) -> bool:
        return self.experts > 0

    @property
    def moe_layers(self) -> int:
        """The number of layers with routed experts. They are the last layers."""
        return self.layers - self.dense_layers if self.moe else 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has routed experts."""
        return self.moe and layer >= self.dense_layers

    def keeps(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is only kept, because no side uses it, such as a draft layer's."""
        numbers = range(self.layers, self.layers + self.draft_layers)
        beginnings = (*self.kept, *(f"model.layers.{number}." for number in numbers))
        return name.startswith(beginnings) or self.keeps_in_layer(name)

    @property
    def kept_modules(self) -> list[str]:
        """Return the names of the modules that hold `kept_in_layers`."""
        return [f"model.layers.{n}{part}".rstrip(".") for n in range(self.layers) for part in self.kept_in_layers]

    def keeps_in_layer(self, name: str) -> bool:
        """Return whether a tensor is one of `kept_in_layers`."""
        return any(part in name for part in self.kept_in_layers)


def family_sizes(
    config: ConfigFile, heads: int, kv_heads: int, head_dim: int, norm_eps: float = 1e-6, theta: float = 1e4
) -> dict[str, Any]:
    """Return all arguments of ModelSizes except the MLPs' arguments. Most architectures read them in the same way.
    norm_eps, theta: transformers' defaults for the norms' epsilon and the base of the rotation."""
    together = max(1, FP8_BLOCK // head_dim)  # heads of 64, as in Qwen2.5-0.5B and Llama-3.2-1B, fill a block in pairs
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "joined": 1 if FP8_BLOCK % head_dim or kv_heads % together else together,
        "rotary_dim": head_dim,
        "vocab_size": config.size("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", default=norm_eps),
        "rope_theta": config.rope_theta(theta),
        "max_positions": config.size("max_position_embeddings"),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def check_sizes(config: ConfigFile, sizes: ModelSizes) -> None:
    """Refuse heads that cannot be grouped or rotated, experts in no layer, and tokens that take more than there are."""
    if sizes.heads % sizes.kv_heads:
        raise config.refusal("num_key_value_heads", sizes.kv_heads, f"a divisor of num_attention_heads = {sizes.heads}")
    if sizes.rotary_dim % 2:
        raise config.refusal("head_dim", sizes.head_dim, "an even number: rotary embeddings turn pairs")
    if sizes.moe and sizes.dense_layers >= sizes.layers:
        expected = f"less than num_hidden_layers = {sizes.layers}"
        raise config.refusal("first_k_dense_replace", sizes.dense_layers, expected)
    if sizes.top_k > sizes.experts:
        raise config.refusal("num_experts_per_tok", sizes.top_k, f"at most the {sizes.experts} experts")


def sigmoid_router(
    config: ConfigFile, experts: int, groups: int, kept: int, top_k: int, factor: float
) -> SigmoidRouter:
    """Return a router with sigmoids. Refuse groups that do not divide the experts, or whose kept groups have fewer
    experts than a token takes. factor: the default of `routed_scaling_factor`."""
    if experts % groups or (groups > 1 and experts // groups < 2):
        expected = f"a divisor of n_routed_experts = {experts} that leaves two of them or more in a group"
        raise config.refusal("n_group", groups, expected)
    if kept > groups:
        raise config.refusal("topk_group", kept, f"at most n_group = {groups}")
    if top_k > experts // groups * kept:
        expected = f"at most {experts // groups * kept}, the experts of topk_group = {kept} groups"
        raise config.refusal("num_experts_per_tok", top_k, expected)
    factor = config.number("routed_scaling_factor", default=factor)
    return SigmoidRouter(groups=groups, kept_groups=kept, factor=factor)
