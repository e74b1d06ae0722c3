"""The load generator: jobs, report, and a run against a real server."""

import json

import pytest

httpx = pytest.importorskip("httpx", reason="the serve extra is not installed")
pytest.importorskip("fastapi", reason="the serve extra is not installed")

from openai_server import MODEL, serving  # noqa: E402
from openk3.api.openai import bench  # noqa: E402
from openk3.cli.bench import main  # noqa: E402
from openk3.errors import BackendError, DataError  # noqa: E402
from scripted_engine import ids_of  # noqa: E402

FIELDS = [
    "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "output_throughput", "total_token_throughput",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")
      for kind in ("mean", "median", "std", "p99")),
]  # fmt: skip


def test_random_jobs_have_the_rate_and_the_lengths():
    jobs = bench.random_jobs(
        2000, rate=50, input_tokens=(10, 20), output_tokens=(5, 5), shared_prefix=7, seed=1
    )
    assert jobs[-1].at_s == pytest.approx(40, rel=0.1)
    assert {len(job.prompt) for job in jobs} == set(range(17, 28))
    assert len({tuple(job.prompt[:7]) for job in jobs}) == 1
    assert jobs == sorted(jobs, key=lambda job: job.at_s)
    at_once = bench.random_jobs(3, rate=float("inf"), input_tokens=(1, 1), output_tokens=(1, 1))
    assert [job.at_s for job in at_once] == [0, 0, 0]


def test_a_trace_shares_the_prefixes_it_names(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 500, "input_length": 600, "output_length": 0, "hash_ids": [1, 3]},
        {"timestamp": 900, "prompt": "hello", "output_length": 2},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    one, two, three = bench.trace_jobs(path, speed=2)
    assert [len(one.prompt), len(two.prompt), three.prompt] == [700, 600, "hello"]
    assert one.prompt[:512] == two.prompt[:512]
    assert one.prompt[512:600] != two.prompt[512:]
    assert [job.at_s for job in (one, two, three)] == [0, 0.25, 0.45]
    assert [job.max_tokens for job in (one, two, three)] == [3, 1, 2]
    for line, problem in (
        ('{"timestamp": 1}', "line 1: has no input_length"),
        ('{"prompt": "x"}', "line 1: has no output_length"),
        ('{"prompt": "x", "output_length": 1, "timestamp": "soon"}', "line 1: could not convert"),
        ('{"prompt": "", "output_length": 1}', "line 1: the prompt is empty"),
        ('{"prompt": "x", "output_length": 1, "timestamp": -1}', "line 1: .* is no time"),
        ("[1]", "line 1: "),
        ("", "has no requests"),
    ):
        path.write_text(line)
        with pytest.raises(DataError, match=problem):
            bench.trace_jobs(path)


def test_the_summary_computes_what_its_names_say():
    good = bench.Outcome(10, 3, 4, [0.1, 0.2, 0.4], 0.4)
    report = bench.summary([good, bench.Outcome(error="503: busy")], 2.0)
    assert (report["completed"], report["failed"]) == (1, 1)
    assert report["output_throughput"] == 1.5
    assert report["mean_ttft_ms"] == pytest.approx(100)
    assert report["mean_tpot_ms"] == pytest.approx(150)
    assert report["median_itl_ms"] == pytest.approx(150)
    assert report["p90_itl_ms"] == pytest.approx(190)
    assert report["errors"] == ["503: busy"]


def test_a_run_reports_every_field(tmp_path, capsys):
    with serving(ids_of("x") * 50, keys=["sk-b"]) as server:
        common = ["serve", "--url", server.url, "--key", "sk-b", "--json"]
        code = main([*common, "--num-prompts", "12", "--rate", "400", "--input", "20:40",
                     "--output", "5:9", "--shared-prefix", "32", "--max-concurrency", "4",
                     "--save", str(tmp_path / "r.json")])  # fmt: skip
        report = json.loads(capsys.readouterr().out)
        also = ["serve", "--url", f"{server.url}/v1/", "--key", "sk-b", "--num-prompts", "2"]
        assert main(also) == 0
        assert "ttft" in capsys.readouterr().out
    assert code == 0
    assert set(FIELDS) <= set(report)
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert (report["model_id"], report["completed"]) == (MODEL, 12)
    requests = list(server.engine.seen.values())[:12]
    assert report["total_input_tokens"] == sum(len(r.prompt_ids) for r in requests)
    assert report["total_output_tokens"] == sum(r.params.max_tokens for r in requests)
    assert report["total_cached_tokens"] == 11 * 32
    with pytest.raises(BackendError, match="does not answer"):
        main(["serve", "--url", server.url, "--num-prompts", "1"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_dies_in_the_middle_fails_what_it_had(capsys):
    """What had ended counts, the rest is failed and says why, and the run ends."""
    with serving(ids_of("x") * 5000, step_s=0.005) as server:
        command = ["serve", "--url", server.url, "--num-prompts", "6", "--json", "--rate", "inf",
                   "--max-concurrency", "2", "--input", "4", "--output", "4"]  # fmt: skip
        server.engine.fail_at_step = 8
        assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["request_rate"] == "inf"
    assert (report["completed"], report["failed"]) == (2, 4)
    assert report["errors"] == sorted(set(report["errors"]))
    assert any("the engine stopped" in error for error in report["errors"])
    assert any(error.startswith("503") for error in report["errors"])
