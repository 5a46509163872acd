"""One CPU process, fp32: a training step with distca against the same documents through sdpa, each alone.

    python scripts/benchmarks/cpu_step.py

Steps are interleaved and begin from equal weights. Printed are the ratio of their medians and how far losses differ.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset

import distca_hf
from distca_hf.data.documents import Tokens
from lib.model import small_llama
from lib.parser import count, few, parser_of
from lib.tables import head


VOCABULARY = 4096
# Of a short document, and of any; it takes hours on two cores.
SHORT_TOKENS, MOST_TOKENS = 512, 1_048_576


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=count, default=8, help="steps of each mix that are timed")
    parser.add_argument("--tokens", type=count, default=8192, help="most tokens of a micro-batch")
    parser.add_argument("--threads", type=few, default=2, help="threads of torch")
    options = parser.parse_args()
    if not SHORT_TOKENS <= options.tokens <= MOST_TOKENS:
        parser.error(f"--tokens {options.tokens} must be between {SHORT_TOKENS} and {MOST_TOKENS}")
    torch.set_num_threads(options.threads)

    random = np.random.RandomState(0)
    print(head(["documents", "distca ms", "sdpa ms", "distca / sdpa", "largest loss difference"]))
    mixes = {
        "long tail": np.minimum(options.tokens, random.lognormal(6.0, 1.3, 4000).astype(np.int64) + 2),
        "one long": np.full(64, options.tokens),
        "all 512": np.full(1000, SHORT_TOKENS),
    }
    for name, lengths in mixes.items():
        dataset = Dataset.from_dict({"input_ids": [random.randint(0, VOCABULARY, length) for length in lengths]})
        print(f"| {name} | {compare(dataset, options)} |", flush=True)


def compare(dataset: Dataset, options: argparse.Namespace) -> str:
    plugin = distca_hf.DistCAPlugin(tokens_per_rank=options.tokens)
    loader = plugin.dataloader(dataset)
    models = {name: small_llama(name, VOCABULARY, hidden_size=256, layers=4, heads=8) for name in ("distca", "sdpa")}
    distca_hf.enable(models["distca"], plugin)
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    difference = 0.0
    for step, batch in zip(range(options.steps + 1), loader, strict=False):
        documents = loader.documents(0, step)
        losses = {}
        for name, model in models.items():
            began = time.perf_counter()
            losses[name] = distca_step(model, batch) if name == "distca" else sdpa_step(model, documents)
            optimizers[name].step()
            optimizers[name].zero_grad()
            if step:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
        difference = max(difference, abs(losses["distca"] - losses["sdpa"]))
    distca, sdpa = (1e3 * statistics.median(seconds[name]) for name in ("distca", "sdpa"))
    return f"{distca:.0f} | {sdpa:.0f} | {distca / sdpa:.3f} | {difference:.1e}"


def distca_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


def sdpa_step(model: torch.nn.Module, documents: Sequence[Tokens]) -> float:
    labels = sum(int((document.shift_labels != -100).sum()) for document in documents)
    total = 0.0
    for document in documents:
        input_ids, targets = torch.from_numpy(document.input_ids)[None], torch.from_numpy(document.labels)[None]
        loss = model(input_ids=input_ids, labels=targets, num_items_in_batch=labels).loss
        loss.backward()
        total += loss.item()
    return total


if __name__ == "__main__":
    main()
