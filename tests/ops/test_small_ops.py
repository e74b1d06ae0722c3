"""Norms, short convolution, MLA forms, AttnRes and the chunked loss."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops import moe
from openk3.ops.attn_res import mix
from openk3.ops.attn_res.two_phase import block_partials
from openk3.ops.conv import short_conv
from openk3.ops.kda import kda
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

    @pytest.mark.parametrize(
        ("named", "wrong"),
        [
            (r"targets must lie in \[0, 9\); one is 9", {"targets": torch.tensor([[0], [9]])}),
            (r"targets must lie in \[0, 9\); one is -1", {"targets": torch.tensor([[0], [-1]])}),
            (r"targets must be \[2, 1\]", {"targets": torch.tensor([[0, 1]])}),
            ("targets must be of integers", {"targets": torch.zeros(2, 1)}),
            (r"head must be \[9, 4\]", {"head": torch.zeros(9, 5)}),
            ("head is torch.float64", {"head": torch.zeros(9, 4, dtype=F64)}),
            ("hidden must be of floating point", {"hidden": torch.zeros(2, 1, 4).int()}),
            ("chunk_tokens must be at least 1", {"chunk_tokens": -1}),
        ],
    )
    @pytest.mark.parametrize("loss", [linear_cross_entropy, token_losses])
    def test_what_does_not_fit_is_named(self, loss, named, wrong):
        right = {"hidden": torch.zeros(2, 1, 4), "head": torch.zeros(9, 4)}
        right["targets"] = torch.tensor([[0], [-100]])
        assert loss(**right).sum() == pytest.approx(math.log(9))
        with pytest.raises(InputError, match=named):
            loss(**right | wrong)

    def test_a_nan_that_does_not_count_stays_out(self):
        torch.manual_seed(0)
        hidden, head, targets = torch.randn(3, 4), torch.randn(9, 4), torch.tensor([1, -100, 2])
        wanted = linear_cross_entropy(hidden[::2], head, targets[::2])
        hidden[1] = torch.nan
        hidden.requires_grad_()
        ours = linear_cross_entropy(hidden, head, targets)
        torch.testing.assert_close(ours, wanted)
        (grad,) = torch.autograd.grad(ours, hidden)
        assert not grad[1].any()
        assert grad.isfinite().all()


class TestPrecision:
    """`torch.autocast` does not reach what is float32 by definition."""

    def test_autocast_changes_no_choice_and_no_state(self):
        torch.manual_seed(0)
        x, weight, bias = torch.randn(40, 64), torch.randn(16, 64), torch.zeros(16)
        sources, (query, norm) = torch.randn(3, 40, 64), torch.randn(2, 64)
        raw = {n: torch.randn(1, 40, 2, 8) for n in "qkvg"}
        raw |= {"beta": torch.randn(1, 40, 2), "A_log": torch.zeros(2)}

        def results():
            routing = moe.route(x, weight, bias, 4)
            state = kda(**raw, output_final_state=True)
            partials = block_partials(sources, query[None], norm[None])
            return [routing.ids, routing.weights, *state, mix(sources, query, norm), *partials]

        wanted = results()
        with torch.autocast("cpu", torch.bfloat16):
            ours = results()
        assert [torch.equal(a, b) for a, b in zip(ours, wanted, strict=True)] == [True] * 7

    @pytest.mark.parametrize("op", ["situ", "loss"])
    def test_a_second_derivative_is_refused_where_there_is_none(self, op):
        """Backward passes that keep intermediates would give a wrong one, and say nothing."""
        x = torch.randn(3, 4, requires_grad=True)
        wide = x * x
        targets = torch.tensor([0, 1, 2])
        y = moe.situ_glu(wide, x) if op == "situ" else linear_cross_entropy(wide, x, targets)
        (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    def test_layouts_cached_while_generating_serve_training(self):
        cu, weight = torch.tensor([0, 17, 36]), torch.randn(3, 1, 4)
        with torch.inference_mode():
            short_conv(torch.randn(1, 36, 3), weight, cu_seqlens=cu)
        x = torch.randn(1, 36, 3, requires_grad=True)
        short_conv(x, weight, cu_seqlens=cu)[0].sum().backward()
        assert x.grad is not None

    def test_a_norm_keeps_its_input_s_dtype(self):
        x, weight = torch.randn(3, 8).bfloat16(), 1 + torch.randn(8)
        assert rms_norm(x, weight, 1e-5).dtype == torch.bfloat16
        mixed = block_partials([x.double()], weight[None].double(), weight[None].double())
        torch.testing.assert_close(mixed[0][0], x.double(), rtol=1e-15, atol=0)

    def test_shapes_are_found_without_values(self):
        """Under a mode of fake tensors nothing looks at a value."""
        with FakeTensorMode():
            x, weights = torch.randn(6, 8), torch.rand(6, 2)
            ids = torch.zeros(6, 2, dtype=torch.int64)
            perm = moe.sort_by_expert(ids, 4)
            assert perm.offsets.shape == (4,)
            assert moe.permute(x, perm, 2).shape == (12, 8)
            assert moe.combine(torch.randn(12, 8), perm, weights).shape == (6, 8)
            assert linear_cross_entropy(x, torch.randn(9, 8), ids[:, 0]).shape == ()
