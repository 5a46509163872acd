"""Taking: before a placed micro-batch is handed out, all ranks show each other that they hold the same one."""

from collections.abc import Mapping, Sequence

from distca_hf.comm.agreement import Agreement, Occasion
from distca_hf.comm.transport import Transport
from distca_hf.errors import PlanMismatchError, and_more
from distca_hf.integrations.preparer import Prepared
from distca_hf.packing.contents import MODULUS, sum_of


def agree_to_take(transport: Transport, prepared: Prepared, number: int, facts: Mapping[str, object]) -> Agreement:
    """Starts showing the other ranks which micro-batch this one takes.

    Args:
        number: of the micro-batch.
        facts: about dataset and settings.
    """
    facts = {
        **facts,
        "documents of the micro-batch": prepared.documents_checksum,
        "fingerprint of the plan": prepared.fingerprint,
    }
    told = {
        "label_tokens": prepared.label_tokens,
        "cuts": len(prepared.cuts),
        "around_cuts": sum_of(prepared.cuts),
    }
    return Agreement.start(transport, Occasion.TAKE, number, facts, told)


def check_cuts(transport: Transport, prepared: Prepared, number: int, told: Mapping[str, Sequence[int]]) -> None:
    """Checks that the ranks on both sides of every cut hold the same document there.

    Args:
        told: numbers that all ranks told when they agreed.

    Raises:
        PlanMismatchError: some do not; names the first document, token and ranks.
    """
    if sum(told["around_cuts"]) % MODULUS == 0:
        return
    where = f"rank {transport.rank}, micro-batch {number}"
    mine = [value for cut in prepared.cuts for value in (cut.document, cut.position, cut.checksum)]
    rows = transport.gather(mine + [0] * (3 * max(told["cuts"]) - len(mine)), f"{where}, cuts").wait()
    sides: dict[tuple[int, int], dict[int, int]] = {}
    for rank, row in enumerate(rows):
        for document, position, checksum in zip(row[::3], row[1::3], row[2::3], strict=True):
            if checksum:
                sides.setdefault((document, position), {})[rank] = checksum
    different = {cut: of_ranks for cut, of_ranks in sides.items() if sum(of_ranks.values())}
    (document, position), of_ranks = next(iter(different.items()))
    raise PlanMismatchError(
        f"{where}: {' and '.join(f'rank {rank}' for rank in of_ranks)} hold other tokens or labels around token "
        f"{position} of document {document}, where it is cut between them{and_more(len(different) - 1)}; nothing was "
        "sent. All ranks must load the same dataset: shuffle it with a seed, and tokenise it once"
    )
