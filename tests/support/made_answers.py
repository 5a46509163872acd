"""Answers of other commands, as they print them with --json."""

from typing import Any


def made_simulation(gpus: tuple[int, ...] = (8, 64)) -> dict[str, Any]:
    """An answer of `distca simulate` with two ways to train."""
    ways = [
        {
            "key": key,
            "label": label,
            "is_ours": is_ours,
            "in_stages": False,
            "step_seconds": seconds,
            "tokens_per_second": 1e6 / seconds,
            "utilisation": None,
            "memory_bytes": 60 * 2**30,
            "fits": True,
            "gpu_hours": 10.0 * seconds,
            "times_as_fast": 3.0 / seconds,
            "whole": True,
            "steps": 10,
        }
        for key, label, is_ours, seconds in (
            ("plain", "plain packing", False, 3.0),
            ("placed", "distca, placed", True, 2.0),
        )
    ]
    simulations = [
        {
            "gpus": number,
            "accumulation": 4,
            "tokens_per_rank": 65536,
            "batch_size": None,
            "context_tokens": 131072,
            "step_tokens": 1e6,
            "num_stages": 1,
            "chunks": 1,
            "missing": ["rings: too few heads"],
            "ways": ways,
            "choose": "placed",
            "gain": 1.5,
            "in_short": "Choose distca.",
        }
        for number in gpus
    ]
    return {
        "kind": "distca_hf simulation",
        "lengths": "pretrain",
        "model": "llama3-8b",
        "profile": {"source": "h200.json", "date": "2026-11-21", "device": "NVIDIA H200", "remarks": ""},
        "token_budget": 1e9,
        "assumptions": ["FSDP2 in bf16"],
        "simulations": simulations,
    }
