"""`k3 serve` as a person runs it: a small model, a free port, an interrupt."""

import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
httpx = pytest.importorskip("httpx", reason="the serve extra is not installed")

import openk3  # noqa: E402
from openk3.api.auth import ApiKeys  # noqa: E402
from openk3.api.serving import listen, serve  # noqa: E402
from openk3.cli.serve import main  # noqa: E402
from openk3.engine.llm import LLM  # noqa: E402
from openk3.engine.types import EngineConfig, SamplingParams  # noqa: E402
from openk3.errors import BackendError, CheckpointError, ConfigError  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from scripted_engine import tokenizer  # noqa: E402
from tiny_run import tiny_config  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny-model"
    words = tokenizer()
    config = tiny_config().replace(
        vocab_size=words.vocab_size,
        bos_token_id=words.bos_id,
        eos_token_id=words.end_of_msg_id,
        pad_token_id=words.pad_id,
        media_placeholder_token_id=words.special_id("<|media_pad|>"),
    )
    openk3.save(K3(config, seed=0), path)
    words.save(path)
    return path


@pytest.mark.slow
def test_a_server_starts_answers_and_ends_on_an_interrupt(folder):
    command = [sys.executable, "-m", "openk3", "serve", str(folder), "--port", "0", "--device",
               "cpu", "--threads", "1", "--engine.hash_block", "16", "--engine.num_pages",
               "200"]  # fmt: skip
    env = {**os.environ, "OPENK3_API_KEY": "sk-e2e"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if found := re.search(r"tiny-model at (http://\S+) .*context (\d+) tokens", line):
                url = found.group(1)
                assert int(found.group(2)) > 100
                assert "1 API key" in line
                break
        try:
            assert url is not None, "it never said where it is"
            with httpx.Client(
                base_url=url, headers={"authorization": "Bearer sk-e2e"}, timeout=60
            ) as client:
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8,
                        "temperature": 0}  # fmt: skip
                answers = [client.post("/v1/chat/completions", json=body) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200]
            one, two = (answer.json() for answer in answers)
            assert one["choices"][0]["message"] == two["choices"][0]["message"]
            assert two["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert "sk-e2e" not in str(one)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)  # 0 where interrupts were ignored from the start


def test_the_same_model_offline(folder):
    llm = LLM(folder, EngineConfig(hash_block=16, num_pages=200), device="cpu")
    user = [{"role": "user", "content": "hi"}]
    greedy = SamplingParams(max_tokens=8, temperature=0)
    [one], [two] = llm.chat(user, greedy), llm.chat(user, greedy)
    assert one.ids == two.ids
    assert two.cached_tokens > 0
    [text] = llm.generate("the weather", greedy)
    assert len(text.ids) == 8


def test_wrong_usage_is_said_before_a_model_is_loaded(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"refusing to listen on 0\.0\.0\.0"):
        main([str(folder), "--host", "0.0.0.0"])
    with pytest.raises(ConfigError, match=r"num_draft"):
        main([str(folder), "--engine.num_draft", "3"])
    with pytest.raises(CheckpointError, match="no folder"):
        main([str(tmp_path / "missing"), "--port", "0"])


def test_a_port_that_cannot_be_had_is_said_before_a_model_is_loaded(tmp_path):
    nothing = str(tmp_path / "no-model")
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            main([nothing, "--port", port])
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:70000: .*0-65535"):
        main([nothing, "--port", "70000"])
    with pytest.raises(CheckpointError, match="no-model is no folder"):
        main([nothing, "--port", "0"])


def test_of_two_servers_that_start_together_one_is_told_that_the_port_is_taken():
    """Both can bind it while their models load; the URL is not announced by the one that lost."""
    one = listen("127.0.0.1", 0)
    port = one.getsockname()[1]
    with one, listen("127.0.0.1", port) as two:
        one.listen()
        said: list[str] = []
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            serve(None, host="127.0.0.1", port=port, keys=ApiKeys(), sock=two,
                  on_ready=said.append)  # fmt: skip
        assert said == []


def test_a_missing_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr("openk3.cli.common.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"fastapi.*pip install 'openk3\[serve\]'"):
        main([str(folder)])
