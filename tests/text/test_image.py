"""Picture files: what is accepted, what is refused by name, and what pixels become."""

import io
import json
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from openk3.errors import ConfigError, DataError
from openk3.text import xtml
from openk3.text.image import ImageProcessor, image_prompt, open_image

SMALL = ImageProcessor(patch_size=4)


def picture(width=30, height=20, mode="RGB", seed=0):
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise[..., :3]).convert(mode)


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_bomb(width, height):
    """A few bytes that declare a huge picture."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    chunks = [png_chunk(b"IHDR", header), png_chunk(b"IDAT", body), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_and_paths(tmp_path, kind):
    path = tmp_path / "a.bin"
    path.write_bytes(encoded(picture(), kind))
    inputs = SMALL([path, str(path), path.read_bytes(), open_image(path)])
    assert inputs.grid_thws.tolist() == [[1, 6, 8]] * 4
    four = inputs.pixel_values.reshape(4, -1)
    assert (four == four[0]).all()
    assert inputs.prompts == [image_prompt(30, 20)] * 4


class TestRefusals:
    def refused(self, tmp_path, data, match):
        path = tmp_path / "bad.png"
        path.write_bytes(data)
        with pytest.raises(DataError, match=match) as caught:
            SMALL([picture(), path])
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("side", [10_000, 30_000, 2**31 - 1])
    def test_a_bomb_is_refused_by_its_header(self, tmp_path, side, monkeypatch):
        def decode(self):
            raise AssertionError("decoded a pixel")

        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.refused(tmp_path, png_bomb(side, side), "pixels")

    def test_a_smaller_limit(self):
        with pytest.raises(DataError, match=r"30 x 20 pixels; at most 599"):
            open_image(encoded(picture()), max_pixels=599)

    def test_a_file_larger_than_any_picture(self, tmp_path):
        path = tmp_path / "large.png"
        with open(path, "wb") as handle:
            handle.truncate(1 << 21)
        for endless in (path, "/dev/zero"):  # a device says that it has no bytes
            with pytest.raises(DataError, match=f"{endless} has more bytes than a picture may"):
                open_image(endless, max_pixels=1)

    def test_damaged(self, tmp_path):
        data = encoded(picture())
        for cut in (0, 7, 20, len(data) // 2, len(data) - 20):
            self.refused(tmp_path, data[:cut], "damaged")
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        self.refused(tmp_path, bytes(flipped), "damaged")

    def test_animated(self, tmp_path):
        frames = [picture(seed=seed) for seed in range(3)]
        for kind in ("GIF", "PNG", "WEBP"):
            moving = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
            self.refused(tmp_path, moving, "is animated; expected a still")

    @pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("I;16", "PNG")])
    def test_other_pixels(self, tmp_path, mode, kind):
        image = picture(mode="L" if mode == "I;16" else mode)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
        self.refused(tmp_path, encoded(image, kind), "expected 8-bit grey or RGB")
        with pytest.raises(DataError, match="image 0"):
            SMALL([image])

    def test_other_files(self, tmp_path):
        self.refused(tmp_path, b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG")
        self.refused(tmp_path, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of")
        with pytest.raises(DataError, match=r"missing.png cannot be read"):
            SMALL([tmp_path / "missing.png"])

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    def test_random_damage_never_escapes(self, kind):
        rng, data = np.random.default_rng(1), encoded(picture(), kind)
        for _ in range(60):
            bad = bytearray(data)
            for place in rng.integers(0, len(bad), 4):
                bad[place] = rng.integers(0, 256)
            try:
                image = open_image(bytes(bad))
            except DataError:
                continue
            assert image.size[0] * image.size[1] > 0


def test_a_jpeg_with_a_second_picture_shows_its_first():
    both = encoded(picture(), "MPO", save_all=True, append_images=[picture(seed=1)])
    assert open_image(both).size == (30, 20)


class TestTransparency:
    def pixels(self, image):
        return SMALL([image]).pixel_values

    def test_palette_and_grey_transparency_show_the_chessboard(self):
        clear = Image.new("RGBA", (16, 16), (9, 99, 199, 0))
        board = self.pixels(clear)
        assert {round(float(v), 4) for v in board.flat} == {1.0, round(180 / 255 * 2 - 1, 4)}
        grey = Image.new("LA", (16, 16), (50, 0))
        palette = Image.new("P", (16, 16), 3)
        palette.info["transparency"] = 3
        for image in (grey, palette):
            assert np.array_equal(self.pixels(image), board)

    def test_opaque_alpha_changes_nothing(self):
        image = picture()
        assert np.array_equal(self.pixels(image), self.pixels(image.convert("RGBA")))

    @pytest.mark.parametrize("mode", ["1", "L", "P"])
    def test_modes_without_transparency(self, mode):
        image = picture(mode=mode)
        assert np.array_equal(self.pixels(image), self.pixels(image.convert("RGB")))


def test_padding_is_black_and_right_and_below():
    values = ImageProcessor(patch_size=2)([Image.new("RGB", (3, 5), "white")]).pixel_values
    page = values.reshape(4, 2, 3, 2, 2).transpose(0, 3, 1, 4, 2).reshape(8, 4, 3)
    assert (page[:5, :3] == 1).all()
    assert (page[5:] == -1).all()
    assert (page[:, 3:] == -1).all()


def test_mean_and_std_by_channel():
    image = Image.new("RGB", (4, 4), (0, 51, 255))
    processor = ImageProcessor(patch_size=2, mean=(0.0, 0.2, 0.5), std=(1.0, 0.5, 0.25))
    values = processor([image]).pixel_values
    np.testing.assert_allclose(values[0, :, 0, 0], [0.0, 0.0, 2.0], atol=1e-6)


def test_no_pictures():
    inputs = SMALL([])
    assert inputs.pixel_values.shape == (0, 3, 4, 4)
    assert inputs.grid_thws.shape == (0, 3)


class TestConfig:
    def test_round_trip_through_a_folder(self, tmp_path):
        ours = ImageProcessor(patch_size=8, max_patches=100, std=(0.1, 0.2, 0.3))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(ours.to_hf()))
        assert ImageProcessor.load(tmp_path) == ours

    def test_a_folder_without_one(self, tmp_path):
        assert ImageProcessor.load(tmp_path, patch_size=4) == SMALL

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"fixed_output_tokens": 64}, "fixed_output_tokens"),
            ({"transparent_bg_fill_stage": "before"}, "fill_stage"),
            ({"patch_size": "14"}, "patch_size"),
            ({"patch_limit_on_one_side": 511}, "max_side"),
        ],
    )
    def test_what_it_cannot_do(self, tmp_path, change, named):
        published = ImageProcessor().to_hf()
        published["media_proc_cfg"] |= change
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(published))
        with pytest.raises(ConfigError, match=rf"preprocessor_config.json.*{named}"):
            ImageProcessor.load(tmp_path)

    def test_another_models_file(self, tmp_path):
        (tmp_path / "preprocessor_config.json").write_text('{"do_resize": true}')
        with pytest.raises(ConfigError, match="media_proc_cfg"):
            ImageProcessor.load(tmp_path)


def test_prompts_fit_the_chat_format():
    inputs = SMALL([picture()])
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    segments = xtml.render([{"role": "user", "content": content}], image_prompts=inputs.prompts)
    assert (inputs.prompts[0], True) in segments
