"""Attention over pages: the dense form, whatever page a latent lies in and whatever lies behind."""

import pytest
import torch

from kernel_checks import relative_error
from openk3.errors import InputError
from openk3.ops.mla import attend, paged
from openk3.ops.mla.paged import attend_paged

HEADS, NOPE, ROPE, VALUE, LATENT, PAGE, PAGES = 3, 8, 16, 12, 32, 8, 24


@pytest.fixture(params=["reference", "triton", "triton, as split as on a large GPU"])
def backend(request, monkeypatch):
    """The kernel runs in Triton's interpreter, which the table would rightly refuse."""
    if request.param != "reference":
        module = pytest.importorskip("openk3.ops.mla.triton_paged", exc_type=ImportError)
        monkeypatch.setattr(paged, "latent_attention_reference", module.latent_attention_triton)
    if "large" in request.param:
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
        monkeypatch.setattr(module, "MERGED", 2048)
        assert module._shares(1, 132) == module.MAX_SHARES == 128
    return "reference"


def problem(lengths, tokens, seed=0):
    """Dense latents, the same in poisoned pages in a random order, and queries."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    most = max(lengths)
    dense = normal(len(lengths), most, LATENT + ROPE)
    pool = torch.full((PAGES, PAGE * (LATENT + ROPE) + 40), torch.nan)
    pages = pool[:, : PAGE * (LATENT + ROPE)].unflatten(1, (PAGE, -1))
    order = torch.randperm(PAGES, generator=rng).tolist()
    table = torch.full((len(lengths), -(-most // PAGE) + 1), order[-1], dtype=torch.int32)
    for b, length in enumerate(lengths):
        for i in range(0, length, PAGE):
            page = order.pop(0)
            table[b, i // PAGE] = page
            count = min(PAGE, length - i)
            pages[page, :count] = dense[b, i : i + count]
    q = normal(len(lengths), tokens, HEADS, NOPE + ROPE)
    kv_b = normal(HEADS * (NOPE + VALUE), LATENT)
    return q, kv_b, dense, pages, table


@pytest.mark.parametrize(
    ("lengths", "tokens"), [([1], 1), ([8, 17, 40], 1), ([5, 33], 3), ([64], 2)]
)
def test_pages_are_the_dense_cache(backend, lengths, tokens):
    q, kv_b, dense, pages, table = problem(lengths, tokens)
    held = torch.tensor(lengths)
    o = attend_paged(q, kv_b, pages, table, held - tokens, held, backend=backend)
    for b, length in enumerate(lengths):
        seen = dense[b : b + 1, :length].double()
        wanted = attend(
            q[b : b + 1].double(), seen[..., :LATENT], seen[..., LATENT:], kv_b.double()
        )
        assert relative_error(o[b : b + 1], wanted) < 2e-6


def test_the_first_positions_can_be_hidden(backend):
    q, kv_b, dense, pages, table = problem([9, 40], 1)
    pages[table[:, 0].long(), 0] = 9.0
    held = torch.tensor([9, 40])
    o = attend_paged(q, kv_b, pages, table, held - 1, held, first=1, backend=backend)
    for b, length in enumerate((9, 40)):
        seen = dense[b : b + 1, 1:length].double()
        wanted = attend(
            q[b : b + 1].double(), seen[..., :LATENT], seen[..., LATENT:], kv_b.double()
        )
        assert relative_error(o[b : b + 1], wanted) < 2e-6


def test_filled_up_rows_and_padding_see_nothing_wrong(backend):
    """Row 0 has one token of three, row 1 is padding: poisoned positions never reach the output."""
    q, kv_b, dense, pages, table = problem([9, 8], 3)
    starts, lengths = torch.tensor([8, 0]), torch.tensor([9, 0])
    o = attend_paged(q, kv_b, pages, table, starts, lengths, backend=backend)
    seen = dense[:1, :9].double()
    wanted = attend(q[:1, :1].double(), seen[..., :LATENT], seen[..., LATENT:], kv_b.double())
    assert relative_error(o[:1, :1], wanted) < 2e-6
    assert bool(o.isfinite().all())
    assert torch.equal(o[1], torch.zeros_like(o[1]))


def test_wrong_shapes_are_named():
    q, kv_b, _, pages, table = problem([9, 8], 1)
    ends = torch.tensor([9, 8])
    with pytest.raises(InputError, match="do not fit 3 heads"):
        attend_paged(q, kv_b[:-1], pages, table, ends - 1, ends)
    with pytest.raises(InputError, match="must have 2 rows"):
        attend_paged(q, kv_b, pages, table, ends - 1, ends[:1])
