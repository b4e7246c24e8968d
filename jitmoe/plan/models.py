"""Layers of public models by name, and of any model by its Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jitmoe.plan.problem import MoeProblem
from jitmoe.plan.variant import Activation, Variant

# Names of a field in the configurations of the various families; the first that is set wins. A
# plain "top_k" is not among them: in a config.json it is the sampling parameter of generation.
CONFIG_KEYS = {
    # Experts of Nemotron-H may be between projections from and to fewer channels.
    "hidden": ("moe_latent_size", "hidden_size", "d_model", "dim"),
    "intermediate": (
        "moe_intermediate_size",
        "expert_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_inter_dim",
        "intermediate_size",
        "ffn_hidden_size",
    ),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "n_activated_experts",
    ),
}
# Where multimodal models keep the configuration of their language model.
NESTED_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")

# The activation in a configuration: fields of its name, the first that is set wins; names, and the
# kind that they mean behind a gate.
ACTIVATION_KEYS = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function")
ACTIVATION_NAMES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "swigluoai": "swiglu_oai",
    "gelu": "geglu_erf",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}
# The same of families whose experts have no gate.
NO_GATE = ("nemotron_h",)
NO_GATE_NAMES = {
    "relu2": "relu2_no_gate",
    "silu": "silu_no_gate",
    "swish": "silu_no_gate",
    "gelu": "gelu_erf_no_gate",
    "gelu_new": "gelu_tanh_no_gate",
    "gelu_pytorch_tanh": "gelu_tanh_no_gate",
}
# Fields that make it another than any of these if they are set, and what they do.
ACTIVATION_REFUSED = {
    "mlp_gate_softcap": "a soft cap on the gate",
    "mlp_up_softcap": "a soft cap on up",
    "swiglu_limits": "limits after the activation, layer by layer",
}
GPT_OSS_ALPHA = 1.702  # which its first configurations leave to the code
# What else the code of a model_type knows of its layers.
LAYERS = {"gpt_oss": {"gate_up": "interleaved", "has_bias": True}}
UNQUANTIZED = {"gpt_oss": "bf16"}  # format without MXFP4; of others fp8_block, which may be wanted


@dataclass(frozen=True)
class ModelShape:
    """The mixture-of-experts layers of a model.

    hidden        channels of a token
    intermediate  channels of a routed expert between its two GEMMs
    num_experts   routed experts of a layer, over all ranks; shared experts are not counted
    top_k         experts a token is routed to
    source        where the numbers were read
    activation    an Activation, or the name of a kind
    format        of the weights, unless a call names another
    gate_up, has_bias
                  as in `Variant`
    note          what to know of it in that format, in a sentence

    A model's routed_scaling_factor is no part of it: transformers multiplies it into the router
    weights (DeepSeek-V3 and V4, GLM-4.5), which a call then brings along. Engines that leave it to
    the layer pass it to `mega_moe`; it changes neither kernel nor time.

    Raises ValueError for numbers that no layer can have.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    source: str
    activation: Activation | str = Activation()
    format: str = "fp8_block"
    gate_up: str = "gate_first"
    has_bias: bool = False
    note: str = ""

    def __post_init__(self):
        object.__setattr__(self, "activation", Activation.of(self.activation))
        for field in CONFIG_KEYS:
            got = getattr(self, field)
            if type(got) is not int or got < 1:
                raise ValueError(f"{self.name}: {field} must be a positive integer, got {got!r}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"{self.name}: top_k must not exceed its {self.num_experts} experts, "
                f"got {self.top_k}"
            )

    @property
    def variant(self) -> Variant:
        """Of its calls."""
        return Variant(self.activation, gate_up=self.gate_up, has_bias=self.has_bias)

    def problem(self, num_tokens: int, ep: int = 1, format: str | None = None) -> MoeProblem:
        """The call of one rank out of `ep` that share the experts evenly (expert parallelism).

        A rank holds num_experts / ep experts and top_k stays: with ep ranks each sending
        num_tokens tokens, a rank computes num_tokens * top_k pairs on average. That is as if
        num_tokens tokens came with all their slots on this rank, and so says the returned problem.
        It hits slightly more experts than true routing when tokens are few: 8 instead of 7.2 of
        32 for DeepSeek-V3, ep=8 and one token a rank.

        `format` is of the weights (default: the model's). Raises ValueError if ep does not divide
        num_experts, or for what `MoeProblem` refuses.
        """
        if not isinstance(ep, int) or ep < 1 or self.num_experts % ep:
            raise ValueError(
                f"ep must divide the {self.num_experts} experts of {self.name}, got {ep!r}; "
                "choose a number of ranks that shares them evenly"
            )
        sizes = num_tokens, self.hidden, self.intermediate, self.num_experts // ep, self.top_k
        return MoeProblem(*sizes, format or self.format, self.activation.gated)


@cache
def _load() -> dict[str, ModelShape]:
    rows = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
    return {name: ModelShape(name, **row) for name, row in rows.items()}


def __getattr__(name: str):
    if name == "MODELS":  # read at first use: most programs bring their own shape
        return _load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def model_shape(name: str) -> ModelShape:
    """The shape called `name`, a key of `MODELS`; case and a leading organisation/ are ignored.

    Raises ValueError for an unknown name, listing the known ones and the close matches.
    """
    models = _load()
    key = name.lower().rpartition("/")[2]
    if key in models:
        return models[key]
    close = difflib.get_close_matches(key, models, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "give the path of a config.json"
    raise ValueError(f"model must be one of {', '.join(models)}, got {name!r}; {hint}")


def from_config(path: str | Path) -> ModelShape:
    """The shape in a local Hugging Face config.json, or in the folder that holds one.

    Raises ValueError if the file cannot be read, describes no mixture of experts of one shape, or
    an activation that there is no kernel for.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    experts = _find_experts(config)
    if experts is None:
        raise ValueError(
            f"{path} describes no mixture of experts: it sets none of "
            f"{', '.join(CONFIG_KEYS['num_experts'])}"
        )
    name = config.get("model_type") or path.resolve().parent.name
    fields = {field: _read(experts, field, path) for field in CONFIG_KEYS}
    known = dict(LAYERS.get(experts.get("model_type"), {}))
    known |= {"activation": _activation(experts, path), "format": _format(config, experts)}
    return ModelShape(str(name), **fields, source=str(path), **known)


def _format(config: dict, experts: dict) -> str:
    """Of the experts' weights, by the `quantization_config` that a checkpoint brings."""
    found = config.get("quantization_config") or experts.get("quantization_config")
    quantization = found if isinstance(found, dict) else {}
    if quantization.get("quant_method") == "mxfp4" and not quantization.get("dequantize"):
        return "mxfp4_bf16"
    # DeepSeek-V4's experts beside FP8: in the configuration, or in that of its quantisation.
    kinds = (part.get("expert_dtype") for part in (quantization, experts, config))
    if quantization.get("quant_method") == "fp8" and "fp4" in kinds:
        return "mxfp4_fp8"
    return UNQUANTIZED.get(experts.get("model_type"), "fp8_block")


def _find_experts(config: dict) -> dict | None:
    """The configuration that counts experts: `config` itself or one nested in it."""
    if any(config.get(key) for key in CONFIG_KEYS["num_experts"]):
        return config
    nested = (config[key] for key in NESTED_CONFIGS if isinstance(config.get(key), dict))
    return next(filter(None, map(_find_experts, nested)), None)


def _read(config: dict, field: str, path: Path) -> int:
    keys = CONFIG_KEYS[field]
    key = next((key for key in keys if config.get(key)), None)
    if key is None:
        raise ValueError(f"{path} must set the model's {field}, under one of {', '.join(keys)}")
    value = config[key]
    if isinstance(value, list):  # some families list a value per layer
        if len(set(map(repr, value))) != 1:
            raise ValueError(f"{path}: {key} must be the same in every layer, got {value}")
        value = value[0]
    return value


def _activation(config: dict, path: Path) -> Activation:
    """What the experts' gates do: silu or gelu, or the clamped function where there are numbers; or
    what experts without a gate do.
    """
    for key, what in ACTIVATION_REFUSED.items():
        value = config.get(key)
        if any(value) if isinstance(value, list) else value:
            raise ValueError(f"{path}: {key} is {what}, which there is no kernel for, got {value}")
    key = next((key for key in ACTIVATION_KEYS if config.get(key)), None)
    name = "silu" if key is None else config[key]
    names = NO_GATE_NAMES if config.get("model_type") in NO_GATE else ACTIVATION_NAMES
    if name not in names:
        raise ValueError(
            f"{path}: {key} must be one of {', '.join(names)}, got {name!r}; "
            "there is no kernel for another"
        )
    kind, alpha, limit = (
        names[name],
        config.get("swiglu_alpha"),
        config.get("swiglu_limit"),
    )
    if alpha is None and config.get("model_type") == "gpt_oss":
        alpha = GPT_OSS_ALPHA
    if kind == "swiglu" and (alpha, limit) != (None, None):
        kind = "swiglu_clamped" if alpha is None else "swiglu_oai"
    try:
        return Activation(kind, alpha, limit)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
