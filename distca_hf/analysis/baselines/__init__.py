"""Baselines: what others do with the same documents, written from their papers and evaluated exactly.

| file | who holds which tokens | who computes what |
|---|---|---|
| published_greedy | ranks filled in order | query shards move from loaded to idle ranks (DistCA) |
| context_parallel | every document on all ranks of a group, zigzag | every rank its tokens, all keys gathered |
| ulysses | ranks filled in order | every rank of a group some heads of all its tokens |
| whole_documents | longest document first to the least loaded rank | every rank its documents |
| sorted_packs | packs filled in order, sorted by cost over a window | every rank its pack |

Each is one pure function from lengths to a `Baseline` (the last: one for each micro-step).
"""
