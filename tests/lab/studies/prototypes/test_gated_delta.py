"""The prototype of linear attention: one definition of a row, however the tokens come."""

import torch

from lab.studies.prototypes.gated_delta import Rows, State, gated_delta, recurrence, tiny_model
from lab.studies.prototypes.gated_delta_layer import GatedDeltaNet, Held, linear_attention, of_transformers


def test_chunks_and_single_tokens_have_the_bits_of_one_prefill() -> None:
    draw, heads, tokens = torch.Generator().manual_seed(0), 2, 150
    q, k, v = (torch.randn(heads, tokens, 32, generator=draw) for _ in range(3))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    g, beta = -torch.rand(heads, tokens, generator=draw), torch.rand(heads, tokens, generator=draw)
    rows, empty = Rows(q, k, v, g, beta), State.empty(heads, 32, 32)
    whole, _ = gated_delta(rows, empty)
    for lengths in ([96, 54], [64, *[1] * 86], [1] * 150):
        outputs, state = [], empty
        for piece in zip(*(x.split(lengths, 1) for x in rows), strict=True):
            output, state = gated_delta(Rows(*piece), state)
            outputs.append(output)
        assert torch.equal(torch.cat(outputs, 1), whole)
    exact = recurrence(Rows(*(x.double() for x in rows)))
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def test_a_layer_in_pieces_has_the_bits_of_the_whole_and_is_transformers_own_to_their_rounding() -> None:
    theirs = tiny_model().model.layers[0].linear_attn
    weights, sizes = of_transformers(theirs)
    x = torch.randn(150, 128, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(GatedDeltaNet(weights, sizes)(x), theirs(x[None])[0], rtol=1e-4, atol=1e-6)
    whole, held, outputs = GatedDeltaNet(weights, sizes)(x), Held.empty(weights, sizes), []
    for piece in x.split([96, 40, *[1] * 14]):
        output, held = linear_attention(piece, weights, sizes, held)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs), whole)
