"""Exact attention over whole documents in fp64, and the way between documents and the rows of ranks."""

from collections.abc import Sequence

import torch

from distca_hf.layout import Layout


def attend_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_tokens: Sequence[int], scale: float
) -> torch.Tensor:
    """Returns causal attention of each document alone, by definition, with gradients from autograd.

    Args:
        q, k, v: `[tokens, N, H]`, `[tokens, G, H]`, `[tokens, G, V]`; documents one after the other.
    """
    shared = q.shape[1] // k.shape[1]
    outputs = []
    start = 0
    for tokens in document_tokens:
        rows = slice(start, start + tokens)
        keys, values = k[rows].repeat_interleave(shared, dim=1), v[rows].repeat_interleave(shared, dim=1)
        scores = torch.einsum("tnh,snh->nts", q[rows], keys) * scale
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        outputs.append(torch.einsum("nts,snv->tnv", scores.masked_fill(~causal, float("-inf")).softmax(-1), values))
        start += tokens
    return torch.cat(outputs)


def rows_of_rank(layout: Layout, rank: int) -> torch.Tensor:
    """Returns `[rank's tokens]` indices of the rank's tokens where documents lie one after the other, without
    padding."""
    first = [0, *torch.from_numpy(layout.document_tokens).cumsum(0).tolist()]
    parts = [
        torch.arange(first[document] + start, first[document] + stop) for document, start, stop in layout.held_by(rank)
    ]
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).to(torch.int64)
