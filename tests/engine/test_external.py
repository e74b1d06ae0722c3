"""The store behind the host tier: what the host evicts comes back before it is needed, or not."""

import json
import threading

import pytest
import torch

from engine_driver import PAGE_BYTES, Dictionary, Driver, H, P, random_ids, serve_random
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.engine.stores import FolderStore, MooncakeStore, open_store
from openk3.errors import BackendError, ConfigError, StorageError
from small_models import lively_model


def driver(store, *, num_pages=12, host_pages=8, **options):
    return Driver(
        num_pages=num_pages, host_bytes=host_pages * PAGE_BYTES, external=store, **options
    )


def put_away(made, prompt, seed=50):
    """Serve a prompt, then others until it is in neither tier."""
    made.run(prompt)
    for n in range(6):
        made.run(random_ids(3 * P, seed=seed + n))
    made.engine.memory.external.threads.submit(lambda: None).result()


def stored(num_pages=2):
    """(store, driver, a prompt of that many pages that only the store still has)."""
    store = Dictionary()
    made, prompt = driver(store), random_ids(num_pages * P)
    put_away(made, prompt)
    return store, made, prompt


def test_a_prefix_comes_back_from_behind_the_host():
    _, made, prompt = stored(3)
    stats = made.engine.stats()
    assert (stats.host_hits, stats.external_hits) == (0, 0)
    assert stats.external_puts > 0
    again = made.run((*prompt, 5))
    assert again.cached == 3 * P
    assert made.engine.stats().external_hits == 3 + made.runner.geometry.kda_groups
    made.assert_idle()


@pytest.mark.parametrize("lost", ["latents", "state"])
def test_half_of_a_prefix_is_not_fetched(lost):
    store, made, prompt = stored()
    for key in [key for key in store.values if f"-{lost}-" in key]:
        del store.values[key]
    assert made.run((*prompt, 5)).cached == 0
    assert made.engine.stats().external_hits == 0


def test_what_was_cut_or_does_not_fit_is_no_hit():
    store, made, prompt = stored()
    for key in store.values:
        store.values[key] = store.values[key][:-1]
    assert made.run((*prompt, 5)).cached == 0
    small = driver(Dictionary(), host_pages=2)
    put_away(small, prompt)
    assert small.run((*prompt, 5)).cached == 0


def test_what_was_damaged_is_no_hit_and_is_put_anew(caplog):
    store, made, prompt = stored()
    whole = dict(store.values)
    store.values = {key: bytes([value[0] ^ 1]) + value[1:] for key, value in whole.items()}
    for _ in range(4):  # one damaged page is found out each time, and written once more
        assert made.run((*prompt, 5)).cached == 0
        put_away(made, prompt)
        if made.run((*prompt, 5)).cached:
            break
        put_away(made, prompt)
    assert "is damaged; it is put there anew" in caplog.text
    assert made.run((*prompt, 5)).cached == 2 * P
    assert made.engine.stats().external_hits > 0
    made.assert_idle()


def test_a_page_under_the_key_of_another_is_no_hit():
    store, made, prompt = stored()
    for kind in ("latents", "state"):
        keys = [key for key in store.values if f"-{kind}-" in key]
        moved = [store.values[key] for key in keys[1:] + keys[:1]]
        store.values |= dict(zip(keys, moved, strict=True))
    assert made.run((*prompt, 5)).cached == 0
    assert made.engine.stats().external_hits == 0


def test_forgotten_and_other_weights_are_not_found():
    _, made, prompt = stored()
    made.engine.reset()
    assert made.run((*prompt, 5)).cached == 0
    put_away(made, prompt)
    made.runner.version = "2"
    made.engine.new_weights("2")
    assert made.run((*prompt, 5)).cached == 0


class Gated(Dictionary):
    """Answers when it is let."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def get(self, key):
        assert self.gate.wait(30)
        return super().get(key)


def test_a_request_waits_for_its_own_fetch_and_others_go_on():
    store = Gated()
    made = driver(store, num_pages=20)
    prompt = random_ids(3 * P)
    put_away(made, prompt)
    store.gate.clear()
    waits = made.add((*prompt, 5), 2)
    assert made.step() == []  # waits a moment, does not spin and does not fail
    other = made.add((7, 8, 9), 3)
    for _ in range(4):
        made.step()
    assert (other.reason, waits.reason) == ("length", None)
    gone = made.add((*prompt, 6), 2)
    made.engine.abort(gone.request.id)
    store.gate.set()
    made.drain()
    assert (waits.cached, len(waits.ids)) == (3 * P, 2)
    made.assert_idle()


class Broken(Dictionary):
    def put(self, key, value):
        raise OSError("the network is down")


def test_without_its_store_the_engine_goes_on(caplog):
    made = driver(Broken())
    prompt = random_ids(2 * P)
    put_away(made, prompt)
    assert made.run((*prompt, 5)).cached == 0
    assert "not used any more: OSError: the network is down" in caplog.text


def engine(model, folder, **options):
    sizes = {"hash_block": H, "page_tokens": P, "num_pages": 8, "debug": True}
    page = 1 << 17
    return Engine(
        model,
        EngineConfig(**sizes, host_bytes=6 * page, external=f"folder:{folder}", **options),
    )


def serve(serving, prompt):
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True)
    serving.add(Request("a", prompt, params))
    ids, cached = [], 0
    while serving.busy:
        for output in serving.step():
            ids += output.new_ids
            cached = output.cached_tokens
    return ids, cached


def answer_and_leave(model, folder, prompt):
    """The answer of an engine that writes the prompt's pages to a folder, and closes."""
    first = engine(model, folder)
    wanted, _ = serve(first, prompt)
    for n in range(8):
        serve(first, random_ids(3 * P, seed=n + 9))
    first.memory.external.close()
    return wanted


def test_a_folder_outlives_the_engine_and_serves_its_weights_alone(tmp_path):
    model, prompt = lively_model(seed=3), random_ids(2 * P + 3)
    wanted = answer_and_leave(model, tmp_path, prompt)
    assert list(tmp_path.iterdir())
    again = engine(lively_model(seed=3), tmp_path)
    assert serve(again, prompt) == (wanted, 2 * P)
    assert serve(engine(lively_model(seed=4), tmp_path), prompt)[1] == 0


def test_a_damaged_file_changes_no_number(tmp_path):
    model, prompt = lively_model(seed=3), random_ids(2 * P + 3)
    wanted = answer_and_leave(model, tmp_path, prompt)
    for n, path in enumerate(tmp_path.iterdir()):
        data = bytearray(path.read_bytes())
        data[n * 97 % len(data)] ^= 64
        path.write_bytes(data)
    assert serve(engine(model, tmp_path), prompt) == (wanted, 0)


def test_versions_of_the_same_name_share_nothing_unless_their_weights_are_the_same(tmp_path):
    model, prompt = lively_model(seed=3), random_ids(2 * P + 3)
    first = engine(model, tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight[7, 3] += 0.5
    first.new_weights("step 1")
    serve(first, prompt)
    for n in range(8):
        serve(first, random_ids(3 * P, seed=n + 9))
    first.memory.external.close()
    other = engine(lively_model(seed=3), tmp_path)
    other.new_weights("step 1")
    assert serve(other, prompt)[1] == 0
    again = engine(model, tmp_path)
    again.new_weights("step 1")
    assert serve(again, prompt)[1] == 2 * P


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=f"external: no folder {place}"):
            open_store(f"folder:{place}")


class Client:
    """What Mooncake documents: codes, bytes, empty for what is not there."""

    def __init__(self, code=0):
        self.code, self.values, self.settings = code, {}, None

    def setup(self, *settings):
        self.settings = settings
        return self.code

    def put(self, key, value):
        if self.code:
            return self.code
        self.values[key] = value
        return 0

    def get(self, key):
        return self.values.get(key, b"")

    def is_exist(self, key):
        return self.code or int(key in self.values)


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"local_hostname": "here", "protocol": "rdma"}))
    return path


def test_mooncake_is_spoken_to_as_it_documents(settings):
    client = Client()
    store = MooncakeStore(settings, client)
    assert client.settings == (
        "here", "P2PHANDSHAKE", 4 << 30, 1 << 30, "rdma", "", "127.0.0.1:50051"
    )  # fmt: skip
    made = driver(store)
    prompt = random_ids(3 * P)
    put_away(made, prompt)
    assert made.run((*prompt, 5)).cached == 3 * P
    client.code = -1
    for call in (lambda: store.put("a", b"b"), lambda: store.is_exist("a")):
        with pytest.raises(BackendError, match="code -1"):
            call()
    with pytest.raises(BackendError, match="setup failed with code 3"):
        MooncakeStore(settings, Client(3))


def test_stores_that_cannot_be_opened_say_why(settings, tmp_path):
    with pytest.raises(BackendError, match="pip install mooncake-transfer-engine"):
        open_store(f"mooncake:{settings}")
    settings.write_text('{"hostname": "x"}')
    with pytest.raises(ConfigError, match=r"unknown keys \['hostname'\]"):
        open_store(f"mooncake:{settings}")
    with pytest.raises(ConfigError, match="no Mooncake settings"):
        open_store(f"mooncake:{tmp_path / 'nowhere'}")
    with pytest.raises(ConfigError, match="folder:PATH"):
        open_store("redis:x")
    with pytest.raises(ConfigError, match="host_bytes"):
        EngineConfig(external="folder:x")
    store = FolderStore(tmp_path / "new")
    store.put("k", b"v")
    assert (store.get("k"), store.get("other"), store.is_exist("k")) == (b"v", None, True)


def test_random_requests_over_three_tiers():
    made = serve_random(7, 80, num_pages=14, host_bytes=10 * PAGE_BYTES, external=Dictionary())
    stats = made.engine.stats()
    assert stats.finished + stats.aborted == 80
    assert stats.external_hits > 0
