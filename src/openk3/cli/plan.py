"""`k3 plan` works out what a parallel run would cost, without devices."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from openk3.cli import common
from openk3.cli.inspect import find

if TYPE_CHECKING:
    from openk3.parallel.moonep.simulate import Figures

RANKS = (8, 16, 32, 64, 128)
SKEWS = (0.2, 1.0, 4.0, 10.0)
NOTES = """\
skew      most popular expert's tokens over the mean, less 1, as drawn
plain     rows of the busiest rank over the mean without a plan; with it every rank has the same
slots     redundant experts a rank computes: median, 95th percentile, most (of at most E / R)
lent      copies of its experts that the busiest home sends
moved     rows computed away from their home
tokens    sent by rank 0 in one dispatch; plain: received by the busiest rank without a plan
experts   sent by the busiest home, bf16; their float32 gradients return as twice that
plan      the reference planner on this CPU, best of five
exposed   forward and backward: five token moves, and prefetches outlasting the own experts
loss      longer work of the busiest rank without a plan, both passes
memory    row buffers, and room for E / R redundant experts with float32 gradients"""


def main(argv: list[str]) -> int:
    """Run `k3 plan`. Returns the exit code."""
    parser = common.parser(
        "plan",
        "Simulate balanced expert parallelism: draw a skewed routing of one MoE layer, plan it\n"
        "with the planner that training uses, and count rows, bytes and memory of a rank.\n\n"
        "    k3 plan --experts\n    k3 plan --experts base --ranks 8,64 --skew 4 --bandwidth 450",
    )
    parser.add_argument("model", nargs="?", default="k3", metavar="MODEL", help="default: k3")
    parser.add_argument("--experts", action="store_true", help="plan the routed experts")
    parser.add_argument("--ranks", type=_integers, default=list(RANKS), metavar="N,N")
    parser.add_argument("--skew", type=_numbers, default=list(SKEWS), metavar="X,X")
    parser.add_argument(
        "--tokens", type=common.positive, default=8192, metavar="N", help="of a rank; default 8192"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=380.0, metavar="GB/s", help="out of a GPU; default 380"
    )
    parser.add_argument(
        "--tflops", type=float, default=600.0, metavar="N", help="of the products; default 600"
    )
    parser.add_argument("--seed", type=int, default=0)
    common.add_json(parser)
    common.add_threads(parser)
    options = parser.parse_args(argv)
    if not options.experts:
        parser.error("say what to plan: --experts")
    if min(options.bandwidth, options.tflops) <= 0:
        parser.error("--bandwidth and --tflops must be above 0")
    common.use_threads(options.threads)
    from openk3.parallel.moonep.simulate import Machine, Workload, simulate

    config = find(options.model)
    work = Workload(
        config.num_experts,
        config.num_experts_per_token,
        options.tokens,
        config.routed_expert_hidden_size,
        config.moe_intermediate_size,
    )
    machine = Machine(options.bandwidth * 1e9, options.tflops * 1e12)
    figures = [
        simulate(work, machine, ranks, skew, options.seed)
        for ranks in options.ranks
        for skew in options.skew
    ]
    if options.json:
        settings = {"workload": asdict(work), "machine": asdict(machine), "seed": options.seed}
        text = common.json_text({**settings, "layers": [asdict(f) for f in figures]})
    else:
        text = _render(options.model, figures)
    sys.stdout.write(text)
    return 0


def _render(model: str, figures: "list[Figures]") -> str:
    head = (
        "ranks", "skew", "plain", "slots", "lent", "moved", "tokens", "(plain)", "experts",
        "plan", "exposed", "loss", "memory",
    )  # fmt: skip
    rows = [
        (
            str(f.ranks),
            f"{f.skew:.1f}",
            f"{f.plain_imbalance:.2f}x",
            f"{f.slots_median:g} {f.slots_p95:g} {f.slots_max}/{f.slots_bound}",
            str(f.lent_max),
            f"{f.moved_share:.1%}",
            common.binary(f.token_bytes),
            common.binary(f.token_bytes_plain),
            common.binary(f.expert_bytes),
            f"{f.plan_ms:.1f} ms",
            f"{f.exposed_ms:.2f} ms",
            f"{f.plain_loss_ms:.2f} ms",
            f"{common.binary(f.buffer_bytes)} + {common.binary(f.slot_bytes)}",
        )
        for f in figures
    ]
    return f"one MoE layer of {model}, a rank\n\n{common.table(rows, head)}\n\n{NOTES}\n"


def _integers(text: str) -> list[int]:
    return [common.positive(item) for item in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(item) for item in text.split(",")]
