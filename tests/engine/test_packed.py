"""A folder of MXFP4 experts is served as stored, and answers as its dequantised weights do."""

import pytest

import openk3
from openk3.checkpoint.experts.packed import PackedExperts
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.engine.folder import open_folder
from openk3.errors import InputError
from openk3.text.train_tokenizer import train
from small_models import lively_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model"
    openk3.save(lively_model(seed=3), path, mxfp4_experts=True)
    train(["a few words, and a few more of the same"] * 3, vocab_size=300, path=path)
    return path


def answers(model):
    engine = Engine(model, EngineConfig(hash_block=8, page_tokens=16, num_pages=100))
    found = {}
    for i in range(4):
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        engine.add(Request(f"r{i}", tuple(range(5 + i, 30)), params))
    while engine.busy:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_ids)
    return found


def kept_packed(model):
    return any(isinstance(module, PackedExperts) for module in model.modules())


def test_packed_experts_answer_as_dequantised_ones(folder):
    packed, dense = (
        open_folder(folder, device="cpu", experts=form).model for form in ("packed", "dequant")
    )
    assert (kept_packed(packed), kept_packed(dense)) == (True, False)
    assert answers(packed) == answers(dense)


def test_on_a_cpu_speed_goes_before_memory_unless_told(folder):
    assert not kept_packed(open_folder(folder, device="cpu").model)


def test_experts_that_are_not_packed_cannot_stay_so(tmp_path):
    path = tmp_path / "model"
    openk3.save(lively_model(seed=3), path)
    train(["a few words"] * 3, vocab_size=300, path=path)
    with pytest.raises(InputError, match="not stored as MXFP4"):
        open_folder(path, device="cpu", experts="packed")
