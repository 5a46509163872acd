"""Baselines: the same documents under other planners and kinds of parallelism, evaluated exactly.

They are written from their papers.

| function | owner ranks of tokens | ranks that compute |
|---|---|---|
| published_greedy | ranks filled in order | query shards move from loaded to idle ranks (DistCA) |
| context_parallel | every document on all ranks of a group, zigzag | every rank its tokens, all keys gathered |
| ulysses | ranks filled in order | every rank of a group some heads of all its tokens |
| whole_documents | longest document first to the least loaded rank | every rank its documents |
| sorted_packs | packs filled in order, sorted by cost over an optimizer step | every rank its pack |

Each is one pure function from lengths to a `Baseline` (the last: one for each micro-step).
"""
