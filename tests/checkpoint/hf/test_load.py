"""openk3.load: every dtype and expert form gives the stored values, without copying when it can."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import openk3
from model_folders import CONFIG, Spoiler, write_random
from openk3.checkpoint.hf import layout
from openk3.checkpoint.hf.folder import open_folder
from openk3.checkpoint.hf.load import empty_model
from openk3.config import preset
from openk3.errors import CheckpointError, InputError
from openk3.model import keeps_float32
from openk3.ops import mx

IDS = torch.arange(40).view(2, 20)


def stored(folder):
    """Every tensor of a folder as the reference library reads it."""
    values = {}
    for shard in sorted(folder.glob("*.safetensors")):
        values |= load_file(shard)
    return values


def expected_state(folder):
    """The model's state by hand: stack, dequantise, cut A_log."""
    values, state = stored(folder), {}
    for parameter in layout.parameters(CONFIG):
        if not parameter.is_expert:
            value = values[layout.to_file(parameter.name)]
            state[parameter.name] = value[:3] if parameter.name.endswith("A_log") else value
            continue
        matrices = []
        for expert in range(CONFIG.num_experts):
            if (name := layout.to_file(parameter.name, expert)) in values:
                matrices.append(values[name])
            else:
                packed = values[layout.to_file(parameter.name, expert, "weight_packed")]
                scale = values[layout.to_file(parameter.name, expert, "weight_scale")]
                matrices.append(mx.dequantize(packed, scale, dtype=torch.bfloat16))
        state[parameter.name] = torch.stack(matrices)
    return state


@pytest.mark.parametrize("kind", ["folder", "dense_folder"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_the_stored_one(kind, dtype, request):
    path = request.getfixturevalue(kind)
    model = openk3.load(path, dtype=dtype)
    want = expected_state(path)
    state = model.state_dict()
    assert state.keys() == want.keys()
    for name, value in state.items():
        wanted = want[name] if dtype is None or keeps_float32(name) else want[name].to(dtype)
        assert value.dtype == wanted.dtype, name
        assert torch.equal(value, wanted), name
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())


def test_packed_and_streamed_experts_compute_what_resident_ones_do(folder):
    resident = openk3.load(folder, dtype=torch.float32)
    packed = openk3.load(folder, dtype=torch.float32, experts="packed")
    slot = 3 * (64 * 32 // 2 + 64 * 32 // 32)
    streamed = openk3.load(
        folder, dtype=torch.float32, experts="stream", expert_cache_gb=2.5 * slot / 1e9
    )
    with torch.no_grad():
        want = resident(IDS)
        assert torch.equal(packed(IDS), want)
        assert torch.equal(streamed(IDS), want)
    assert packed.layers[1].block_sparse_moe.experts.w1_packed.dtype == torch.uint8


def test_streaming_experts_that_are_not_quantised(dense_folder):
    with torch.no_grad():
        want = openk3.load(dense_folder)(IDS)
        assert torch.equal(openk3.load(dense_folder, experts="stream")(IDS), want)


def mapped_files(tensor):
    """The file behind a tensor's memory, if it is a mapping."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                return line.split()[5:]
    return []


def test_equal_dtypes_are_mapped_and_the_file_never_changes(folder, dense_folder, tmp_path):
    model = openk3.load(folder)
    weight = model.layers[1].self_attn.q_proj.weight
    assert mapped_files(weight)[0].startswith(str(folder))
    before = {shard: shard.read_bytes() for shard in folder.glob("*.safetensors")}
    with torch.no_grad():
        weight.zero_()
        weight += 1
    assert all(shard.read_bytes() == raw for shard, raw in before.items())
    # one file that holds whole stacks: experts are mapped too
    openk3.save(openk3.load(dense_folder), tmp_path / "one")
    whole = openk3.load(tmp_path / "one")
    assert mapped_files(whole.layers[1].block_sparse_moe.experts.w1)
    assert whole.layers[1].block_sparse_moe.experts.w1.is_contiguous()


def test_inside_inference_mode_weights_are_ordinary_tensors(folder):
    with torch.inference_mode():
        model = openk3.load(folder, dtype=torch.float32)
    assert not any(p.is_inference() for p in model.parameters())


def test_loaded_weights_train_also_after_generating(folder):
    model = openk3.load(folder, dtype=torch.float32).train()
    model.generate(IDS, max_new_tokens=1)  # in inference mode; what it caches must not leak
    model(IDS).square().mean().backward()
    assert model.embed_tokens.weight.grad.abs().sum() > 0


def test_not_strict_fills_what_is_missing_and_ignores_what_is_unknown(folder):
    spoil = Spoiler(folder)
    spoil.rename("language_model.model.norm.weight", "language_model.model.ghost.weight")
    spoil.rename("language_model.model.layers.0.mlp.up_proj.weight", "other.weight")
    with pytest.raises(CheckpointError, match="ghost"):
        openk3.load(folder)
    model = openk3.load(folder, strict=False)
    assert torch.equal(model.norm.weight, torch.ones(96, dtype=torch.bfloat16))
    up = model.layers[0].mlp.up_proj.weight
    assert 0.01 < up.float().std() < 0.03
    assert torch.equal(openk3.load(folder, strict=False).layers[0].mlp.up_proj.weight, up)


def test_text_only_names_and_one_file(folder, tmp_path):
    from safetensors.torch import save_file

    values = {n.removeprefix("language_model."): v for n, v in stored(folder).items()}
    bare = tmp_path / "bare"
    bare.mkdir()
    save_file(values, bare / "model.safetensors")
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())
    with torch.no_grad():
        assert torch.equal(openk3.load(bare)(IDS), openk3.load(folder)(IDS))


def test_a_log_of_more_heads_is_refused(folder):
    spoil = Spoiler(folder)
    name = "language_model.model.layers.0.self_attn.A_log"
    shard = spoil.shard_of(name)
    entry = open_folder(folder).entries[name]
    raw = bytearray(shard.read_bytes())
    raw[entry.offset + 12 : entry.offset + 16] = torch.tensor([1.0]).numpy().tobytes()
    shard.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.A_log has 4 entries for 3"):
        openk3.load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"experts": "lazy"}, "dequant, packed, stream"), ({"dtype": torch.int8}, "int8"),
     ({"experts": "stream", "expert_cache_gb": 1e-9}, "at least 2 experts")],
)  # fmt: skip
def test_impossible_requests(folder, options, message):
    with pytest.raises(InputError, match=message):
        openk3.load(folder, **options)


def test_packed_needs_packed_files(dense_folder):
    with pytest.raises(InputError, match=r"experts\.w1 is not stored as MXFP4"):
        openk3.load(dense_folder, experts="packed")


def test_the_whole_k3_on_the_meta_device_has_exactly_the_layouts_names():
    with torch.device("meta"):
        model = empty_model(preset("k3"))
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {p.name: p.shape for p in layout.parameters(preset("k3"))}
    assert ours == theirs
    for name in ours:
        assert keeps_float32(name) == layout.is_float32(name)


def test_an_empty_model_takes_no_memory_for_weights_and_keeps_its_buffers():
    model = empty_model(CONFIG)
    assert all(p.is_meta for p in model.parameters() if p.ndim > 1)
    assert not any(b.is_meta for b in model.buffers())


def test_progress_counts_the_bytes_of_converted_files(folder):
    done = []
    openk3.load(folder, dtype=torch.float32, progress=done.append)
    size = sum(e.num_bytes for e in open_folder(folder).entries.values() if e.dtype != "F32")
    assert size == sum(done)


PEAK = """
import sys, threading, torch, openk3

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

def watch():
    while not done.wait(0.0005):
        peak.append(max(peak.pop(), anonymous()))

openk3.load(sys.argv[1], dtype=torch.float32)  # tables and imports are not the model's memory
before, peak, done = anonymous(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = openk3.load(sys.argv[2], dtype=torch.float32)
done.set()
watcher.join()
size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
print((max(peak[0], anonymous()) - before) / size, size)
"""


@pytest.mark.parametrize("mxfp4", [True, False])
def test_peak_memory_is_the_models_own(folder, tmp_path, mxfp4):
    config = CONFIG.replace(
        num_experts=64, moe_intermediate_size=256, routed_expert_hidden_size=256
    )
    big = write_random(tmp_path / "big", config=config, mxfp4_experts=mxfp4, max_shard_bytes=20e6)
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(big)],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert int(out[1]) > 100e6
    assert float(out[0]) < 1.1
