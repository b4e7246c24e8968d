"""Every command, in-process and as a program, with good input and bad."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jitmoe import demo, doctor, doctor_files, prebuild, tuned
from jitmoe.cli import app
from jitmoe.emulate import compile as host
from jitmoe.jit import build, nvrtc
from jitmoe.plan.formats import FORMATS
from jitmoe.plan.gpu import GPUS, KERNEL_ARCHS
from jitmoe.plan.mega_moe import MegaMoePlan
from jitmoe.plan.models import MODELS
from jitmoe.run import driver

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--hidden", "256", "--intermediate", "144", "--experts", "4", "--top-k", "2"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same on every machine."""
    for module in (driver, demo):
        monkeypatch.setattr(module, "num_devices", lambda: 0)


def invoke(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def program(*args, code=0, cwd=ROOT, **environment):
    result = subprocess.run(
        [sys.executable, "-m", "jitmoe", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


def refusal(*args):
    """The sentence on stderr for a mistake of the user."""
    result = invoke(*args, code=2)
    assert result.stdout == "" and result.stderr.startswith("jitmoe: ")
    assert result.stderr.count("\n") == 1, "one sentence"
    return result.stderr


def test_help_and_version():
    text = invoke("--help").stdout
    for command in ("plan", "show", "warmup", "cache", "doctor", "demo"):
        assert command in text and invoke(command, "--help").stdout
    for command in ("info", "list", "verify", "clear", "export", "import"):
        assert command in invoke("cache", "--help").stdout
    assert program("--version").stdout.startswith("jitmoe")
    assert "Usage" in program("no-such-command", code=2).stderr


def test_variants():
    options = ["--activation", "swiglu_oai", "--gate-up", "up_first", "--weight-on-input"]
    plan = json.loads(invoke("plan", *SMALL, *options, "--json").stdout)["plan"]
    assert plan["activation"] == "swiglu_clamped"
    assert plan["up_first"] and plan["weight_on_input"]
    text = invoke("show", *SMALL, *options, "--plain").stdout
    assert "constexpr u32 kUpFirst = 1;" in text and "constexpr u32 kWeightOnInput = 1;" in text
    assert "GEMMs, clamped SwiGLU, re-quantise" in text
    options = ["--gate-up", "interleaved", "--bias"]
    plan = json.loads(invoke("plan", *SMALL, *options, "--json").stdout)["plan"]
    assert plan["interleaved"] and plan["has_bias"] and not plan["up_first"]
    for command in ("plan", "show", "warmup"):
        assert "got 'relu'; take" in refusal(command, *SMALL, "--activation", "relu")
        assert "got 'up'; say" in refusal(command, *SMALL, "--gate-up", "up")
        assert "got 'fp8_row'; take" in refusal(command, *SMALL, "--format", "fp8_row")
    for format in FORMATS:
        options = ["--intermediate", 160, "--format", format, "--plain"]
        scaled = int(format in ("fp8_channel", "fp8_tensor", "mxfp4_fp8"))
        is_mx = int(format.startswith("mxfp4"))
        for num_tokens, wanted in [
            (1, {"ChannelScales": scaled, "HasChunkScales": is_mx, "Expands": 0}),
            (8192, {"HasChunkScales": 0, "Expands": is_mx}),
        ]:
            text = invoke("show", *SMALL, *options, "--tokens", num_tokens).stdout
            for name, value in wanted.items():
                assert f"constexpr u32 k{name} = {value};" in text, (format, num_tokens)
    text = refusal("show", *SMALL, "--format", "mxfp4_fp8")
    assert "intermediate must be a multiple of 32 up to 32,768, got 144" in text


@pytest.mark.parametrize("gpu", [name for name in GPUS if GPUS[name].arch in KERNEL_ARCHS])
@pytest.mark.parametrize("name", MODELS)
def test_plan_of_every_preset(name, gpu):
    text = invoke("plan", "--model", name, "--tokens", "64", "--gpu", gpu).stdout
    for word in ("bucket", "registers", "weight_tiles", "stages", "floor", "bound by", "limits"):
        assert word in text
    assert GPUS[gpu].name in text and f"{GPUS[gpu].num_sms} x 1" in text


def test_plan_of_ranks():
    """Of one of them: its experts, room for the tokens of all, and what it sends."""
    command = ("plan", "--model", "deepseek-v3", "--tokens", "64")
    text = invoke(*command, "--ranks", "8", "--presum").stdout
    assert "deepseek-v3, 8 ranks: 64 tokens" in text and "32 experts" in text
    assert "ranks          8, each with" in text and "rows summed before" in text
    report = json.loads(invoke(*command, "--ranks", "8", "--presum", "--json").stdout)
    plan = MegaMoePlan(**report["plan"])
    assert (plan.num_ranks, plan.presum, plan.num_experts) == (8, True, 32)
    assert report["workspace_bytes"] == plan.workspace_bytes(8 * 64)
    assert report["symmetric_bytes"] == plan.symmetric(64).num_bytes
    sent = report["link_bytes"]
    assert sent["moved"] == sent["presum"] + sent["tables"] < 0.7 * sent["pairs"]
    apart = invoke(*command, "--ranks", "4", "--ep", "8", "--json").stdout
    apart = json.loads(apart)
    assert apart["layer"] == "deepseek-v3, 4 ranks of 8" and not apart["plan"]["presum"]
    assert apart["problem"]["num_experts"] == 32 and apart["plan"]["num_ranks"] == 4
    sent = apart["link_bytes"]
    assert abs(sent["moved"] - sent["once"] - sent["tables"]) <= 1
    alone = json.loads(invoke(*command, "--ep", "8", "--json").stdout)
    assert alone["floor_us"] == report["floor_us"] and "link_bytes" not in alone
    assert "--presum is of many ranks" in refusal(*command, "--presum")
    assert "--ranks must be up to the 2 ranks" in refusal(*command, "--ep", "2", "--ranks", "4")
    assert "num_tokens must be" in refusal(*command[:-1], "100000", "--ranks", "8")


def test_a_preset_brings_its_layer():
    """Format, order of rows and biases, each of which an option may replace; and a sentence."""
    text = invoke("plan", "--model", "openai/gpt-oss-20b").stdout
    assert "hidden 2,880, intermediate 2,880, 32 experts, top_k 4, in mxfp4_bf16" in text
    assert "note           as its checkpoint is; one dequantised is --format bf16" in text
    assert "note" not in invoke("plan", "--model", "kimi-k2").stdout
    report = json.loads(invoke("plan", "--model", "gpt-oss-120b", "--ep", "8", "--json").stdout)
    assert "checkpoint" in report["note"] and report["problem"]["format"] == "mxfp4_bf16"
    plan = report["plan"]
    assert plan["interleaved"] and plan["has_bias"] and plan["activation"] == "swiglu_clamped"
    command = ("show", "--model", "gpt-oss-20b", "--plain")
    assert "constexpr u32 kInterleaved = 1;" in invoke(*command).stdout
    assert "constexpr u32 kInterleaved = 0;" in invoke(*command, "--gate-up", "up_first").stdout
    text = invoke("plan", "--model", "gpt-oss-20b", "--format", "bf16").stdout
    assert "in bf16" in text and "dequantised" not in text
    text = refusal("plan", "--model", "gpt-oss-20b", "--format", "fp8_block")
    assert "hidden must be a multiple of 128" in text


@pytest.mark.parametrize(
    "kernel, roles",
    [
        ([], ("load", "schedule", "gather", "deliver", "math")),
        (["mega-moe"], ("load", "schedule", "gather", "deliver", "math")),
        (["dispatch"], ("notify", "dispatch")),
        (["combine"], ("reduce",)),
        (["hybrid-dispatch"], ("notify", "scale_out", "forward")),
        (["hybrid-combine"], ("scale_up", "forward_sums")),
    ],
    ids=str,
)
def test_show_of_each_kernel(kernel, roles):
    """The table of roles is at the top, and the kernel below."""
    text = invoke("show", *kernel, "--model", "qwen3-30b-a3b", "--plain").stdout
    name = "".join(kernel or ["mega-moe"]).replace("-", "_")
    assert text.startswith(f"// {name} for sm_90a, plan ")
    assert list(roles_of(text)) == list(roles)
    assert f" {name}(const __grid_constant__ " in text


def test_show_of_dispatch_and_combine():
    sizes = ["--hidden", "512", "--experts", "24", "--top-k", "2"]
    text = invoke("show", "dispatch", *sizes, "--plain").stdout
    for fact in ("num_experts = 3", "num_ranks = 8", "format = bf16", "alignment = 1"):
        assert f"//   {fact}\n" in text
    options = ["--ranks", "4", "--layout", "experts", "--format", "fp8"]
    for kernel in ("dispatch", "combine"):
        text = invoke("show", kernel, *sizes, *options, "--plain").stdout
        for fact in ("num_experts = 6", "num_ranks = 4", "format = fp8", "alignment = 128"):
            assert f"//   {fact}\n" in text
        text = refusal("show", kernel, *sizes, "--intermediate", "256", "--tokens", "32", "--bias")
        assert f"{kernel} has no --intermediate, --bias, --tokens, but" in text
        assert "has no --ep" in refusal("show", kernel, "--model", "kimi-k2", "--ep", "8")
        for ranks in ("1", "65"):
            text = refusal("show", kernel, *sizes, "--ranks", ranks)
            assert f"--ranks must be 2 to 64, got {ranks};" in text
        assert "to 5 ranks; take" in refusal("show", kernel, *sizes, "--ranks", "5")
        assert "got 'rows'; take" in refusal("show", kernel, *sizes, "--layout", "rows")
        assert "got 'fp8_block'; take" in refusal("show", kernel, *sizes, "--format", "fp8_block")
        assert "in one way" in refusal("show", kernel)
        assert "in one way" in refusal("show", kernel, *sizes, "--model", "kimi-k2")
        assert "needs --experts, --top-k too" in refusal("show", kernel, *sizes[:2])
        assert "multiple of 128, got 192" in refusal(
            *("show", kernel, "--hidden", "192", *sizes[2:], "--format", "fp8")
        )
    assert "mega-moe has no --layout;" in refusal("show", *SMALL, "--layout", "tokens")
    text = refusal("show", "mega-moe", *SMALL, "--ranks", "8", "--layout", "experts")
    assert "mega-moe has no --ranks and no --layout;" in text
    text = refusal("show", "megamoe", *SMALL)
    assert "dispatch, combine, hybrid-dispatch or hybrid-combine, got 'megamoe'; take" in text


def roles_of(text):
    """Role -> (warps, registers), by the table at the top of a kernel."""
    table = text.split("//   role ")[1].split("\n//\n")[0].splitlines()[1:]
    found = {}
    for _, name, warps, regs, *_ in map(str.split, table):
        first, last = map(int, warps.split(".."))
        found[name] = (last - first + 1, int(regs))
    return found


@pytest.mark.parametrize(
    "kernel, options, roles",
    [
        ("dispatch", [], {"notify": (4, 128), "scale_out": (6, 128), "forward": (6, 128)}),
        # A channel is a warp of either role: 8 of a block, which is as many as copy and as sum.
        ("combine", [], {"scale_up": (8, 40), "forward_sums": (8, 216)}),
        ("combine", ["--layout", "experts"], {"scale_up": (8, 128), "forward_sums": (8, 128)}),
        ("combine", ["--rail", "gin"], {"scale_up": (6, 168), "forward_sums": (6, 168)}),
        ("combine", ["--rail", "delayed"], {"scale_up": (8, 40), "forward_sums": (8, 216)}),
    ],
    ids=str,
)
def test_show_between_nodes(kernel, options, roles):
    """Roles, their registers and channels, and the transport that is asked for."""
    rail = options[1] if "--rail" in options else "memory"
    sizes = ["--model", "deepseek-v3", "--ranks", "16"]
    text = invoke("show", f"hybrid-{kernel}", *sizes, *options, "--plain").stdout
    assert roles_of(text) == roles
    for fact in ("num_ranks = 16", "num_nodes = 2", f"rail = {rail}", "num_experts = 16"):
        assert f"//   {fact}\n" in text
    channels = next(warps for name, (warps, _) in roles.items() if name.startswith("forward"))
    assert f"kBlockChannels = {channels};" in text and "kNodeRanks = 8;" in text
    pasted = re.findall(r"==== device/(rail_\w+)\.cuh ====", text)
    assert pasted == [f"rail_{rail}"]


def test_show_takes_as_many_nodes_as_divide_the_ranks():
    sizes = ["--hidden", "512", "--experts", "24", "--top-k", "2"]
    for kernel in ("hybrid-dispatch", "hybrid-combine"):
        text = invoke("show", kernel, *sizes, "--ranks", "12", "--nodes", "4", "--plain").stdout
        assert "//   num_nodes = 4\n" in text and "kNodeRanks = 3;" in text
        for nodes in ("0", "1", "5", "33"):
            text = refusal("show", kernel, *sizes, "--nodes", nodes)
            assert f"--nodes must be 2 to 32 and divide the 8 --ranks, got {nodes}; for one" in text
            assert text.endswith(f"for one node take {kernel.removeprefix('hybrid-')}\n")
        text = refusal("show", kernel, *sizes, "--rail", "nvlink")
        assert "--rail must be memory, delayed, gin, got 'nvlink'; take" in text
        text = refusal("show", kernel, *sizes, "--ep", "8")
        assert f"{kernel} has no --ep, but" in text and "--ranks, --nodes, --rail, --layout" in text
    for kernel in ("dispatch", "combine"):
        text = refusal("show", kernel, *sizes, "--nodes", "2", "--rail", "gin")
        assert f"{kernel} has no --nodes, --rail, but" in text and "--ranks, --layout" in text
    text = refusal("show", *SMALL, "--nodes", "2", "--rail", "memory")
    assert "mega-moe has no --nodes and no --rail;" in text


def test_plan_says_what_was_decided():
    text = invoke("plan", "--model", "deepseek-v3", "--ep", "8", "--tokens", "64").stdout
    assert "deepseek-v3, one rank of 8: 64 tokens" in text and "32 experts" in text
    assert "decode, which serves 0 to 256 tokens" in text
    assert "bound by memory" in text
    assert not any(line.endswith(" ") for line in text.splitlines())
    prefill = invoke("plan", "--model", "deepseek-v3", "--ep", "8", "--tokens", "8192").stdout
    assert "prefill, which serves 257 to 262,144" in prefill and "bound by math" in prefill


def test_plan_as_json():
    report = json.loads(invoke("plan", *SMALL, "--tokens", "0", "--json").stdout)
    assert report["problem"] == {
        "num_tokens": 0,
        "hidden": 256,
        "intermediate": 144,
        "num_experts": 4,
        "top_k": 2,
        "format": "fp8_block",
        "gated": True,
    }
    assert report["grid"] == [132, 1] and report["gpu"]["name"] == "H200"
    assert sum(len(range(*warps(role))) for role in report["roles"]) * 32 == report["num_threads"]
    last = report["smem"][-1]
    assert last["offset"] + last["bytes"] * last["count"] <= report["smem_bytes"]
    assert report["smem_bytes"] <= report["smem_limit_bytes"]
    assert report["floor_us"] == max(report["floor_memory_us"], report["floor_math_us"])
    assert report["workspace_bytes"] > 0 and report["num_stages"] == report["plan"]["num_stages"]


def warps(role):
    first, _, last = role["warps"].partition("..")
    return int(first), int(last or first) + 1


def test_layer_by_config(tmp_path):
    config = {"model_type": "my_moe", "hidden_size": 512, "moe_intermediate_size": 320}
    config |= {"num_experts": 16, "num_experts_per_tok": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        text = invoke("plan", "--config", path, "--ep", "2").stdout
        assert "my_moe, one rank of 2: 32 tokens, hidden 512, intermediate 320, 8 experts" in text


def test_experts_without_a_gate():
    """Of a preset, or by the activation; no order of gate and up then."""
    text = invoke("plan", "--model", "nemotron-3-nano-30b-a3b", "--format", "bf16").stdout
    assert "intermediate 1,856, 128 experts, top_k 6, in bf16, no gate" in text
    options = ["--activation", "relu2_no_gate"]
    report = json.loads(invoke("plan", *SMALL, *options, "--json").stdout)
    assert report["plan"]["activation"] == "relu2_no_gate" and not report["problem"]["gated"]
    floors = [json.loads(invoke("plan", *SMALL, *o, "--json").stdout) for o in ([], options)]
    assert floors[1]["floor_math_us"] == pytest.approx(2 / 3 * floors[0]["floor_math_us"])
    text = invoke("show", *SMALL, *options, "--plain").stdout
    assert "constexpr u32 kGated = 0;" in text and "GEMMs, squared ReLU, re-quantise" in text
    for command in ("plan", "show", "warmup", "emulate"):
        message = refusal(command, *SMALL, *options, "--gate-up", "up_first")
        assert "gate_up must be left at gate_first for experts without a gate" in message


def test_a_model_brings_its_activation(tmp_path):
    report = json.loads(invoke("plan", "--model", "deepseek-v4-flash", "--json").stdout)
    assert report["plan"]["activation"] == "swiglu_clamped"
    options = ["--model", "deepseek-v4-flash", "--activation", "swiglu", "--json"]
    assert json.loads(invoke("plan", *options).stdout)["plan"]["activation"] == "swiglu"
    config = {"hidden_size": 512, "moe_intermediate_size": 320, "hidden_act": "gelu"}
    config |= {"num_experts": 16, "num_experts_per_tok": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert "GeGLU by erf" in invoke("show", "--config", path, "--plain").stdout
    path.write_text(json.dumps(config | {"hidden_act": "relu2"}))
    assert "hidden_act must be one of silu" in refusal("plan", "--config", path)


@pytest.mark.parametrize("command", ["plan", "show", "warmup"])
@pytest.mark.parametrize(
    "args, parts",
    [
        ([], ["--model", "--config", "--hidden"]),
        (["--model", "glm-4.5", "--hidden", "512"], ["one way"]),
        (["--model", "deepseek"], ["deepseek-v3", "got 'deepseek'", "did you mean"]),
        (["--hidden", "512", "--top-k", "2"], ["--intermediate", "--experts"]),
        (["--config", "/no/such/file.json"], ["/no/such/file.json"]),
        (["--model", "glm-4.5", "--ep", "7"], ["ep must divide", "160", "7"]),
        (
            ["--hidden", "500", "--intermediate", "64", "--experts", "4", "--top-k", "2"],
            ["hidden must be a multiple of 128", "500", "pad"],
        ),
    ],
)
def test_layers_that_are_not(command, args, parts):
    message = refusal(command, *args)
    assert all(part in message for part in parts), message


def test_other_mistakes(tmp_path):
    assert "gpu must be one of" in refusal("plan", *SMALL, "--gpu", "a100")
    assert "kernel exists for sm_90a" in refusal("plan", *SMALL, "--gpu", "b200")
    assert "num_tokens must be" in refusal("plan", *SMALL, "--tokens", "-1")
    assert "arch must be sm_90a, got 'sm_80'" in refusal("warmup", *SMALL, "--arch", "sm_80")
    assert "model must be one of" in refusal("demo", "--model", "gpt-2")
    assert "existing folder" in refusal("cache", "export", tmp_path / "no" / "pack.tar.gz")
    for args in (["plan", "--tokens", "many"], ["warmup", *SMALL, "-j", "0"]):
        assert "Invalid value" in invoke(*args, code=2).stderr
    said = invoke("cache", "import", tmp_path / "none", code=2).stderr  # in a box, cut into lines
    assert "does not exist" in " ".join(said.replace("│", " ").split())


def test_bad_setting_is_a_sentence(monkeypatch):
    monkeypatch.setenv("JITMOE_LINEINFO", "perhaps")
    assert "JITMOE_LINEINFO must be 0 or 1, got 'perhaps'" in refusal("warmup", *SMALL)


@pytest.mark.parametrize("tokens", [1, 8192])
def test_show(tokens):
    text = invoke("show", "--model", "qwen3-30b-a3b", "--tokens", tokens, "--plain").stdout
    assert text == invoke("show", "--model", "qwen3-30b-a3b", "--tokens", tokens).stdout
    assert text.startswith("// mega_moe") and 'extern "C" __global__' in text
    assert "#include" not in text and "\x1b[" not in text


def test_show_into_a_pipe_that_closes():
    command = f"{sys.executable} -m jitmoe show --model mixtral-8x7b | head -n 1"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, shell=True, env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout.startswith("// mega_moe") and result.stderr == ""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache, and no kernel in memory."""
    monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_memo", {})
    return tmp_path / "cache"


def test_warmup_and_the_way_of_a_cache(own_cache, tmp_path):
    assert "kernels    0, 0 bytes" in invoke("cache", "info").stdout
    assert not own_cache.exists(), "looking creates nothing"

    text = invoke("warmup", *SMALL, "-j", "2").stdout
    assert "2 of 2 kernels ready" in text and text.count("compiled in") == 2
    assert text.count(f"-> {own_cache}") == 2 and " 0 bytes spilled" in text
    assert program("warmup", *SMALL).stdout.count("from disk in") == 2

    listed = invoke("cache", "list").stdout
    assert listed.count("sm_90a") == listed.count("hidden=256 intermediate=144") == 2
    assert "bucket=decode" in listed and "bucket=prefill" in listed
    assert "2 kernels whole, 0 damaged" in invoke("cache", "verify").stdout

    pack = tmp_path / "pack.tar.gz"
    assert "2 kernels" in invoke("cache", "export", pack).stdout
    assert "2 kernels removed" in invoke("cache", "clear").stdout
    assert invoke("cache", "list").stdout == ""
    assert "2 kernels" in invoke("cache", "import", pack).stdout
    assert invoke("cache", "list").stdout.count("sm_90a") == 2
    assert program("warmup", *SMALL).stdout.count("from disk in") == 2
    assert "0 kernels removed" in invoke("cache", "clear", "--older-than", "1").stdout

    cubin = next(own_cache.glob("*/kernel.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:1000])
    assert "1 kernels whole, 1 damaged" in invoke("cache", "verify", code=1).stdout
    assert "DAMAGED" in invoke("cache", "list").stdout
    assert program("warmup", *SMALL).stdout.count("compiled in") == 1
    assert "2 kernels whole" in invoke("cache", "verify").stdout


def test_import_of_something_else(own_cache):
    result = invoke("cache", "import", ROOT / "README.md", code=1)
    assert "no pack of kernels" in result.stderr and not list(own_cache.glob("mega_moe*"))


def test_warmup_that_fails(own_cache, monkeypatch):
    def refuse(plan):
        raise nvrtc.CompileError("mega_moe compiles badly", "ptxas said no")

    monkeypatch.setattr(build, "build", refuse)
    result = invoke("warmup", *SMALL, code=1)
    assert "0 of 2 kernels ready" in result.stdout
    assert result.stderr.count("mega_moe compiles badly") == 2 and "ptxas said no" in result.stderr


def test_warmup_without_a_compiler(own_cache, monkeypatch):
    def missing():
        raise nvrtc.ToolchainError("NVRTC was not found; install jitmoe[cu12]")

    monkeypatch.setattr(prebuild, "version", missing)
    assert "install jitmoe[cu12]" in invoke("warmup", *SMALL, code=1).stderr


def test_doctor_without_a_gpu(own_cache):
    text = program("doctor", CUDA_VISIBLE_DEVICES="", JITMOE_CASH_DIR="x").stdout
    found = {line.split()[1]: line.split()[0] for line in text.splitlines() if line[:1].isalpha()}
    for name in ("python", "cuda-bindings", "cuda-core", "nvrtc", "compile", "templates", "cache"):
        assert found[name] == "ok", text
    assert "JITMOE_CASH_DIR is no switch" in text and "missing" not in found.values()
    assert not own_cache.exists()


def test_doctor_finds_what_is_missing(monkeypatch):
    def missing(*args):
        raise nvrtc.ToolchainError("NVRTC was not found")

    monkeypatch.setattr(nvrtc, "version", missing)
    monkeypatch.setattr(nvrtc, "compile", missing)
    monkeypatch.setattr(host, "compiler", missing)
    monkeypatch.setenv("JITMOE_TIMEOUT_S", "soon")
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = invoke("doctor", code=1).stdout
    assert "missing nvrtc" in text and "missing compile" in text and "pip install" in text
    assert "note    c++ compiler" in text and "JITMOE_TIMEOUT_S must be" in text
    assert "note    cupy" in text and "Traceback" not in text


def test_doctor_survives_a_broken_check(monkeypatch):
    monkeypatch.setattr(doctor, "_templates", lambda: 1 / 0)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["templates"].status == "missing"
    assert "ZeroDivisionError" in findings["templates"].text
    assert "cache" in findings


def test_doctor_on_tuned_files(monkeypatch, tmp_path):
    def found():
        return [finding for finding in doctor.examine() if finding.name == "tuned plans"]

    [off] = found()
    assert (off.status, off.text) == ("note", "off: JITMOE_TUNED is off")
    site = tmp_path / "site.json"
    monkeypatch.setenv("JITMOE_TUNED", str(site))
    first, shipped = found()
    num = len(json.loads(tuned.SHIPPED.read_text())["plans"])
    assert first.text == f"0 of {site}, which is not there yet"
    assert shipped.text == f"{num} of shipped"
    assert {first.status, shipped.status} == {"ok"}
    site.write_text("{")
    assert [one.status for one in found()] == ["note", "ok"], "of a damaged file nothing is ok"
    assert "site.json: it cannot be read" in found()[0].text and "repair" in found()[0].remedy
    site.write_text('{"version": 1, "plans": [3]}')
    whole, damaged, _ = found()
    assert whole.text == f"0 of {site}" and "entry 0" in damaged.text
    assert damaged.remedy == "remove the entry"


@pytest.mark.parametrize("kind", ["file in the way", "home unset", "off", "pack"])
def test_doctor_on_caches(kind, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    if kind == "file in the way":
        monkeypatch.setenv("JITMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
        assert "is no folder" in cache_finding().text
    elif kind == "off":
        monkeypatch.setenv("JITMOE_NO_CACHE", "1")
        assert "JITMOE_NO_CACHE is set" in cache_finding().text
    elif kind == "pack":
        monkeypatch.setenv("JITMOE_CACHE_DIR", f"{tmp_path}/new:{tmp_path}")
        findings = [finding.text for finding in doctor_files.cache()]
        assert "to be created" in findings[0] and "read only" in findings[1]
    else:
        monkeypatch.setattr("jitmoe.jit.cache.directories", lambda: (None, ()))
        assert "HOME is not set" in cache_finding().text


def cache_finding():
    (finding,) = doctor_files.cache()
    assert finding.status == "note"
    return finding


def test_demo_without_a_gpu(own_cache):
    text = program("demo", "--model", "qwen3-30b-a3b", "--ep", "4", CUDA_VISIBLE_DEVICES="").stdout
    assert "2 of 2 kernels ready" in text and "registers, 0 bytes spilled" in text
    assert text.count("PASS") == 3 and "FAIL" not in text
    assert "decode kernel of a small layer, emulated" in text and "prefill kernel" in text


def test_demo_without_a_compiler(own_cache, monkeypatch):
    def missing(*_):
        raise demo.NoHostCompiler("no C++ compiler")

    monkeypatch.setattr(demo, "EmulatedLayer", lambda *args, **kwargs: missing())
    text = invoke("demo", "--model", "qwen3-30b-a3b", "--ep", "4").stdout
    assert "No kernel was executed: no C++ compiler" in text


def test_demo_fails_if_a_kernel_is_wrong(own_cache, monkeypatch):
    monkeypatch.setattr(demo, "emulated_error", lambda *_: 0.1)
    assert "FAIL" in invoke("demo", "--model", "qwen3-30b-a3b", "--ep", "4", code=1).stdout


def test_demo_fails_if_the_oracle_is_wrong(own_cache, monkeypatch):
    monkeypatch.setattr(demo, "oracle_error", lambda: 1e-3)
    monkeypatch.setattr(prebuild, "prebuild", lambda *args: True)
    assert "FAIL" in invoke("demo", code=1).stdout


def test_loops_notice_swapped_gate_and_up():
    """The demo's own check of the oracle is worth something: it is not blind to the layout."""
    right = demo.layer_by_loops
    try:
        demo.layer_by_loops = lambda *args: right(*args[:4], args[4][:, ::-1], *args[5:])
        assert demo.oracle_error() > 1e-2
    finally:
        demo.layer_by_loops = right
    assert demo.oracle_error() < 1e-12
