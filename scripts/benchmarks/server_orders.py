"""Measures what attention servers cost the host of a trainer: posting an attention call, and the vote on a step.

    torchrun --nproc-per-node 3 -m distca_hf.run --attention-servers 1 scripts/benchmarks/server_orders.py --device cpu

No attention is computed: calls are posted into the mailbox of a server that nobody started. Rank 0 writes medians, and
the slowest of a hundred.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from distca_hf.plugin import DistCAPlugin
from distca_hf.servers.job_store import open_store
from distca_hf.servers.orders import CallOrder, Kind, Order, Outbox, Phase
from distca_hf.servers.served_transport import ServedTransport
from lib.parser import add_device, at_least_two, parse_launched, parser_of


# A server that does not exist: its queue is read by nobody.
NOBODY = 1_000_000
SPEC = (0.125, 1.0, 0.0, 0.0, 0.0)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=at_least_two, default=2000, help="calls to post")
    parser.add_argument("--votes", type=at_least_two, default=200, help="steps to vote on")
    add_device(parser)
    options = parse_launched(parser)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    plugin = DistCAPlugin()
    transport = plugin.training_transport(torch.device(options.device))
    if not isinstance(transport, ServedTransport):
        raise SystemExit(
            "no attention server was launched: start it with distca_hf.run --attention-servers, see --help"
        )
    outbox = Outbox(open_store(10.0), [(NOBODY, 0)])
    call = CallOrder(1, Phase.FORWARD, 32, 8, 128, 128, 2, 0, False, SPEC)

    def vote() -> None:
        transport.begin_step()
        transport.end_step()

    _write("posting a call", _seconds(lambda: outbox.post(Order(Kind.CALL, 1, call.numbers())), options.repeats))
    _write("vote on a step", _seconds(vote, options.votes))
    plugin.close()


def _seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Returns the seconds of each of some calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds


def _write(name: str, seconds: list[float]) -> None:
    if dist.get_rank() == 0:
        slow = statistics.quantiles(seconds, n=100)[98]
        sys.stdout.write(
            f"{name}: {1e6 * statistics.median(seconds):.1f} µs, slowest of a hundred {1e6 * slow:.0f} µs\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
