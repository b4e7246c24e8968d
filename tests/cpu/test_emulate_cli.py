"""`jitmoe emulate`: schedules run, judged, replayed; and what it says of kernels that are wrong."""

import json
import re
import shlex
import shutil

import pytest
from typer.testing import CliRunner

from jitmoe import demo, reference
from jitmoe.cli import app
from jitmoe.emulate import compile as host
from jitmoe.emulate import ranks_session, session
from jitmoe.jit import render
from jitmoe.plan.variant import Activation, Variant

try:
    host.compiler()
except host.NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

SMALL = ["--hidden", "256", "--intermediate", "144", "--experts", "4", "--top-k", "2"]


def invoke(*args, code=0):
    result = CliRunner().invoke(app, ["emulate", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refusal(*args, code=2):
    result = invoke(*args, code=code)
    assert result.stdout == "" and result.stderr.startswith("jitmoe: ")
    assert result.stderr.count("\n") == 1, "one sentence"
    return result.stderr


def test_a_small_layer_by_default():
    title, line = invoke().stdout.splitlines()
    assert "40 tokens, hidden 512, intermediate 256, 8 experts, top_k 2" in title
    assert "decode kernel, 4 blocks, uniform routing" in title
    pattern = r"seed 0: PASS, relative error 1\.\de-03, worst element \S+, [\d,]+ steps, [\d.]+ s"
    assert re.fullmatch(pattern, line)


def test_seeds_are_replayed_exactly():
    """Alone, among others and several at a time; other seeds are other schedules."""
    many = json.loads(invoke(*SMALL, "--seeds", 5, "-j", 2, "--json").stdout)
    steps = {row["seed"]: row["steps"] for row in many["seeds"]}
    assert list(steps) == [0, 1, 2, 3, 4] and len(set(steps.values())) > 1
    assert json.loads(invoke(*SMALL, "--seed", 3, "--json").stdout)["seeds"][0]["steps"] == steps[3]
    assert many["is_right"] and many["replay"] is None
    text = invoke(*SMALL, "--seed", 3, "--seeds", 2).stdout
    assert text.count("PASS") == 2 and f"{steps[3]:,} steps" in text
    assert "2 of 2 seeds run are right" in text


def test_json():
    options = ["--tokens", 150, "--routing", "unused", "--blocks", 2, "--seed", 7, "--json"]
    report = json.loads(invoke(*SMALL, *options, "--ep", 2, "--top-k", 1).stdout)
    assert report["layer"] == "layer, one rank of 2" and report["bucket"] == "prefill"
    assert report["problem"]["num_experts"] == 2 and report["problem"]["num_tokens"] == 150
    assert (report["routing"], report["num_blocks"], report["checked"]) == ("unused", 2, False)
    (row,) = report["seeds"]
    assert row["seed"] == 7 and row["is_right"] and row["steps"] > 0 and row["report"] == ""
    assert 0 < row["relative_error"] < session.ERROR_BOUND
    assert row["worst_element"] < session.ELEMENT_BOUND


def test_variants():
    options = ["--activation", "swiglu_oai", "--gate-up", "up_first", "--weight-on-input"]
    title, line = invoke(*SMALL, *options).stdout.splitlines()
    assert "swiglu_oai, up first, router weights on tokens, decode kernel" in title
    assert "PASS" in line
    report = json.loads(invoke(*SMALL, *options, "--tokens", 150, "--json").stdout)
    assert (report["activation"], report["gate_up"]) == ("swiglu_oai", "up_first")
    assert report["weight_on_input"] and report["is_right"] and report["bucket"] == "prefill"
    options = ["--gate-up", "interleaved", "--bias"]
    title, line = invoke(*SMALL, *options).stdout.splitlines()
    assert "swiglu, interleaved, biases, decode kernel" in title and "PASS" in line


def test_ranks():
    """A line a rank; ranks have other numbers of tokens in each launch, and one of them none."""
    title, line, *lines = invoke(*SMALL, "--ranks", 4, "--tokens", 9).stdout.splitlines()
    assert title.startswith("layer, 4 ranks: up to 9 tokens a rank, hidden 256")
    assert "1 experts a rank, top_k 2" in title and "PASS" in line and len(lines) == 4
    pattern = r"  rank (\d): (\d), (\d), (\d) tokens, relative error 1\.\de-03, worst element \S+"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert found == [
        tuple(map(str, row)) for row in [(0, 3, 5, 7), (1, 5, 7, 9), (2, 7, 9, 3), (3, 9, 0, 5)]
    ]
    counts = [ranks_session.rank_counts(1, 2, launch) for launch in range(3)]
    assert counts == [[1, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks", 2, "--presum", "--tokens", 5, "--checked"],
        ["--ranks", 2, "--tokens", 150, "--routing", "unused", "--format", "bf16", "--bias"],
        ["--ranks", 8, "--experts", 8, "--routing", "one_expert", "--gate-up", "interleaved"],
        ["--ranks", 2, "--ep", 4, "--tokens", 3, "--weight-on-input"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_variants_of_ranks(options):
    report = json.loads(invoke(*SMALL, *options, "--json").stdout)
    (row,) = report["seeds"]
    assert report["is_right"] and report["num_ranks"] == len(row["ranks"]) == options[1]
    assert report["presum"] == ("--presum" in options)
    for name in ("relative_error", "worst_element"):
        assert row[name] == max(rank[name] for rank in row["ranks"]) > 0


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_tensor", "bf16"])
def test_formats(format):
    title, line = invoke(*SMALL, "--format", format).stdout.splitlines()
    assert f"top_k 2; {format}, swiglu, decode kernel" in title and "PASS" in line
    report = json.loads(invoke(*SMALL, "--format", format, "--json").stdout)
    assert report["problem"]["format"] == format and report["is_right"]


def test_layer_by_config(tmp_path):
    config = {"model_type": "my_moe", "hidden_size": 256, "moe_intermediate_size": 144}
    config |= {"num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert invoke("--config", tmp_path).stdout.startswith("my_moe: 40 tokens, hidden 256")


def test_activation_of_a_config(tmp_path, monkeypatch):
    """Run with its number, and replayed with it."""
    config = {"hidden_size": 256, "moe_intermediate_size": 144, "swiglu_limit": 0.5}
    config |= {"num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    title, line = invoke("--config", tmp_path).stdout.splitlines()
    assert "swiglu_clamped, decode kernel" in title and "PASS" in line
    monkeypatch.setattr(session, "ERROR_BOUND", 0.0)
    report = json.loads(invoke("--config", tmp_path, "--json", code=1).stdout)
    assert "--activation" not in report["replay"] and str(tmp_path) in report["replay"]
    report = json.loads(invoke(*SMALL, "--activation", "swiglu", "--json", code=1).stdout)
    assert "--activation swiglu" in report["replay"]


def test_demo_of_an_activation():
    variant = Variant(Activation("swiglu_clamped", limit=0.5))
    for bucket, plan in demo.small_plans(variant, "fp8_block").items():
        num_tokens = demo.EMULATED_TOKENS[bucket]
        assert demo.emulated_error(plan, num_tokens, variant) < demo.EMULATED_BOUND


def test_layers_as_gpt_oss_checkpoints_are(tmp_path):
    """MXFP4, interleaved rows and biases from a configuration, in every command that runs them."""
    config = {"model_type": "gpt_oss", "hidden_size": 160, "intermediate_size": 96}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    title, line = invoke("--config", tmp_path, "--tokens", "9").stdout.splitlines()
    assert "mxfp4_bf16, swiglu_oai, interleaved, biases, decode" in title and "PASS" in line
    call = "--emulated", "--config", tmp_path, "--tokens", "9", "--out", tmp_path / "trace.json"
    result = CliRunner().invoke(app, list(map(str, ("trace", *call, "--json"))))
    assert result.exit_code == 0 and json.loads(result.output)["num_lost"] == 0


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--model", "deepseek"], ["model must be one of", "did you mean"]),
        (["--model", "glm-4.5", "--hidden", "512"], ["one way"]),
        (["--hidden", "512"], ["--intermediate", "--experts"]),
        (["--ep", "3"], ["ep must divide", "got 3"]),
        ([*SMALL, "--routing", "even"], ["routing must be one of", "got 'even'"]),
        ([*SMALL, "--ep", "4"], ["top_k up to num_experts=1", "got 2; take duplicates"]),
        ([*SMALL, "--activation", "silu"], ["activation must be one of", "got 'silu'; take"]),
        ([*SMALL, "--format", "fp8_row"], ["format must be one of", "got 'fp8_row'; take"]),
        ([*SMALL, "--gate-up", "up"], ["gate_up must be one of", "got 'up'; say"]),
        ([*SMALL, "--ranks", "3"], ["ep must divide the 4 experts", "got 3"]),
        ([*SMALL, "--ranks", "4", "--ep", "2"], ["--ranks must be up to the 2", "got 4"]),
        ([*SMALL, "--presum"], ["--presum is of many ranks, got one"]),
        ([*SMALL, "--tokens", "262145"], ["num_tokens", "got 262,145; split"]),
    ],
)
def test_mistakes(args, parts):
    message = refusal(*args)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("option", ["--tokens", "--blocks", "--seeds", "--jobs", "--ranks"])
def test_counts_from_one(option):
    assert "Invalid value" in invoke(option, 0, code=2).stderr


def test_a_large_layer_is_announced(monkeypatch):
    def stop(*_):
        raise host.NoHostCompiler("stopped here")

    monkeypatch.setattr(session, "executable", stop)
    lines = invoke("--model", "deepseek-v3", "--ep", 8, code=1).stderr.splitlines()
    assert "a large layer for a CPU: about" in lines[0] and "a higher --ep" in lines[0]
    assert lines[1] == "jitmoe: stopped here"


def test_without_a_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(host, "compiler", host.compiler.__wrapped__)  # without its memory
    monkeypatch.setattr(host, "compiler_version", host.compiler_version.__wrapped__)
    message = refusal(*SMALL, code=1)
    assert "found no C++ compiler" in message and "pip install ziglang" in message


def test_a_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    monkeypatch.setattr(host, "compiler", host.compiler.__wrapped__)  # without its memory
    monkeypatch.setattr(host, "compiler_version", host.compiler_version.__wrapped__)
    message = refusal(*SMALL, code=1)
    assert "CXX is 'no-such-compiler -O1', and there is no such program; set it" in message


@pytest.fixture
def damage(monkeypatch, tmp_path):
    """Replace text in a copy of the templates, which is then the one that kernels are made of."""
    copy = tmp_path / "templates"
    shutil.copytree(render.templates_dir(), copy)
    for module in (render, host):
        monkeypatch.setattr(module, "templates_dir", lambda: copy)

    def replace(name, old, new):
        text = (copy / name).read_text()
        assert old in text
        (copy / name).write_text(text.replace(old, new))

    return replace


def replay_of(text):
    """The printed command's options."""
    (line,) = [line for line in text.splitlines() if line.startswith("replay: ")]
    words = shlex.split(line)
    assert words[1:3] == ["jitmoe", "emulate"]
    return words[3:]


def test_a_kernel_that_computes_something_else(damage):
    damage("roles/sums.cuh", "+= bf16_low(words[w]);", "-= bf16_low(words[w]);")
    options = ["--activation", "geglu_tanh", "--gate-up", "up_first", "--weight-on-input", "--bias"]
    options += ["--format", "fp8_channel"]
    replayed = replay_of(invoke(*SMALL, *options, code=1).stdout)
    assert set(options) <= set(replayed) and "FAIL" in invoke(*replayed, code=1).stdout
    text = invoke(*SMALL, "--seed", 5, "--seeds", 3, code=1).stdout
    assert "seed 5: FAIL, relative error" in text and "seed 6" not in text
    assert "0 of 1 seeds run are right" in text
    again = replay_of(text)
    assert again[again.index("--seed") + 1] == "5" and "--seeds" not in again
    line = next(line for line in text.splitlines() if line.startswith("seed 5"))
    assert invoke(*again, code=1).stdout.splitlines()[1].startswith(line.rpartition(",")[0])


def test_a_kernel_that_stalls(damage):
    damage("roles/gather.cuh", "arrive_after_copies(&smem.full[ring.stage]);", "")
    text = invoke(*SMALL, "--blocks", 2, "--seeds", 9, code=1).stdout
    assert "seed 0: FAIL, stopped after" in text and "seed 1" not in text
    assert "waits for" in text
    assert replay_of(text)
    report = json.loads(invoke(*SMALL, "--blocks", 2, "--json", code=1).stdout)
    (row,) = report["seeds"]
    assert not report["is_right"] and row["relative_error"] is row["steps"] is None
    assert "waits for" in row["report"] and report["replay"].startswith("jitmoe emulate --hidden")


def test_ranks_whose_kernel_is_wrong(damage):
    """The sum of a rank's rows goes to the second slot of them instead of the first."""
    damage("roles/many_ranks.cuh", "+ __ffs(used) - 1)", "+ __ffs(used & (used - 1)) - 1)")
    options = ["--ranks", "2", "--tokens", "5", "--seed", "4"]
    text = invoke(*SMALL, *options, "--presum", "--seeds", 2, code=1).stdout
    assert "seed 4: FAIL, relative error" in text and "seed 5" not in text
    replayed = replay_of(text)
    assert {"--ranks", "--presum"} <= set(replayed)
    assert "seed 4: FAIL" in invoke(*replayed, code=1).stdout
    assert invoke(*SMALL, *options).stdout.count("rank 1") == 1


def test_ranks_that_wait_for_ever(damage):
    damage("roles/flags.cuh", "i < kDomainRanks; i += kWarpThreads) {", "i < 1; i += 99) {")
    text = invoke(*SMALL, "--ranks", "2", "--tokens", "5", "--presum", code=1).stdout
    assert "seed 0: FAIL, stopped after" in text and "waits for" in text
    assert {"--ranks", "--presum"} <= set(replay_of(text))


def test_a_kernel_that_does_not_compile(damage):
    damage("roles/gather.cuh", "DEVICE void role_gather", "DEVICE vodi role_gather")
    result = invoke(*SMALL, code=1)
    assert result.stdout == "" and "vodi" in result.stderr and "Traceback" not in result.stderr


def test_infinite_errors_are_json(monkeypatch):
    monkeypatch.setattr(reference, "relative_error", lambda *_: float("inf"))
    (row,) = json.loads(invoke(*SMALL, "--json", code=1).stdout)["seeds"]
    assert row["relative_error"] is None and not row["is_right"] and row["steps"] > 0


def test_a_kernel_with_a_data_race(damage):
    """A stage announced before copies to it have landed. Only the checked build looks."""
    early = "arrive(&smem.full[ring.stage]);"
    damage("roles/gather.cuh", "arrive_after_copies(&smem.full[ring.stage]);", early)
    text = invoke(*SMALL, "--tokens", 9, "--blocks", 1, "--checked", code=1).stdout
    assert "1 block, uniform routing, checked" in text and "seed 0: FAIL, stopped" in text
    assert "data race on weight_scales" in text and "--checked" in replay_of(text)
