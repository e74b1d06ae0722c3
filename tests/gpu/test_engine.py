"""The engine on a GPU: paged kernels against references, recorded steps against plain ones."""

import random

import pytest
import torch

from kernel_checks import relative_error
from openk3.config import LinearAttnConfig, preset
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import K3, cast
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


@pytest.fixture(scope="module")
def model():
    attn = LinearAttnConfig(full_attn_layers=(3, 5), num_heads=4, head_dim=64)
    sizes = {"hidden_size": 256, "routed_expert_hidden_size": 128, "kv_lora_rank": 128}
    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    sizes |= {"initializer_range": 0.1, "num_nextn_predict_layers": 1}
    config = preset("nano", linear_attn=attn, **sizes, **heads)
    return cast(K3(config, seed=3), torch.bfloat16).eval().cuda()


def answers(model, **options):
    config = EngineConfig(hash_block=16, num_pages=400, max_running=8, **options)
    return answers_of(Engine(model, config))


def answers_of(engine):
    rng = random.Random(0)
    logprobs = {}
    for i in range(12):
        ids = tuple(rng.randrange(200) for _ in range(rng.choice((1, 5, 40, 90))))
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
        engine.add(Request(f"r{i}", ids, params))
        logprobs[f"r{i}"] = []
    ids = {name: [] for name in logprobs}
    while engine.busy:
        for output in engine.step():
            assert output.error is None
            ids[output.request_id] += output.new_ids
            logprobs[output.request_id] += [x.chosen for x in output.logprobs or ()]
    return ids, logprobs


def agree(one, other):
    """Batches differ in their rows, so floats do; until a near-tie flips, the words agree."""
    same = 0
    for name, wanted in one[0].items():
        got = other[0][name]
        until = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), 12)
        same += until
        pairs = zip(other[1][name][:until], one[1][name][:until], strict=True)
        assert all(abs(a - b) < 0.1 for a, b in pairs)
    assert same > 0.7 * 12 * len(one[0])


@pytest.fixture(scope="module")
def plain(model):
    return answers(model, cuda_graphs=False, overlap=False, two_phase=False)


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
def test_every_way_to_run_a_step_gives_the_same_answers(model, plain, options):
    """Recorded steps, steps launched ahead of the last one's tokens, drafts of both sources."""
    agree(plain, answers(model, **options))


def test_warming_up_leaves_nothing_behind(model, plain):
    engine = Engine(model, EngineConfig(hash_block=16, num_pages=400, max_running=8))
    engine.warm_up()
    agree(plain, answers_of(engine))


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
