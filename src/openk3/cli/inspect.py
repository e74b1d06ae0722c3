"""`k3 inspect` says what a model is and costs, from its configuration alone."""

import sys
from pathlib import Path
from typing import Any

from openk3.cli import common, inspect_folder
from openk3.config import LADDER, ModelConfig, preset, sizes
from openk3.config.dump import describe as describe_fields
from openk3.config.load import load, resolve, take_flags
from openk3.config.recipe import Recipe
from openk3.errors import ConfigError, nearest

CONTEXTS = (1 << 10, 1 << 13, 1 << 17, 1 << 20)
_BY_CONTEXT = ("context", "forward FLOPs", "training FLOPs", "memory a sequence")


def main(argv: list[str]) -> int:
    """Run `k3 inspect`. Returns the exit code."""
    parser = common.parser(
        "inspect",
        "Parameters, FLOPs and memory of a model, without building it.\n\n"
        f"MODEL is a preset ({', '.join(LADDER)}), a recipe file, or a model folder: then the\n"
        "report is what its files hold and whether they are complete.\n"
        "Fields of the model may be changed: k3 inspect nano --num_experts 64",
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--context",
        type=lambda text: [common.positive(item) for item in text.split(",")],
        default=list(CONTEXTS),
        metavar="N,N",
        help="context lengths, such as 4096,128K",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor of a folder")
    common.add_json(parser)
    if {"-h", "--help"} & set(argv):
        parser.epilog = "Fields of the model:\n\n" + describe_fields(ModelConfig)
    settings, rest = take_flags(ModelConfig, argv, common.own_options(parser))
    options = parser.parse_args(rest)
    if (Path(options.model) / "checkpoints").is_dir():  # a run: its model is in its recipe
        options.model = str(Path(options.model) / "config.json")
    if Path(options.model).is_dir():
        if settings:
            raise ConfigError(f"{options.model} is a folder; its model cannot be changed by flags")
        return inspect_folder.run(
            Path(options.model), as_json=options.json, tensors=options.tensors
        )
    config = resolve(ModelConfig, [], settings, find(options.model))
    facts = describe(config, options.context)
    text = common.json_text(facts) if options.json else render(options.model, facts)
    sys.stdout.write(text)
    return 0


def find(name: str) -> ModelConfig:
    """The model a preset or a recipe file describes. Raises ConfigError."""
    if name in LADDER:
        return preset(name)
    if name.endswith((".toml", ".json")):
        return load(Recipe, [name]).model
    hint = nearest(name, set(LADDER))
    raise ConfigError(
        f"{name!r} is no preset{hint}, recipe file or folder; presets are {', '.join(LADDER)}"
    )


def describe(config: ModelConfig, contexts: list[int]) -> dict[str, Any]:
    """Everything the verb knows, as plain data."""
    memory = sizes.sequence_memory(config)
    return {
        "total": sizes.total_params(config),
        "total_text": sizes.total_params(config, vision=False),
        "activated": sizes.activated_params(config),
        "counting_rule": " ".join(sizes.COUNTING_RULE.split()),
        "parts": [vars(part) for part in sizes.parts(config)],
        "weight_bytes_bf16": sizes.weight_bytes(config, mxfp4_experts=False),
        "weight_bytes_mxfp4_experts": sizes.weight_bytes(config, mxfp4_experts=True),
        "flops_per_token": sizes.flops_per_token(config),
        "flops_per_token_of_context": sizes.flops_per_token_of_context(config),
        "kda_state_bytes_per_sequence": memory.kda_state,
        "conv_state_bytes_per_sequence": memory.conv_state,
        "mla_cache_bytes_per_token": memory.mla_per_token,
        "contexts": [
            {
                "context": n,
                "forward_flops_per_token": sizes.flops_per_token(config, n),
                "training_flops_per_token": sizes.training_flops_per_token(config, n),
                "bytes_per_sequence": memory.at(n),
            }
            for n in contexts
        ],
    }


def render(name: str, facts: dict[str, Any]) -> str:
    """The facts as tables for people."""
    rows = [
        (p["name"], f"{p['params']:,}", f"{p['activated']:,}", p["note"]) for p in facts["parts"]
    ]
    rows.append(("total", f"{facts['total']:,}", f"{facts['activated']:,}", ""))
    by_context = [
        (
            f"{c['context']:,}",
            common.short(c["forward_flops_per_token"]),
            common.short(c["training_flops_per_token"]),
            common.binary(c["bytes_per_sequence"]),
        )
        for c in facts["contexts"]
    ]
    return "\n\n".join(
        [
            f"{name}: {common.short(facts['total'])} parameters, "
            f"{common.short(facts['activated'])} activated",
            common.table(rows, ("module", "parameters", "activated", ""), left=(0, 3)),
            sizes.COUNTING_RULE,
            common.table(_costs(facts), left=(0, 1)),
            common.table(by_context, _BY_CONTEXT, left=()),
            "forward FLOPs: those of one token at that context. training FLOPs: forward and\n"
            "backward of a token, averaged over a sequence of that length, no recomputation.\n",
        ]
    )


def _costs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    binary, short = common.binary, common.short
    return [
        ("weights, bfloat16", binary(facts["weight_bytes_bf16"])),
        ("weights, MXFP4 experts", binary(facts["weight_bytes_mxfp4_experts"])),
        ("forward FLOPs a token", short(facts["flops_per_token"])),
        ("... and for each token of context", short(facts["flops_per_token_of_context"])),
        ("KDA state a sequence, float32", binary(facts["kda_state_bytes_per_sequence"])),
        ("convolution inputs a sequence", binary(facts["conv_state_bytes_per_sequence"])),
        ("MLA cache a token, bfloat16", f"{facts['mla_cache_bytes_per_token']:,} B"),
    ]
