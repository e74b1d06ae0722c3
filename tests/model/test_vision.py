"""Pictures among tokens: packing isolates, the two forms of ids agree, misfits are refused."""

import pytest
import torch

from openk3.config import preset
from openk3.errors import InputError
from openk3.model import K3, DenseCache, cast
from openk3.model.media import splice
from openk3.model.vision import expand_media
from openk3.ops.loss import linear_cross_entropy
from small_models import VISION, seeing_model

GRIDS = torch.tensor([[1, 4, 2], [3, 2, 6], [1, 4, 2]])  # 2, 3 and 2 rows


@pytest.fixture(scope="module")
def model():
    return seeing_model()


@pytest.fixture(scope="module")
def pixels():
    num_patches = int(GRIDS.prod(1).sum())
    return torch.randn(num_patches, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def prompt(model, compact=True):
    media = model.config.media_placeholder_token_id
    ids = torch.tensor([[5, 6, media, 7, media, media, 8]])
    return ids if compact else expand_media(ids, GRIDS, model.config)


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_expansion(model):
    media = model.config.media_placeholder_token_id
    expected = [5, 6, media, media, 7, *[media] * 5, 8]
    assert prompt(model, compact=False).tolist() == [expected]
    assert expand_media(prompt(model)[0], GRIDS, model.config).tolist() == expected


@torch.no_grad()
def test_each_item_is_seen_alone(model, pixels):
    rows = model.images(pixels, GRIDS)
    assert rows.shape == (7, 64)
    pieces = pixels.split(GRIDS.prod(1).tolist())
    alone = [model.images(p, g[None]) for p, g in zip(pieces, GRIDS, strict=True)]
    close(rows, torch.cat(alone))
    assert not torch.allclose(alone[0], alone[2], atol=1e-2)


@torch.no_grad()
def test_equal_neighbours_in_one_batch(model, pixels):
    two = GRIDS[[0, 2]]
    pieces = pixels.split(GRIDS.prod(1).tolist())
    together = model.images(torch.cat([pieces[0], pieces[2]]), two)
    close(together, torch.cat([model.images(pieces[i], GRIDS[i : i + 1]) for i in (0, 2)]))


@torch.no_grad()
def test_position_matters_in_both_directions_and_in_time(model, pixels):
    still = pixels[:1].expand(16, 3, 4, 4)
    square = model.images(still, torch.tensor([[1, 4, 4]]))
    assert all(not torch.allclose(square[0], square[i], atol=1e-4) for i in (1, 2))
    two = model.images(still, torch.tensor([[2, 4, 2]]))
    assert not torch.allclose(two, model.images(still[:8], GRIDS[:1]), atol=1e-4)


@torch.no_grad()
def test_compact_and_expanded_ids_give_the_same_logits(model, pixels):
    images = {"pixel_values": pixels, "grid_thws": GRIDS}
    compact = model(prompt(model), **images)
    assert compact.shape[1] == 11
    assert torch.equal(compact, model(prompt(model, compact=False), **images))
    close(model(prompt(model), **images, logits_for="last"), compact[:, -1:])
    other = model(prompt(model), pixel_values=-pixels, grid_thws=GRIDS)
    close(other[:, :2], compact[:, :2])
    assert not torch.allclose(other[:, -1], compact[:, -1], atol=1e-3)


@torch.no_grad()
def test_packed_documents(model, pixels):
    """Compact ids grow, and so do the document boundaries and the padding mask."""
    ids = prompt(model)
    pieces = pixels.split(GRIDS.prod(1).tolist())
    packed = model(
        ids,
        cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32),
        pixel_values=pixels,
        grid_thws=GRIDS,
    )
    first = model(ids[:, :4], pixel_values=pieces[0], grid_thws=GRIDS[:1])
    second = model(ids[:, 4:], pixel_values=torch.cat(pieces[1:]), grid_thws=GRIDS[1:])
    close(packed, torch.cat([first, second], 1))


def test_the_padding_mask_grows_with_compact_ids(model, pixels):
    model.train()
    valid = torch.tensor([[1, 1, 1, 1, 1, 0, 1]], dtype=torch.bool)  # without the third item
    model.hidden(prompt(model), pixel_values=pixels, grid_thws=GRIDS, valid=valid)
    counted = {int(router.load.sum()) for router in model.routers().values()}
    model.eval()
    for router in model.routers().values():
        router.load.zero_()
        router.margin_counts.zero_()
    assert counted == {9 * model.config.num_experts_per_token}


@torch.no_grad()
def test_batched_rows_and_padding(model, pixels):
    """Two rows with pictures; padded positions are zero, as in the published splice."""
    media, pad = model.config.media_placeholder_token_id, model.config.pad_token_id
    ids = torch.tensor([[5, media, media, 6, 7, 8], [media, media, media, 9, pad, pad]])
    grids, count = GRIDS[:2], int(GRIDS[:2].prod(1).sum())
    both = model(ids, pixel_values=pixels[:count], grid_thws=grids)
    close(both[:1], model(ids[:1], pixel_values=pixels[:8], grid_thws=GRIDS[:1]))
    close(both[1:, :4], model(ids[1:, :4], pixel_values=pixels[8:count], grid_thws=GRIDS[1:2]))
    x = splice(model.embed_tokens(ids), ids, torch.ones(5, 64), model.config)
    assert not x[1, 4:].any()
    assert bool((x[ids == media] == 1).all())


@torch.no_grad()
def test_generation_sees_the_pictures_once(model, pixels):
    images = {"pixel_values": pixels, "grid_thws": GRIDS}
    options = {"max_new_tokens": 6, "temperature": 0.0, "stop_ids": []}
    short = model.generate(prompt(model), **images, **options)
    assert torch.equal(short[:, :7], prompt(model))
    long = model.generate(prompt(model, compact=False), **images, **options)
    assert torch.equal(short[:, 7:], long[:, 11:])
    ids = prompt(model, compact=False)
    for _ in range(6):
        chosen = model(ids, **images, logits_for="last").argmax(-1)
        ids = torch.cat([ids, chosen], 1)
    assert torch.equal(ids, long)


@torch.no_grad()
def test_the_limit_counts_rows_not_items(pixels):
    config = preset(
        "nano",
        hidden_size=64,
        routed_expert_hidden_size=32,
        vision=VISION,
        max_position_embeddings=10,
    )
    model = K3(config)
    with pytest.raises(InputError, match="11 tokens"):
        model(prompt(model), pixel_values=pixels, grid_thws=GRIDS)
    cache = DenseCache()
    model(prompt(model)[:, :4], pixel_values=pixels[:8], grid_thws=GRIDS[:1], state=cache)
    assert cache.num_tokens == 5


def test_every_vision_parameter_gets_a_gradient(pixels):
    model = K3(preset("nano", hidden_size=64, routed_expert_hidden_size=32, vision=VISION))
    ids = prompt(model, compact=False)
    h = model.hidden(ids, pixel_values=pixels, grid_thws=GRIDS)
    linear_cross_entropy(h, model.lm_head.weight, ids).backward()
    vision = {n: p for n, p in model.named_parameters() if n.startswith(("vision_", "mm_"))}
    assert len(vision) == 2 + 2 * 6 + 1 + 3
    assert all(p.grad is not None and bool(p.grad.any()) for p in vision.values())
    assert not model.embed_tokens.weight.grad[model.config.media_placeholder_token_id].any()


@torch.no_grad()
def test_low_precision_stays_near(model, pixels):
    exact = model.images(pixels, GRIDS)
    config = model.config
    rounded = cast(K3(config, seed=1), torch.bfloat16).images(pixels, GRIDS)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.1


def test_an_extra_tower_changes_no_text_weight():
    config = preset("nano", hidden_size=64, routed_expert_hidden_size=32)
    text, both = K3(config), K3(config.replace(vision=VISION))
    named = dict(both.named_parameters())
    assert all(torch.equal(p, named[n]) for n, p in text.named_parameters())
    norms = [p for n, p in named.items() if n.startswith("vision") and "norm" in n]
    assert all(bool((p == 1).all()) for p in norms)


class TestRefusals:
    def refused(self, model, match, ids=None, **images):
        with pytest.raises(InputError, match=match):
            model(prompt(model) if ids is None else ids, **images)

    def test_counts_that_do_not_fit(self, model, pixels):
        self.refused(model, "3 media ids for 2 items", pixel_values=pixels, grid_thws=GRIDS[:2])
        batch = prompt(model).repeat(2, 1)
        self.refused(model, "must be expanded", batch, pixel_values=pixels, grid_thws=GRIDS)
        self.refused(model, "floats", pixel_values=pixels[1:], grid_thws=GRIDS)
        self.refused(model, "floats", pixel_values=pixels.long(), grid_thws=GRIDS)
        with pytest.raises(InputError, match="3 media ids for 2 items"):
            expand_media(prompt(model), GRIDS[:2], model.config)
        with pytest.raises(InputError, match="differently"):
            expand_media(batch, GRIDS, model.config)

    @pytest.mark.parametrize(
        ("grid", "match"),
        [
            ([[5, 2, 2]], "5 frames"),
            ([[0, 2, 2]], "0 frames"),
            ([[1, 3, 2]], "multiple of 2"),
            ([[1, 2, 514]], "at most 512"),
            ([[1, 0, 2]], "0 x 2"),
            ([1, 2, 2], "items, 3"),
            ([[1.0, 2.0, 2.0]], "integers"),
            (torch.zeros(0, 3, dtype=torch.int64), "3 media ids for 0 items"),
        ],
    )
    def test_grids(self, model, pixels, grid, match):
        self.refused(model, match, pixel_values=pixels, grid_thws=torch.as_tensor(grid))

    def test_one_without_the_other(self, model, pixels):
        self.refused(model, "together", pixel_values=pixels)
        self.refused(model, "together", grid_thws=GRIDS)

    def test_a_model_without_eyes(self, pixels):
        text = K3(preset("nano"), seed=None)
        ids = torch.tensor([[1, 2]])
        self.refused(text, "no vision tower", ids, pixel_values=pixels, grid_thws=GRIDS)
        self.refused(text, "no vision tower", ids, pixel_values=pixels)
