"""The choices of a run, and what each verdict means for them."""

from __future__ import annotations

from studies.harness.advice import Choice, Point
from studies.harness.findings import PLAN, Outcome


def _p(source: str, *ids: str, yes: str, no: str, same: str = "") -> Point:
    """yes, no, same: what is advised if the claims are confirmed, contradicted, equivalent."""
    advice: dict[Outcome, str] = {"confirmed": yes, "contradicted": no}
    return Point(source, ids, advice | ({"equivalent": same} if same else {}))


def _costs(id: str, what: str) -> Point:
    """Of a claim that something in FP8 costs held-out loss."""
    return _p(
        "failure_modes",
        id,
        yes=f"Keep {what} out of FP8: there it costs {{found}} nats.",
        no=f"Nothing was found against {what} in FP8: {{found}} nats, a lower loss.",
        same=f"Nothing was found against {what} in FP8 on this model: {{found}} nats.",
    )


CHOICES = (
    Choice(
        "Precision of the two sides",
        (
            _p(
                "precision_cases",
                "exact: case 3 is 0",
                "engine: case 3 is 0",
                yes="Give trainer and engine one FP8 spec in exact mode: every log-probability of a live engine is the "
                "trainer's, bit for bit.",
                no="Do not rely on exact mode: with one FP8 spec on both sides log-probabilities differed by {found}.",
            ),
            _p(
                "precision_cases",
                "003-1a",
                "003-1b",
                yes="In native mode put FP8 on both sides: they differ by {found} of what a BF16 trainer differs by.",
                no="In native mode leave the trainer in BF16: with FP8 on both sides they differ {found} as much.",
                same="In native mode FP8 on both sides differs as a BF16 trainer does: {found}.",
            ),
            _p(
                "precision_cases",
                "003-9a",
                "003-9b",
                yes="Two scale formats, one on each side, still differ less than a BF16 trainer does: {found}.",
                no="Never mix scale formats: with powers of two on one side and FP32 scales on the other, the sides "
                "differ {found} as much as with a BF16 trainer.",
            ),
            _p(
                "precision_cases",
                "003-22",
                yes="Know that an FP8 trainer's policy is not its BF16 policy: they are {found} nats of KL apart.",
                no="An FP8 trainer's policy is its BF16 policy: {found} nats of KL.",
            ),
            _p(
                "model_scale",
                "003-2a",
                yes="Measure the mismatch again on the model that you train: it grows with the model.",
                no="The mismatch of a small model is no less than a larger one's: it falls with the model.",
                same="The mismatch of a small model is that of a larger one: it does not grow with the model.",
            ),
            _p(
                "model_scale",
                "003-2b",
                yes="It grows faster where only the rollout is in FP8.",
                no="It grows faster where both sides are in FP8.",
                same="It grows alike where only the rollout and where both sides are in FP8.",
            ),
        ),
    ),
    Choice(
        "Scales of weights and activations",
        (
            _p(
                "scale_formats",
                "000-2",
                yes="Powers of two, 1x128 and 128x128, train as BF16 does: held-out loss is {found} nats off.",
                no="Do not expect BF16's loss with powers of two: it is {found} nats off.",
            ),
            _p(
                "gemm_error",
                "003-9",
                yes="For a smaller error of products take FP32 scales: powers of two make {found} of it.",
                no="For a smaller error of products take powers of two: they make {found} of that of FP32 scales.",
                same="The format of scales makes no difference to products of plain data: {found}.",
            ),
            _p(
                "scale_formats",
                "003-9b",
                yes="With outlier channels take FP32 scales: powers of two make {found} of their error.",
                no="With outlier channels take powers of two: {found} of the error of FP32 scales.",
                same="With outlier channels either format of scales will do: {found}.",
            ),
            _p(
                "scale_formats",
                "000-6a",
                yes="A scale per row does without outliers: its error is {found} of that of groups of 128.",
                no="Take groups of 128 even without outliers: a scale per row makes {found} of their error.",
            ),
            _p(
                "scale_formats",
                "000-6b",
                yes="With outlier channels take groups: a scale per row makes {found} of the error of groups of 128.",
                no="Groups do not help against outlier channels by much: a scale per row makes {found} of their error.",
            ),
            _p(
                "scale_formats",
                "000-7c",
                yes="Static scales will do, with outlier channels too: {found} of the error of dynamic ones.",
                no="Take dynamic scales where outliers may come: static ones make {found} of their error.",
            ),
            _p(
                "scale_formats",
                "000-14",
                yes="The preset `ironwood` trains as BF16 does: held-out loss is {found} nats off.",
                no="Do not expect BF16's loss of the preset `ironwood`: it is {found} nats off.",
            ),
        ),
    ),
    Choice(
        "Gradients in products of the backward",
        (
            _p(
                "gradient_direction",
                "000-3",
                yes="Quantize them to E5M2: it turns the gradient {found} as far as E4M3 with a scale per block.",
                no="Quantize them to E4M3 with a scale per block: E5M2 turns the gradient {found} as far.",
                same="E5M2 turns the gradient as far as E4M3 with a scale per block: {found}.",
            ),
            _p(
                "scale_formats",
                "000-3",
                yes="Trained, E5M2 is better too: with E4M3 held-out loss is {found} nats higher.",
                no="Trained, E4M3 is better: held-out loss is {found} nats from that with E5M2.",
                same="Trained, the two come to the same held-out loss: {found} nats.",
            ),
            _p(
                "gradient_direction",
                "003-27a",
                "003-27b",
                yes="Worry about the forward first: quantization of the backward turns the gradient {found} as far.",
                no="Do not neglect the backward: its quantization turns the gradient {found} as far as the forward's.",
            ),
            _p(
                "precision_cases",
                "003-27c",
                yes="The backward in FP8 costs no reward: {found} over 20 GRPO steps.",
                no="The backward in FP8 changes the reward by {found} over 20 GRPO steps.",
            ),
            _p(
                "scale_formats",
                "000-4b",
                yes="Round them to nearest: stochastic rounding costs {found} nats.",
                no="Round them stochastically: held-out loss is {found} nats off that of rounding to nearest.",
                same="Rounding them stochastically makes no difference: {found} nats.",
            ),
        ),
    ),
    Choice(
        "Gradients between ranks (`trainer.gradient_wire`)",
        (
            _p(
                "wire_formats",
                "002-26c",
                yes="`e4m3` will do: held-out loss is {found} nats off that of FP32.",
                no="Not `e4m3`: held-out loss is {found} nats off that of FP32.",
            ),
            _p(
                "wire_formats",
                "002-26a",
                yes="It sends {found} of FP32's bytes.",
                no="It saves less than it should: {found} of FP32's bytes.",
            ),
            _p(
                "wire_formats",
                "000-3",
                yes="Prefer `e5m2` to `e4m3`: it is {found} as wrong.",
                no="Prefer `e4m3` to `e5m2`, which is {found} as wrong.",
            ),
            _p(
                "wire_formats",
                "002-26e",
                yes="`bf16` costs nothing either: {found} nats.",
                no="`bf16` is no safe middle: {found} nats.",
            ),
        ),
    ),
    Choice(
        "Updated weights between ranks (`trainer.weight_gather`)",
        (
            _p(
                "wire_formats",
                "000-9b",
                yes="`e4m3` is free: ranks get the codes that products take, and training is the same bit for bit.",
                no="`e4m3` changes training: held-out loss by {found} nats.",
            ),
            _p(
                "wire_formats",
                "000-9a",
                yes="It sends {found} of BF16's bytes.",
                no="It saves less than it should: {found} of BF16's bytes.",
            ),
        ),
    ),
    Choice(
        "Master weights",
        (
            _p(
                "failure_modes",
                "BF16 masters",
                yes="Keep them in FP32: in BF16 they cost {found} nats of held-out loss.",
                no="BF16 will do.",
            ),
            _p(
                "failure_modes",
                "002-10c",
                yes="In FP8 they cost {found} nats.",
                no="In FP8 nothing is lost: {found} nats.",
                same="In FP8 they make no difference: {found} nats.",
            ),
            _p(
                "failure_modes",
                "002-12",
                yes="Wait for no alarm: training goes on to its last step, and only a comparison shows the loss.",
                no="It shows: training with BF16 masters ends early.",
            ),
        ),
    ),
    Choice(
        "Adam's moments",
        (
            _p(
                "failure_modes",
                "002-17a",
                yes="Keep m and v in FP32: in BF16 they cost {found} nats.",
                no="m and v may be in BF16: {found} nats.",
                same="m and v may be in BF16, which halves them: {found} nats.",
            ),
            _p(
                "failure_modes",
                "v without scales",
                yes="Never keep v as plain FP8 numbers: {found} nats.",
                no="v may be a plain FP8 number.",
            ),
            _p(
                "failure_modes",
                "002-8c",
                yes="With a scale per block v in FP8 still costs {found} nats.",
                no="With a scale per block v may be in FP8: {found} nats.",
                same="With a scale per block v in FP8 makes no difference here: {found} nats.",
            ),
            _p(
                "failure_modes",
                "002-17b",
                yes="m in FP8 costs {found} nats.",
                no="m may be in FP8: {found} nats.",
                same="m in FP8 makes no difference here: {found} nats.",
            ),
            _p(
                "failure_modes",
                "002-17c",
                yes="With a β₂ of 0.999 keep v out of BF16: {found} nats.",
                no="With a β₂ of 0.999 v may be in BF16: {found} nats.",
                same="With a β₂ of 0.999 v in BF16 makes no difference here: {found} nats.",
            ),
            _p(
                "failure_modes",
                "002-17d",
                yes="With a β₂ of 0.999 keep v out of FP8: {found} nats.",
                no="With a β₂ of 0.999 v may be in FP8: {found} nats.",
                same="With a β₂ of 0.999 v in FP8 makes no difference here: {found} nats.",
            ),
        ),
    ),
    Choice(
        "What else stays out of FP8",
        (
            _costs("002-7d", "softmax"),
            _costs("002-16a", "scores of the attention"),
            _costs("000-10", "the whole attention"),
            _costs("002-16b", "the mean of squares of RMSNorm"),
            _costs("002-16c", "the router"),
            _costs("002-27", "the residual stream"),
            _costs("002-28", "the embedding"),
            _costs("002-16d", "the output head"),
            _p(
                PLAN,
                "002-29",
                yes="A residual in FP8 would buy no speed either: {found}.",
                no="A residual in FP8 would save time: {found}.",
            ),
        ),
    ),
    Choice(
        "The accumulator of products",
        (
            _p(
                "gemm_error",
                "003-4",
                yes="Take kernels that move partial sums to FP32: one that never does has {found} of their error.",
                no="It makes little difference whether partial sums are moved to FP32: {found} of the error of adding.",
            ),
            _p(
                "gemm_error",
                "002-21a",
                yes="The rounding of operands does not hide it: the whole error is {found} of that of adding in FP32.",
                no="The rounding of operands hides most of it: the whole error is {found} of that of adding in FP32.",
            ),
            _p(
                "gemm_error",
                "002-21b",
                yes="Where all products are positive the whole error is {found}.",
                no="Even where all products are positive the whole error is {found}, not twice that of adding in FP32.",
            ),
        ),
    ),
    Choice(
        "A trainer in BF16 or FP32",
        (
            _p(
                "bf16",
                "001-2a",
                yes="BF16 loses nothing beside FP32: {found} nats of held-out loss.",
                no="BF16 costs accuracy: held-out loss is {found} nats off that of FP32.",
            ),
            _p(
                "bf16",
                "001-3d",
                yes="It takes {found} of the bytes, all state together.",
                no="Do not expect half of the memory: all state together takes {found} of the bytes.",
            ),
        ),
    ),
    Choice(
        "When FP8 pays",
        (
            _p(
                PLAN,
                "003-15",
                yes="Not with small batches: {found}.",
                no="With small batches too: {found}.",
            ),
            _p(
                PLAN,
                "000-1",
                yes="It halves memory and doubles throughput: {found}.",
                no="Expect neither half the memory nor twice the speed of a whole step: {found}.",
            ),
            _p(
                PLAN,
                "003-13",
                yes="It saves the trainer's weights nothing: {found}.",
                no="It makes the trainer's weights smaller: {found}.",
            ),
            _p(
                PLAN,
                "003-7",
                yes="It moves less through memory: {found}.",
                no="Training moves no less through memory: {found}.",
            ),
            _p(
                PLAN,
                "003-21",
                yes="Where masters and moments are on the host, FP8 may not fit where BF16 does: {found}.",
                no="Beside masters and moments on the host FP8 takes no more memory: {found}.",
            ),
        ),
    ),
)
