"""What routings do, simulated row by row on the host: a row is (document, position, group of heads)."""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

from distca_hf.arrays import IndexRanges
from distca_hf.layout import Layout
from distca_hf.planning.kernel_calls import CallKind, KernelCall
from distca_hf.planning.pieces import ALL_HEADS, line_keys
from distca_hf.planning.plan import Plan
from distca_hf.planning.routing import QueryMoves, Routing, route
from distca_hf.planning.transfers import ExchangeChunks, key_transfers


Row = tuple[int, int, int]
# Rows of the queries and of the keys of a task: for every token one row for each group of the call.
TaskRows = tuple[list[list[Row]], list[list[Row]]]


class Simulation:
    """Rows of every rank, moved as the routings say."""

    def __init__(self, plan: Plan, num_chunks: int = 1) -> None:
        plan.validate()
        self.plan, self.groups, self.chunks = plan, plan.tasks.head_groups, ExchangeChunks.cut(plan, num_chunks)
        self.ranks = range(plan.layout.num_ranks)
        self.routings = [route(plan, rank, chunks=self.chunks) for rank in self.ranks]
        self.home = [rows_at_home(plan.layout, rank, self.groups) for rank in self.ranks]
        sent = [
            self._parts(rank, routing.send_rows, routing.send_counts) for rank, routing in enumerate(self.routings)
        ]
        self.keys_come = [self._come(rank, sent) for rank in self.ranks]
        self.keys_received = [[row for chunk in chunks for row in chunk] for chunks in self.keys_come]
        self.keys_copied = [self._taken(rank, self.routings[rank].local_rows) for rank in self.ranks]
        self.store = [self._store(rank) for rank in self.ranks]
        self.queries_come = self._queries_come()
        self.remote_queries = [self._remote_queries(rank) for rank in self.ranks]

    def held(self, rank: int) -> set[Row]:
        """What a rank holds, padding apart."""
        return {row for row in self.home[rank] if row is not None}

    def moves(self, rank: int) -> QueryMoves:
        moves = self.routings[rank].queries
        assert moves is not None
        return moves

    def _taken(self, rank: int, chosen: IndexRanges) -> list[Row]:
        """Rows at some places of a rank's layout; none of them is padding."""
        return without_gaps([self.home[rank][place] for place in chosen.numbers])

    def _parts(self, rank: int, chosen: IndexRanges, counts: np.ndarray) -> list[list[list[Row]]]:
        """The chosen rows, cut in one part for each chunk and destination."""
        rows, borders = self._taken(rank, chosen), np.cumsum([0, *counts.ravel()]).tolist()
        assert borders[-1] == len(rows)
        assert counts.shape == (self.chunks.count, len(self.ranks))
        assert not counts[:, rank].any()
        parts = [rows[start:stop] for start, stop in pairwise(borders)]
        return [parts[chunk * len(self.ranks) : (chunk + 1) * len(self.ranks)] for chunk in range(self.chunks.count)]

    def _come(self, rank: int, sent: list[list[list[list[Row]]]]) -> list[list[Row]]:
        """Rows that each chunk brings to a rank, by source."""
        return [[row for source in sent for row in source[chunk][rank]] for chunk in range(self.chunks.count)]

    def _store(self, rank: int) -> list[Row]:
        routing = self.routings[rank]
        store: list[Row | None] = [None] * routing.remote_kv_rows
        put(store, routing.received_to_remote_kv, self.keys_received[rank])
        put(store, routing.local_to_remote_kv, self.keys_copied[rank])
        return without_gaps(store)

    def _queries_come(self) -> list[list[list[Row]]]:
        """Queries that each chunk brings to each rank."""
        if not self.plan.moves_queries:
            return [[[] for _ in range(self.chunks.count)] for _ in self.ranks]
        moves = [self.moves(rank) for rank in self.ranks]
        sent = [self._parts(rank, of_rank.send_rows, of_rank.send_counts) for rank, of_rank in enumerate(moves)]
        return [self._come(rank, sent) for rank in self.ranks]

    def _remote_queries(self, rank: int) -> list[Row]:
        if not self.plan.moves_queries:
            assert self.routings[rank].queries is None
            return []
        moves = self.moves(rank)
        remote_queries: list[Row | None] = [None] * moves.num_rows
        put(remote_queries, moves.received_to_queries, [row for chunk in self.queries_come[rank] for row in chunk])
        put(remote_queries, moves.local_to_queries, self._taken(rank, moves.local_rows))
        return without_gaps(remote_queries)

    def tasks_of(self, rank: int, call: KernelCall) -> Iterator[TaskRows]:
        """Queries and keys of each task of a call, as the call says where they are."""
        spans = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
        for (first, last), (first_key, last_key) in spans:
            if call.kind is CallKind.REMOTE_QUERIES:
                queries = self._stored(self.remote_queries[rank], call, call.query_start, first, last)
            else:
                queries = self._own(rank, call, call.query_start, first, last)
            if call.kind is CallKind.LOCAL:
                keys = self._own(rank, call, call.key_start, first_key, last_key)
            else:
                keys = self._stored(self.store[rank], call, call.key_start, first_key, last_key)
            yield queries, keys

    def _own(self, rank: int, call: KernelCall, at: int, first: int, last: int) -> list[list[Row]]:
        home, groups = self.home[rank], range(*call.heads)
        tokens = range(at + first, at + last)
        return [without_gaps([home[token * self.groups + group] for group in groups]) for token in tokens]

    def _stored(self, rows: list[Row], call: KernelCall, at: int, first: int, last: int) -> list[list[Row]]:
        width = call.groups
        assert at + last * width <= len(rows)
        return [rows[at + token * width : at + (token + 1) * width] for token in range(first, last)]

    @cached_property
    def attended(self) -> list["Attended"]:
        """What the kernel calls of each rank attend to."""
        return [Attended(self, rank) for rank in self.ranks]

    def computed(self, rank: int) -> set[Row]:
        """Queries that a rank is to compute, by the tasks."""
        return {row for row, computing in self.computing_ranks.items() if computing == rank}

    @cached_property
    def computing_ranks(self) -> dict[Row, int]:
        """Rank that computes each query, by the tasks."""
        return {row: int(self.plan.tasks.rank[task]) for row, task in self.task_of.items()}

    @cached_property
    def task_of(self) -> dict[Row, int]:
        """Task of each query."""
        tasks, found = self.plan.tasks, {}
        columns = zip(
            tasks.document.tolist(), tasks.start.tolist(), tasks.stop.tolist(), tasks.head.tolist(), strict=True
        )
        for task, (document, start, stop, head) in enumerate(columns):
            for group in range(self.groups) if head == ALL_HEADS else [head]:
                for position in range(start, stop):
                    assert (document, position, group) not in found
                    found[document, position, group] = task
        return found

    @cached_property
    def home_of(self) -> dict[Row, int]:
        """Rank that holds each row."""
        return {row: rank for rank in self.ranks for row in self.held(rank)}

    @cached_property
    def remote_tasks(self) -> set[int]:
        """Tasks with queries of another rank than the one that computes them."""
        return {task for row, task in self.task_of.items() if self.computing_ranks[row] != self.home_of[row]}

    def store_by_definition(self, rank: int) -> list[Row]:
        """For every document, or group of its heads: the keys that are read in the remote KV. Those of remote queries
        are all they attend to, and all their task does; those of local queries are what comes before an unbroken
        stretch of them in the layout."""
        positions: dict[tuple[int, int], set[int]] = {}
        first_key = self.plan.tasks.mask.first_key

        def read(row: Row, stop: int) -> None:
            positions.setdefault((row[0], row[2]), set()).update(range(first_key(row[1]), stop))

        for row in self.computed(rank):
            if self.task_of[row] in self.remote_tasks:
                read(row, row[1] + 1)
        at_home = [row if self._stays(row, rank) else None for row in self.home[rank]]
        for place, stays in enumerate(at_home):
            if stays is None:
                continue
            document, position, group = stays
            before = at_home[place - self.groups] if place >= self.groups else None
            if before != (document, position - 1, group):
                read(stays, position)
        divided = set(self.plan.tasks.document[self.plan.tasks.head != ALL_HEADS].tolist())
        # All heads of a document that are together come with its first group.
        lines = [line for line in positions if line[0] in divided or line[1] == 0]
        lines.sort(key=lambda line: (line[0] in divided, line))
        store: list[Row] = []
        for chunk in range(self.chunks.count):
            for document, group in lines:
                groups = [group] if document in divided else range(self.groups)
                cuts = self.borders(rank, document, group if document in divided else ALL_HEADS)
                here = sorted(x for x in positions[document, group] if cuts[chunk] <= x < cuts[chunk + 1])
                store += [(document, position, of_token) for position in here for of_token in groups]
        return store

    def borders(self, rank: int, document: int, head: int) -> np.ndarray:
        """Where chunks cut a prefix that a rank reads."""
        return self.chunks.borders_of(rank, line_keys(np.array([document]), np.array([head]), self.groups))[0]

    def _stays(self, row: Row | None, rank: int) -> bool:
        return row is not None and self.computing_ranks[row] == rank and self.task_of[row] not in self.remote_tasks


class Attended:
    """How often every query attends to every key on one rank, by kind of call.

    Attributes:
        own, far, remote_queries: by document and group of heads, `[queries, keys]` of the whole document.
    """

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation, self.rank = simulation, rank
        routing = simulation.routings[rank]
        self.own, self.far, self.remote_queries = (
            self._counted(calls) for calls in (routing.local, routing.prefix, routing.remote_queries)
        )

    def _counted(self, calls: tuple[KernelCall, ...]) -> dict[tuple[int, int], np.ndarray]:
        lengths, groups = self.simulation.plan.layout.document_tokens.tolist(), self.simulation.groups
        counted = {
            (document, group): np.zeros((tokens, tokens), dtype=np.int64)
            for document, tokens in enumerate(lengths)
            for group in range(groups)
        }
        for call in calls:
            pairs_of_tasks = []
            for queries, keys in self.simulation.tasks_of(self.rank, call):
                before = sum(int(counts.sum()) for counts in counted.values())
                self._count(queries, keys, call, counted)
                pairs_of_tasks.append(sum(int(counts.sum()) for counts in counted.values()) - before)
            assert call.pairs_of_tasks.tolist() == pairs_of_tasks
            assert call.pairs == sum(pairs_of_tasks)
        return counted

    def _count(
        self,
        queries: list[list[Row]],
        keys: list[list[Row]],
        call: KernelCall,
        counted: dict[tuple[int, int], np.ndarray],
    ) -> None:
        assert queries
        for number, query in enumerate(queries):
            place = number + len(keys) - len(queries)  # masks are aligned bottom-right
            first_seen = max(0, place + 1 - call.window_tokens) if call.window_tokens else 0
            seen = keys[first_seen : place + 1 if call.kind.is_causal else None]
            assert seen
            for at, (document, position, group) in enumerate(query):
                of_group = [key[at] for key in seen]
                assert all((row[0], row[2]) == (document, group) for row in of_group)
                np.add.at(counted[document, group], (position, [row[1] for row in of_group]), 1)


def rows_at_home(layout: Layout, rank: int, groups: int = 1) -> list[Row | None]:
    """Content of a rank's rows; None in padding."""
    rows: list[Row | None] = [
        (document, position, group)
        for document, start, stop in layout.held_by(rank)
        for position in range(start, stop)
        for group in range(groups)
    ]
    return rows + [None] * (int(layout.rank_rows[rank]) * groups - len(rows))


def without_gaps(rows: list[Row | None]) -> list[Row]:
    """Rows of which none is padding, or was not written."""
    assert None not in rows
    return [row for row in rows if row is not None]


def put(target: list[Row | None], places: IndexRanges, rows: list[Row]) -> None:
    """Writes rows to their places, each of which is written once."""
    for place, row in zip(places.numbers, rows, strict=True):
        assert target[place] is None
        target[place] = row


def check_call_shapes(routing: Routing) -> None:
    """Where each kind of call reads its queries and keys, and that starts, stops and offsets say the same."""
    for call in (*routing.local, *routing.prefix, *routing.remote_queries):
        assert call.cu_seqlens_q[0] == call.cu_seqlens_k[0] == 0
        assert (np.diff(call.cu_seqlens_q) > 0).all()
        assert (np.diff(call.cu_seqlens_k) > 0).all()
        assert len(call.cu_seqlens_q) == len(call.cu_seqlens_k) >= 2
    for call in routing.local:
        assert call.kind is CallKind.LOCAL
        assert (call.query_start, call.query_stop) == (call.key_start, call.key_stop)
        assert call.cu_seqlens_q.tolist() == call.cu_seqlens_k.tolist()
        assert call.query_stop - call.query_start == call.cu_seqlens_q[-1]
    for call in routing.prefix:
        assert call.kind is CallKind.PREFIX
        assert call.query_stop - call.query_start == call.cu_seqlens_q[-1]
        assert call.key_stop - call.key_start == call.cu_seqlens_k[-1] * call.groups
    for call in routing.remote_queries:
        assert call.kind is CallKind.REMOTE_QUERIES
        assert call.heads == (0, call.groups)
        assert call.query_stop - call.query_start == call.cu_seqlens_q[-1] * call.groups
        assert call.key_stop - call.key_start == call.cu_seqlens_k[-1] * call.groups


def check_attention(simulation: Simulation) -> None:
    """Every query attends exactly once to each key that its mask shows it, on the rank of its task."""
    total: dict[tuple[int, int], np.ndarray] = {}
    for rank, attended in enumerate(simulation.attended):
        check_call_shapes(simulation.routings[rank])
        for line in attended.own:
            own, far, remote_queries = attended.own[line], attended.far[line], attended.remote_queries[line]
            everything = own + far + remote_queries
            assert everything.max(initial=0) <= 1  # own square, far prefix and remote queries do not overlap
            assert not ((own.any(axis=1) | far.any(axis=1)) & remote_queries.any(axis=1)).any()
            assert not (far.any(axis=1) & ~own.any(axis=1)).any()  # a prefix is merged into what local calls wrote
            queries = np.flatnonzero(everything.any(axis=1)).tolist()
            assert all(simulation.computing_ranks[line[0], query, line[1]] == rank for query in queries)
            total[line] = total.get(line, 0) + everything
    for counts in total.values():
        first, keys = simulation.plan.tasks.mask.first_key(np.arange(len(counts))), np.arange(len(counts))
        assert (counts == ((first[:, None] <= keys) & (keys <= keys[:, None]))).all()
    assert [routing.pairs for routing in simulation.routings] == simulation.plan.work.tolist()


def check_keys(simulation: Simulation) -> None:
    """Ranks receive the keys they lack, each once and nothing else; remote KV holds what calls read, chunk by chunk,
    in order of the documents."""
    sends = any(simulation.keys_received)
    for rank, routing in enumerate(simulation.routings):
        first_key = simulation.plan.tasks.mask.first_key
        needed = {
            (document, key, group)
            for document, query, group in simulation.computed(rank)
            for key in range(first_key(query), query + 1)
        }
        assert sorted(simulation.keys_received[rank]) == sorted(needed - simulation.held(rank))
        assert simulation.store[rank] == simulation.store_by_definition(rank)
        assert routing.exchanges == sends
        for other, other_routing in enumerate(simulation.routings):
            assert (routing.send_counts[:, other] == other_routing.receive_counts[:, rank]).all()


def check_kept(simulation: Simulation) -> None:
    """Backward gets in one chunk what forward got in several: kept rows find their place in its remote KV, and remote
    queries that are kept are its remote queries."""
    at_once, kept = Simulation(simulation.plan), key_transfers(simulation.plan, simulation.chunks)
    for rank in simulation.ranks:
        routing = route(simulation.plan, rank, kept=kept)
        store: list[Row | None] = [None] * routing.remote_kv_rows
        put(store, routing.kept_to_remote_kv, simulation.keys_received[rank])
        put(store, routing.local_to_remote_kv, at_once.keys_copied[rank])
        assert store == at_once.store[rank]
        assert routing.kept_in_order == (store == simulation.keys_received[rank])
        assert (
            routing.received_to_remote_kv.numbers.tolist()
            == at_once.routings[rank].received_to_remote_kv.numbers.tolist()
        )
        assert at_once.remote_queries[rank] == simulation.remote_queries[rank]


def check_shared_rows(simulation: Simulation) -> None:
    """Shared are the rows that are sent or copied, once each; where these are among them is written down."""
    for rank, routing in enumerate(simulation.routings):
        sent, copied, shared = (x.numbers for x in (routing.send_rows, routing.local_rows, routing.shared_rows))
        assert len(set(shared.tolist())) == len(shared)
        assert set(shared.tolist()) == {*sent.tolist(), *copied.tolist()}
        assert shared[routing.send_in_shared.numbers].tolist() == sent.tolist()
        assert shared[routing.local_in_shared.numbers].tolist() == copied.tolist()
        # The gradients of all others are whole when local calls have run.
        own = simulation.attended[rank].own
        for row in simulation.held(rank) - {simulation.home[rank][place] for place in shared}:
            document, position, group = row
            everywhere = sum(
                counts[document, group][:, position]
                for attended in simulation.attended
                for counts in (attended.own, attended.far, attended.remote_queries)
            )
            assert (own[document, group][:, position] == everywhere).all()


def check_orders(simulation: Simulation) -> None:
    """Rows are said to come in order where what arrives is, as it is, what the calls read; not where it is not."""
    for rank, routing in enumerate(simulation.routings):
        assert routing.come_in_order == (simulation.keys_received[rank] == simulation.store[rank])
        places = routing.received_to_remote_kv.numbers.tolist()
        assert routing.come_in_order == (not simulation.keys_copied[rank] and places == list(range(len(places))))
        if routing.queries is not None:
            places = routing.queries.received_to_queries.numbers.tolist()
            in_order = routing.queries.local_rows.total == 0 and places == list(range(len(places)))
            assert routing.queries.come_in_order == in_order


def check_chunks(simulation: Simulation) -> None:
    """Calls of a chunk read what it brings, and what is there anyway; all of a prefix if they attend for remote
    queries."""
    for rank, routing in enumerate(simulation.routings):
        assert len(routing.prefix_of_chunk) == len(routing.remote_queries_of_chunk) == simulation.chunks.count
        own = set(simulation.keys_copied[rank])
        own_queries = simulation.remote_queries[rank] and simulation.held(rank)
        for chunk, (far, remote_queries) in enumerate(
            zip(routing.prefix_of_chunk, routing.remote_queries_of_chunk, strict=True)
        ):
            assert [call.key_start for call in far] == sorted(call.key_start for call in far)  # as they lie
            keys_there = {*simulation.keys_come[rank][chunk], *own}
            queries_there = {*simulation.queries_come[rank][chunk], *own_queries}
            for call in (*far, *remote_queries):
                for queries, keys in simulation.tasks_of(rank, call):
                    assert keys_there.issuperset(row for key in keys for row in key)
                    if call in remote_queries:
                        assert queries_there.issuperset(row for query in queries for row in query)
