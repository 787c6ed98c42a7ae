"""The numbers of a model, and what all families read alike from a config.json."""

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
    """Equal runs of experts."""
    kept_groups: int
    """The number of groups that a token may go to."""
    factor: float
    """The chosen experts' probabilities are multiplied by it."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes that trainer, engine and checks need beside a model's tensors and ops."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading channels of a head that are rotated."""
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    """The embedding is also the output projection."""
    ffn_size: int = 0
    """Width of the dense MLPs; 0 where every layer has experts."""
    experts: int = 0
    """Routed experts of a layer; 0 in a dense model."""
    top_k: int = 0
    """Routed experts of a token."""
    expert_size: int = 0
    """Width of a routed expert."""
    dense_layers: int = 0
    """Leading layers with a dense MLP, in a model with experts."""
    shared_size: int = 0
    """Width of the experts that every token takes, together; 0 where there are none."""
    renormalize: bool = True
    """The top-k router probabilities are scaled to sum to one."""
    sigmoid_router: SigmoidRouter | None = None
    """None: routers take a softmax."""
    head_norms: Literal["each", "together"] | None = "each"
    """A norm of queries and keys is over each head, or over all heads of a token together; None: they have none."""
    joined: int = 1
    """Key-value heads whose rows, with those of their queries, lie together in the trainer's fused parameter: as many
    as fill a quantization block, where a head is narrower than one."""
    cpu_head_dim: int = 0
    """The width that SGLang's own model takes for a head on a CPU, whatever config.json says; 0: `head_dim`."""
    qkv_bias: bool = False
    """Queries, keys and values have biases."""
    zero_centered_norms: bool = False
    """RMSNorms store their weight zero-centered, and multiply by 1 + weight (`numerics.ops.one_plus`)."""
    shared_gate: bool = False
    """What the expert puts out that every token takes is multiplied by a gate of the token."""
    kept: tuple[str, ...] = ()
    """Beginnings of names of tensors that nothing here reads and that are written back as they are."""
    kept_in_layers: tuple[str, ...] = ()
    """The same of tensors within a layer, where names begin behind its number: `.self_attn.indexer.`"""
    tower: str = ""
    """The checkpoint's architecture if it has a tower for pictures beside this text model. The tower is only kept."""
    picture_tokens: tuple[int, ...] = ()
    """Those that stand for parts of a picture, in such a checkpoint."""
    draft_layers: int = 0
    """Layers behind the last one that predict further tokens, which nothing here trains or serves."""
    limit: str = "max_position_embeddings"
    """The key of config.json that gives `max_positions`, in messages, and why if it is another."""
    rope_scaling: Scaling | None = None
    """Rotation over a lengthened context."""
    own: tuple[Any, ...] = ()
    """Sizes that one family of ops alone has, each an object of a class of its own; see `of`."""

    def of(self, kind: type[S]) -> S:
        """Return the sizes of a family that has a class for them. Raises KeyError: the model has none of that class."""
        for each in self.own:
            if isinstance(each, kind):
                return each
        raise KeyError(f"found the sizes {self.own}, expected a {kind.__name__} among them")

    @property
    def attention_scale(self) -> float:
        """Return what the products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 * (self.rope_scaling.temperature if self.rope_scaling else 1.0)

    @property
    def plain_dim(self) -> int:
        """Channels of a head that are not rotated."""
        return self.head_dim - self.rotary_dim

    @property
    def moe(self) -> bool:
        return self.experts > 0

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts: the last ones."""
        return self.layers - self.dense_layers if self.moe else 0

    def has_experts(self, layer: int) -> bool:
        """Return whether layer 0 to `layers` - 1 has routed experts."""
        return self.moe and layer >= self.dense_layers

    def keeps(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is only kept: of a draft layer, or by its name."""
        numbers = range(self.layers, self.layers + self.draft_layers)
        beginnings = (*self.kept, *(f"model.layers.{number}." for number in numbers))
        return name.startswith(beginnings) or self.keeps_in_layer(name)

    @property
    def kept_modules(self) -> list[str]:
        """Return the names of the modules that hold `kept_in_layers`."""
        return [f"model.layers.{n}{part}".rstrip(".") for n in range(self.layers) for part in self.kept_in_layers]

    def keeps_in_layer(self, name: str) -> bool:
        """Return whether a tensor is kept that a layer has beside what is computed here."""
        return any(part in name for part in self.kept_in_layers)


def family_sizes(config: ConfigFile, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """All but the MLPs: the arguments of ModelSizes that the whole family reads alike."""
    return {
        "layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "joined": _joined(head_dim, kv_heads),
        "rotary_dim": head_dim,
        "vocab_size": config.size("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", default=1e-6),
        "rope_theta": config.rope_theta(),
        "max_positions": config.size("max_position_embeddings"),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def _joined(head_dim: int, kv_heads: int) -> int:
    """Heads of 64, as in Qwen2.5-0.5B and Llama-3.2-1B, fill a quantization block in pairs."""
    count = max(1, FP8_BLOCK // head_dim)
    return 1 if FP8_BLOCK % head_dim or kv_heads % count else count


def checked(config: ConfigFile, sizes: ModelSizes) -> ModelSizes:
    """Refuse heads that cannot be grouped or rotated, and more experts of a token than there are."""
    if sizes.heads % sizes.kv_heads:
        raise config.refusal("num_key_value_heads", sizes.kv_heads, f"a divisor of num_attention_heads = {sizes.heads}")
    if sizes.head_dim % 2:
        raise config.refusal("head_dim", sizes.head_dim, "an even number: rotary embeddings turn pairs")
    if sizes.top_k > sizes.experts:
        raise config.refusal("num_experts_per_tok", sizes.top_k, f"at most num_experts = {sizes.experts}")
    return sizes


def check_groups(config: ConfigFile, experts: int, groups: int, kept: int, top_k: int) -> None:
    """Refuse groups that experts do not divide into, and fewer experts in the kept ones than a token takes."""
    if experts % groups or (groups > 1 and experts // groups < 2):
        expected = f"a divisor of n_routed_experts = {experts} that leaves two of them or more in a group"
        raise config.refusal("n_group", groups, expected)
    if kept > groups:
        raise config.refusal("topk_group", kept, f"at most n_group = {groups}")
    if top_k > experts // groups * kept:
        expected = f"at most {experts // groups * kept}, the experts of topk_group = {kept} groups"
        raise config.refusal("num_experts_per_tok", top_k, expected)
