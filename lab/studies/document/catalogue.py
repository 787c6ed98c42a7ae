"""The 82 claims of the project's four source documents, and where each is answered.

000: FP8 on Ironwood. 001: BF16 on TPUs. 002: what stays in BF16 and FP32. 003: unified FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.studies.document.findings import AUDIT, PLAN


@dataclass(frozen=True)
class Shown:
    """A claim that the code keeps or breaks, without a measurement.

    Attributes:
        outcome: confirmed or contradicted. why: in a line. by: the page or the test that shows it, from the
            repository's root.
    """

    outcome: str
    why: str
    by: str


@dataclass(frozen=True)
class Listed:
    """One claim of the four documents.

    Attributes:
        id: document and number, `003-16`. says: the claim.
        by: studies, `plan` and `audit`, which have a verdict on it.
        waits: what of it waits for a GPU, and why.
    """

    id: str
    says: str
    by: tuple[str, ...] = ()
    shown: Shown | None = None
    waits: str = ""


def _c(id: str, says: str, *by: str, shown: Shown | None = None, waits: str = "") -> Listed:
    return Listed(id, says, by, shown, waits)


IRONWOOD = (
    _c("000-1", "FP8 halves memory and doubles throughput of 16-bit formats", PLAN),
    _c(
        "000-2",
        "Quality is statistically like BF16; DeepSeek-V3's loss curves lie on each other",
        "scale_formats",
        waits="loss curves of a model of that size",
    ),
    _c(
        "000-3",
        "E4M3 in the forward, E5M2 for gradients",
        *("gradient_direction", "scale_formats", "wire_formats"),
    ),
    _c("000-4", "Round to nearest even, not stochastically", "scale_formats"),
    _c("000-5", "Coarse scales suffice; per axis is better than per tensor", "scale_formats"),
    _c(
        "000-6",
        "Groups of 1x128 are needed for pretraining, not for post-training",
        "scale_formats",
        waits="pretraining itself, which takes more tokens than a CPU can",
    ),
    _c(
        "000-7",
        "Static scales for weights and activations (`fixed,-224,224`), dynamic ones for gradients",
        "scale_formats",
    ),
    _c("000-8", "Products of MLP and attention projections dominate: quantize all of them", PLAN),
    _c(
        "000-9",
        "Gathering weights in FP8 cuts communication",
        "wire_formats",
        waits="the time that it saves; bytes are counted on a CPU",
    ),
    _c("000-10", "FP8 attention degrades quality even with the most careful recipe", "failure_modes"),
    _c("000-11", "and brings no speed: element-wise work bounds it", PLAN),
    _c(
        "000-12",
        "Faster products expose communication: retune overlap, offload activations, FSDP is enough, tile sizes",
        PLAN,
        waits="what retuning brings, which only real kernels and links show",
    ),
    _c("000-13", "3307 against 2590 tokens/s and chip on 256 chips, about 1.3 times", PLAN),
    _c("000-14", "A ready recipe to copy", "scale_formats"),
)
BF16 = (
    _c("001-1", "BF16 products are added in FP32 by default", "bf16"),
    _c("001-2", "Less time to convergence, no loss of accuracy", "bf16", waits="the time: a CPU has no BF16 units"),
    _c("001-3", "The range of FP32 in half the memory", "bf16"),
    _c("001-4", "Storing in BF16 saves memory and bandwidth; some ops are bandwidth bound", PLAN),
    _c("001-5", "FP32 to BF16 rounds to nearest even and overflows to infinity", "bf16"),
    _c("001-6", "A TPU's BF16 has no subnormals: they are flushed to zero", "bf16"),
    _c("001-7", "NaN and infinity survive the conversion", "bf16"),
    _c("001-8", "BF16 to FP32 is exact: 16 zero bits", "bf16"),
    _c(
        "001-9",
        "Checkpoints move to other hardware without conversion",
        shown=Shown(
            "confirmed",
            "what is written is BF16 in Hugging Face's format, bit for bit what was read",
            "tests/trainer/megatron/test_model.py",
        ),
        waits="reading it on other hardware than a CPU",
    ),
)
PRECISION_MAP = (
    _c("002-1", "E4M3 has 3 bits of mantissa and reaches 448; E5M2 reaches 57344", "failure_modes"),
    _c("002-2", "On an H100 FP8 has nearly twice the throughput of BF16", PLAN),
    _c("002-3", "Three families refuse FP8: long accumulators, wide reductions, second moments", "failure_modes"),
    _c("002-4", "The grain of FP8 near 1.0 is about 5e-3", "failure_modes"),
    _c("002-5", "BF16 has 8 bits of mantissa and a grain of 2^-8 x, FP32 one of 1.2e-7 x", "failure_modes", "bf16"),
    _c(
        "002-6",
        "An update survives from half the grain on; of 1e-7 to a weight of 1 FP8 is four orders short, BF16 two, and "
        "FP32 has five in hand",
        "failure_modes",
    ),
    _c("002-7", "A softmax gap of 15 has a tail of 3e-7: FP8 loses it, BF16 distorts it", "failure_modes"),
    _c("002-8", "Adam's v underflows in FP8 per block: a step of 3.93 in place of 1.34e-4", "failure_modes"),
    _c("002-9", "The walk-through: m 1.31e-4, v 8.587e-8, step 1.341e-4, w 0.731287", "failure_modes"),
    _c("002-10", "FP8 masters freeze; 10,000 steps lose 1.3", "failure_modes"),
    _c("002-11", "BF16 masters: one update in 20 lands; 0.05 to 0.15 nats are lost", "failure_modes"),
    _c("002-12", "The harm is silent: a plateau 0.05 nats too high", "failure_modes"),
    _c("002-13", "The script `fp8_failure_modes.py` and the output printed under it", "failure_modes"),
    _c("002-14", "With updates of 1e-2 an FP8 master follows; the threshold is 5e-3", "failure_modes"),
    _c("002-15", "FP8 is a decision of kernels: results leave as BF16", AUDIT),
    _c("002-16", "The precision map, 12 rows", AUDIT, "failure_modes"),
    _c(
        "002-17",
        "Backward and optimizer are uniformly FP32; nobody at scale does otherwise",
        *(PLAN, AUDIT, "failure_modes"),
    ),
    _c("002-18", "Softmax is the only op of the forward that escapes to FP32", AUDIT),
    _c("002-19", "Its code: RMSNorm and softmax in FP32, AdamW on FP32 masters, from which shadows are made", AUDIT),
    _c(
        "002-20",
        "Assert a finite loss every step, and pin the batch that fails",
        shown=Shown(
            "confirmed",
            "a loss that is not finite never reaches the optimizer, and its batch is kept as a capsule",
            "tests/rl/guard/test_guard.py",
        ),
    ),
    _c(
        "002-21",
        "Adding FP8 products in FP32 prevents catastrophic error",
        "gemm_error",
        waits="the accumulator of the hardware, which is emulated here",
    ),
    _c("002-22", "The 671B table: 17 bytes a parameter, 11.4 TB", PLAN),
    _c("002-23", "On 1,024 GPUs FP32 optimizer state is 11 GB each", PLAN),
    _c("002-24", "Forward weights from 2 bytes to 1 frees the budget", PLAN),
    _c("002-25", "ZeRO-1 shards masters and moments; the gather is the most communication-heavy part", PLAN),
    _c(
        "002-26",
        "Gradients go across nodes in FP8 with block scales, and are averaged in BF16 on arrival",
        "wire_formats",
        waits="the time that it saves between nodes",
    ),
    _c("002-27", "The error of an FP8 residual accumulates over 60 layers", "failure_modes", waits="60 trained layers"),
    _c("002-28", "An FP8 embedding loses rare tokens", "failure_modes"),
    _c("002-29", "Residual or softmax in FP8 buys no speed", PLAN),
)
UNIFIED = (
    _c("003-1", "FP8 on both sides removes the mismatch of quantization", "precision_cases"),
    _c(
        "003-2",
        "The mismatch of BF16 training and FP8 rollout grows from 30B to 1T",
        "model_scale",
        waits="models of that size",
    ),
    _c(
        "003-3",
        "Qwen3-4B and 30B-A3B are trained end to end",
        waits="both architectures are built and `fp8rl plan` says what they take; a CPU cannot run them",
    ),
    _c(
        "003-4",
        "Hopper's tensor cores accumulate FP8 products in FP22",
        "gemm_error",
        waits="what the hardware keeps; here an accumulator of 13 bits is emulated",
    ),
    _c("003-5", "FP8 halves weights and activations", PLAN),
    _c("003-6", "An H100 has 1979 TFLOP/s in FP8 against 989 in BF16", PLAN),
    _c("003-7", "FP8 moves less through HBM", PLAN),
    _c("003-8", "E4M3 is finer, E5M2 wider", "scale_formats"),
    _c(
        "003-9",
        "FP32 scales rather than powers of two (E8M0): precision, stability, inference checkpoints",
        *("gemm_error", "precision_cases", "scale_formats"),
    ),
    _c(
        "003-10",
        "The scale is max |X| / V_max; x / S is rounded to the nearest integer",
        shown=Shown(
            "contradicted",
            "the scale is (and equals TransformerEngine's for every BF16 maximum), but x / S is rounded to the FP8 "
            "grid, not to integers",
            "tests/numerics/test_quantize.py",
        ),
    ),
    _c("003-11", "Activations per token, weights per block, gradients per token, in E4M3", "scale_formats"),
    _c("003-12", "The scheme holds in fprop, dgrad and wgrad", "gemm_trace"),
    _c("003-13", "Transposed FP8 copies: weights do not shrink by 2", PLAN),
    _c("003-14", "High-precision copies of activations stay", PLAN),
    _c("003-15", "Small batches: quantization and launches make FP8 slower", PLAN),
    _c("003-16", "One FP8 product is wrong by about 0.0007", "gemm_error"),
    _c("003-17", "Errors accumulate from layer to layer, forward and backward", "gemm_trace"),
    _c(
        "003-18",
        "Harmless in SFT; in RL the gradient hangs on the difference of two log-probabilities and may point the wrong "
        "way",
        "gradient_direction",
    ),
    _c(
        "003-19",
        "Numerics differ between versions of TransformerEngine",
        waits="its FP8 products run on a GPU alone; versions are pinned, and sides compare theirs in a handshake",
    ),
    _c("003-20", "MLA in FP8 is immature", waits="no MLA model is built here, and its FP8 kernels run on a GPU alone"),
    _c("003-21", "Optimizer offload excludes fp8-param-gather: FP8 may need more memory than BF16", PLAN),
    _c("003-22", "KL at the first step is higher with FP8 training", "precision_cases"),
    _c(
        "003-23",
        "A table of 8 product shapes, cuBLAS 0.00067 to 0.00068, DeepGEMM 0.00024 to 0.00065: kernels do not differ "
        "much",
        "gemm_error",
        waits="the two libraries themselves",
    ),
    _c(
        "003-24",
        "Of all products at steps 0 and 1, fake FP8 against BF16 is two orders above real against fake FP8",
        "gemm_trace",
        waits="the real kernel, whose accumulator is emulated here",
    ),
    _c("003-25", "KL: cases 2, 3 and 4 alike, above case 1", "precision_cases", waits="case 4, on a CPU case 3"),
    _c(
        "003-26",
        "Clip fraction: cases 2, 3 and 4 alike, below case 1",
        "precision_cases",
        waits="case 4, on a CPU case 3",
    ),
    _c(
        "003-27",
        "Quantization of the forward matters more than of the backward",
        *("precision_cases", "gradient_direction"),
    ),
    _c(
        "003-28",
        "MoE of 30B-A3B (2 x 8 H20) and 235B-A22B (16 x 8 H20): a lower clip fraction, a narrower and steadier "
        "difference",
        PLAN,
        waits="clip fraction and difference of models of that size",
    ),
    _c(
        "003-29",
        "Judge by the clip fraction of TIS and by the absolute difference",
        shown=Shown("confirmed", "both are metrics of every step, and gates act on them", "docs/agreement.md"),
    ),
    _c(
        "003-30",
        "To be done: root causes; schemes with less error; hiding launches and quantization",
        shown=Shown(
            "confirmed", "`fp8rl attribute` says which op and cause a mismatch comes from", "docs/agreement.md"
        ),
        waits="hiding launches and quantization: the kernels that quantize as they multiply are compiled, never timed",
    ),
)
CATALOGUE: tuple[Listed, ...] = (*IRONWOOD, *BF16, *PRECISION_MAP, *UNIFIED)
