"""Norms, short convolution, MLA forms, AttnRes and the chunked loss."""

import pytest
import torch
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.attn_res import mix
from openk3.ops.conv import short_conv
from openk3.ops.loss import linear_cross_entropy, token_losses
from openk3.ops.mla import attend
from openk3.ops.norm import gated_head_norm, l2_norm, rms_norm, rms_norm_wide

F64 = torch.float64


class TestNorms:
    def test_the_two_cast_orders_differ_in_bf16(self):
        x = torch.randn(64, 32).bfloat16()
        weight = (1 + torch.randn(32) * 0.3).bfloat16()
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        assert torch.equal(rms_norm(x, weight, 1e-5), wide.bfloat16() * weight)
        after = rms_norm_wide(x, weight, 1e-5)
        assert torch.equal(after, (wide * weight.float()).bfloat16())
        assert not torch.equal(after, rms_norm(x, weight, 1e-5))

    def test_l2_eps_sits_inside_the_root_on_the_sum(self):
        tiny = torch.full((4,), 1e-3, dtype=F64)
        expected = 1e-3 / (4e-6 + 1e-6) ** 0.5
        torch.testing.assert_close(l2_norm(tiny), torch.full((4,), expected, dtype=F64))

    def test_gated_head_norm_casts_once(self):
        o, gate = torch.randn(3, 2, 8), torch.randn(3, 2, 8).bfloat16()
        weight = torch.rand(8)
        wide = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        expected = (wide * torch.sigmoid(gate.float())).bfloat16()
        assert torch.equal(gated_head_norm(o, weight, gate, 1e-5), expected)


class TestShortConv:
    def test_last_tap_multiplies_the_current_token(self):
        x, weight = torch.randn(1, 9, 3), torch.randn(3, 1, 4)
        y, _ = short_conv(x, weight)
        manual = sum(weight[:, 0, 3 - j] * F.pad(x, (0, 0, j, 0))[:, :9] for j in range(4))
        torch.testing.assert_close(y, F.silu(manual))

    @pytest.mark.parametrize("cuts", [[9], [1] * 9, [2, 3, 4], [5, 1, 3]])
    def test_state_carries_across_pieces_of_any_length(self, cuts):
        x, weight = torch.randn(2, 9, 3), torch.randn(3, 1, 4)
        whole, end = short_conv(x, weight, output_final_state=True)
        state, pieces, start = None, [], 0
        for n in cuts:
            piece = x[:, start : start + n]
            y, state = short_conv(piece, weight, initial_state=state, output_final_state=True)
            pieces.append(y)
            start += n
        torch.testing.assert_close(torch.cat(pieces, 1), whole)
        torch.testing.assert_close(state, end)
        torch.testing.assert_close(end, x[:, -4:])

    def test_packed_and_gradients(self):
        x = torch.randn(1, 8, 2, dtype=F64, requires_grad=True)
        weight = torch.randn(2, 1, 4, dtype=F64, requires_grad=True)
        cu = torch.tensor([0, 2, 2, 8])
        packed, final = short_conv(x, weight, cu_seqlens=cu, output_final_state=True)
        torch.testing.assert_close(packed[:, 2:], short_conv(x[:, 2:], weight)[0])
        assert final.shape == (3, 4, 2)
        assert torch.autograd.gradcheck(
            lambda a, w: short_conv(a, w, cu_seqlens=cu)[0], (x, weight)
        )


class TestMla:
    def inputs(self, batch=2, tokens=7, keys=7):
        torch.manual_seed(0)
        q = torch.randn(batch, tokens, 3, 5 + 2, dtype=F64)
        latent, rope = (
            torch.randn(batch, keys, 4, dtype=F64),
            torch.randn(batch, keys, 2, dtype=F64),
        )
        return q, latent, rope, torch.randn(3 * (5 + 6), 4, dtype=F64)

    @pytest.mark.parametrize(("tokens", "keys"), [(7, 7), (1, 7), (3, 7), (1, 1)])
    def test_absorbed_equals_expanded(self, tokens, keys):
        args = self.inputs(tokens=tokens, keys=keys)
        pair = [attend(*args, form=f, return_max_logits=True) for f in ("expanded", "absorbed")]
        torch.testing.assert_close(pair[0][0], pair[1][0])
        torch.testing.assert_close(pair[0][1], pair[1][1], check_dtype=False)
        assert pair[0][0].shape == (2, tokens, 3, 6)

    def test_packed_equals_separate_and_peak_is_the_largest(self):
        q, latent, rope, kv_b = self.inputs(batch=1)
        cu = torch.tensor([0, 3, 3, 7])
        o, peak = attend(q, latent, rope, kv_b, cu_seqlens=cu, return_max_logits=True)
        parts = [
            attend(q[:, a:b], latent[:, a:b], rope[:, a:b], kv_b, return_max_logits=True)
            for a, b in ((0, 3), (3, 7))
        ]
        torch.testing.assert_close(o, torch.cat([p[0] for p in parts], 1))
        torch.testing.assert_close(peak, torch.maximum(parts[0][1], parts[1][1]))

    def test_shapes_that_do_not_fit_are_refused(self):
        q, latent, rope, kv_b = self.inputs()
        with pytest.raises(InputError, match="kv_b"):
            attend(q, latent, rope, kv_b[:-1])
        with pytest.raises(InputError, match="keys"):
            attend(q, latent[:, :3], rope[:, :3], kv_b)


class TestAttnRes:
    def test_zero_query_is_the_plain_average(self):
        sources = [torch.randn(2, 3, 8) for _ in range(4)]
        mixed = mix(sources, torch.zeros(1, 8), torch.rand(8))
        torch.testing.assert_close(mixed, torch.stack(sources).mean(0))

    def test_gradients(self):
        tensors = [torch.randn(2, 6, dtype=F64, requires_grad=True) for _ in range(3)]
        query, norm = torch.randn(6, dtype=F64), torch.rand(6, dtype=F64)
        tensors += [query.requires_grad_(), norm.requires_grad_()]
        assert torch.autograd.gradcheck(lambda a, b, c, q, n: mix([a, b, c], q, n), tensors)

    @pytest.mark.parametrize(
        ("sources", "width"),
        [
            ([], 8),
            ([torch.zeros(1, 8)] * 17, 8),
            ([torch.zeros(1, 8), torch.zeros(2, 8)], 8),
            ([torch.zeros(1, 8)], 7),
        ],
    )
    def test_bad_sources_are_refused(self, sources, width):
        with pytest.raises(InputError):
            mix(sources, torch.zeros(width), torch.zeros(width))


class TestLoss:
    @pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
    def test_equals_cross_entropy_and_its_gradients(self, chunk_tokens):
        torch.manual_seed(0)
        hidden = torch.randn(2, 5, 6, dtype=F64, requires_grad=True)
        head = torch.randn(9, 6, dtype=F64, requires_grad=True)
        targets = torch.randint(0, 9, (2, 5))
        targets[1, 2:4] = -100
        ours = linear_cross_entropy(hidden, head, targets, chunk_tokens=chunk_tokens) * 0.5
        theirs = 0.5 * F.cross_entropy(
            (hidden @ head.T).flatten(0, 1), targets.flatten(), reduction="sum"
        )
        torch.testing.assert_close(ours, theirs)
        grads = [torch.autograd.grad(loss, (hidden, head)) for loss in (ours, theirs)]
        torch.testing.assert_close(*grads)
        each = token_losses(hidden, head, targets, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(each.sum() * 0.5, theirs.detach(), check_dtype=False)

    def test_a_target_outside_the_vocabulary_is_refused(self):
        with pytest.raises(InputError, match="target 9"):
            linear_cross_entropy(torch.zeros(1, 4), torch.zeros(9, 4), torch.tensor([9]))
