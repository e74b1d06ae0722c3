"""The engine on a GPU: paged kernels against references, recorded steps against plain ones."""

import copy
import random

import pytest
import torch

import openk3
from kernel_checks import relative_error
from openk3.config import LinearAttnConfig, preset
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import K3, cast
from openk3.ops.mla import chunks
from openk3.ops.mla.chunks import attend_chunks, hold
from openk3.ops.mla.paged import attend_paged

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("lengths", "tokens"), [([1], 1), ([700, 33, 0, 4096], 1), ([90, 17], 4)])
@pytest.mark.parametrize("heads", [3, 16, 96])
def test_paged_attention(lengths, tokens, heads):
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device="cuda").bfloat16()

    page, batch = 128, len(lengths)
    most = -(-max(lengths) // page)
    pages = torch.full((batch * most + 1, page * 576 + 64), torch.nan, device="cuda").bfloat16()
    pages = pages[:, : page * 576].unflatten(1, (page, 576))
    table = torch.randperm(batch * most, device="cuda").view(batch, most)
    for b, length in enumerate(lengths):
        for i in range(-(-length // page)):
            count = min(page, length - i * page)
            pages[table[b, i], :count] = normal(count, 576)
    q, kv_b = normal(batch, tokens, heads, 192), normal(heads * 256, 512) / 20
    held = torch.tensor(lengths, device="cuda")
    starts = (held - tokens).clamp(min=0)
    ours = attend_paged(q, kv_b, pages, table, starts, held, backend="triton")
    wide = [x.double() for x in (q, kv_b, pages)]
    wanted = attend_paged(*wide, table, starts, held, backend="reference")
    assert relative_error(ours, wanted) < 1e-2


@pytest.mark.parametrize("widths", [(128, 64, 128), (64, 32, 64), (64, 16, 96)])
@pytest.mark.parametrize(
    ("totals", "counts"), [([1], [1]), ([1000, 300, 7], [1000, 300, 7]), ([4096, 33], [500, 1])]
)
def test_prefill_attention(totals, counts, widths, monkeypatch):
    nope, rope, value = widths
    page, latent, heads = 128, 512, 5
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device="cuda").bfloat16()

    most = -(-max(totals) // page)
    pages = normal(len(totals) * most, page, latent + rope)
    table = torch.randperm(len(totals) * most, device="cuda").view(len(totals), most)
    sizes = torch.tensor([totals, counts], device="cuda")
    held = hold(table, sizes, totals, counts, page)
    q = normal(sum(counts), heads, nope + rope)
    kv_b = normal(heads * (nope + value), latent) / 20
    wide = [x.double() for x in (q, kv_b, pages)]
    wanted = attend_chunks(*wide, held, backend="reference")
    assert relative_error(attend_chunks(q, kv_b, pages, held, backend="flash"), wanted) < 1e-2
    monkeypatch.setattr(chunks, "MAX_EXPANDED", 2 * 200 * sum(totals))
    assert relative_error(attend_chunks(q, kv_b, pages, held, backend="flash"), wanted) < 1e-2


def config_of(**more):
    attn = LinearAttnConfig(full_attn_layers=(3, 5), num_heads=4, head_dim=64)
    sizes = {"hidden_size": 256, "routed_expert_hidden_size": 128, "kv_lora_rank": 128}
    sizes |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    return preset("nano", linear_attn=attn, initializer_range=0.1, **sizes, **more)


@pytest.fixture(scope="module")
def model():
    return cast(K3(config_of(num_nextn_predict_layers=1), seed=3), torch.bfloat16).eval().cuda()


@pytest.fixture(scope="module")
def truth(model):
    """The same weights in float32, by the references."""
    return cast(copy.deepcopy(model).cpu(), torch.float32)


def prompts():
    rng = random.Random(0)
    lengths = [rng.choice((1, 5, 40, 90)) for _ in range(12)]
    return [tuple(rng.randrange(200) for _ in range(length)) for length in lengths]


def answers(model, **options):
    config = EngineConfig(hash_block=16, num_pages=400, max_running=8, **options)
    return answers_of(Engine(model, config))


def answers_of(engine):
    """(ids, log-probabilities) of each prompt's answer."""
    found = {f"r{i}": ([], []) for i in range(12)}
    for name, ids in zip(found, prompts(), strict=True):
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
        engine.add(Request(name, ids, params))
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            found[output.request_id][0].extend(output.new_ids)
            found[output.request_id][1].extend(x.chosen for x in output.logprobs or ())
    return list(found.values())


@torch.no_grad()
def error(truth, answered):
    """(mean error of the log-probabilities, mean loss by what was chosen), both in float32's eyes.

    Answers may part at near-ties, so each is measured on its own words."""
    errors, losses = [], []
    for prompt, (ids, logprobs) in zip(prompts(), answered, strict=True):
        assert len(ids) == 12
        logp = truth(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logp.gather(1, torch.tensor(ids)[:, None])[:, 0]
        errors.append((own - torch.tensor(logprobs)).abs())
        losses.append(logp.amax(-1) - own)
    return float(torch.cat(errors).mean()), float(torch.cat(losses).mean())


@pytest.fixture(scope="module")
def plain(model, truth):
    return error(truth, answers(model, cuda_graphs=False, overlap=False, two_phase=False))


def as_near(found, plain):
    """Whether a way to run steps is as near to float32 as the plainest, which rounds as well."""
    return all(ours < 1.5 * its + 0.01 for ours, its in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"overlap": True},
        {"overlap": True, "cuda_graphs": False},
        {"num_drafts": 3, "cuda_graphs": False},
        {"num_drafts": 3},
        {"num_drafts": 3, "draft": "mtp"},
        {"num_drafts": 2, "draft": "mtp", "cuda_graphs": False},
    ],
    ids=str,
)
def test_every_way_to_run_a_step_is_as_near_to_float32(model, truth, plain, options):
    """Recorded steps, steps launched ahead of the last one's tokens, drafts of both sources."""
    assert as_near(error(truth, answers(model, **options)), plain)


def test_warming_up_leaves_nothing_behind(model, truth, plain):
    engine = Engine(model, EngineConfig(hash_block=16, num_pages=400, max_running=8))
    engine.warm_up()
    stats = engine.stats()
    assert (stats.steps, stats.cached_pages, stats.free_pages) == (0, 0, stats.pages)
    assert as_near(error(truth, answers_of(engine)), plain)


def test_packed_experts_answer_as_dequantised_ones(tmp_path):
    path, config = tmp_path / "model", config_of(moe_intermediate_size=128)
    openk3.save(cast(K3(config, seed=3), torch.bfloat16), path, mxfp4_experts=True)
    truth = openk3.load(path, dtype=torch.float32).eval()
    dequantised, packed = (
        error(truth, answers(openk3.load(path, device="cuda", dtype=torch.bfloat16, experts=form)))
        for form in ("dequant", "packed")
    )
    assert as_near(packed, dequantised)


def test_attention_that_does_not_see_the_first_position():
    rng = torch.Generator("cuda").manual_seed(1)
    pages = torch.randn(6, 128, 576, generator=rng, device="cuda").bfloat16()
    q = torch.randn(2, 1, 16, 192, generator=rng, device="cuda").bfloat16()
    kv_b = torch.randn(16 * 256, 512, generator=rng, device="cuda").bfloat16() / 20
    held = torch.tensor([2, 300], device="cuda")
    table = torch.arange(6, device="cuda").view(2, 3)
    ours, wanted = (
        attend_paged(*(x.to(dtype) for x in (q, kv_b, pages)), table, held - 1, held, first=1,
                     backend=backend)
        for dtype, backend in ((torch.bfloat16, "triton"), (torch.float64, "reference"))
    )  # fmt: skip
    assert relative_error(ours, wanted) < 1e-2
